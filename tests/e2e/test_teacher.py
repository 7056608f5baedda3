"""Whole runs that learn from a teacher alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.recipe import (
    SMALL,
    assert_same_metrics,
    metrics_of,
    run_job,
    seeded_metrics,
    task_flags,
)
from tests.rank_pool import RankPool
from tests.scoring_server import scoring_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ALONE = (
    *SMALL,
    "--expert-model-parallel-size",
    "1",
    "--rl-reward",
    "none",
    "--rl-routing-replay",
    "off",
    "--rl-deterministic",
)
SAMPLES_PER_STEP = 16


def test_a_lost_server_ends_the_run_with_everything_saved(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    """The third step fails, is repeated by the resumed run, and is that of a run without it."""
    checkpoint = checkpoint_factory("qwen3")
    flags = (*ALONE, "--rl-num-steps", "4", "--rl-teacher-wait-minutes", "0.02")
    with scoring_server(checkpoint) as server:

        def flags_of(folder: str, *more: str) -> list[str]:
            of_run = (
                *flags,
                "--rl-teacher",
                server.url,
                "--save",
                str(tmp_path / f"{folder}.saved"),
            )
            return task_flags(checkpoint, tmp_path / folder, *of_run, *more)

        run_job(ranks, flags_of("whole"), world_size=1).require(0)
        expected = seeded_metrics(tmp_path / "whole")
        server.requests.clear()
        server.max_num_requests = 2 * SAMPLES_PER_STEP
        ended = run_job(ranks, flags_of("lost"), world_size=1)
        ended.require(75)
        assert "--rl-teacher-wait-minutes" in ended.said and "resume with --load" in ended.said
        assert len(metrics_of(tmp_path / "lost")) == 2
        server.max_num_requests = None
        load = ("--load", str(tmp_path / "lost.saved"))
        run_job(ranks, flags_of("lost", *load), world_size=1).require(0)
    found = seeded_metrics(tmp_path / "lost")
    assert found.keys() == expected.keys()
    for step in expected:
        assert "teacher/reverse_kl" in expected[step] or step == 4
        assert_same_metrics(found[step], expected[step])
