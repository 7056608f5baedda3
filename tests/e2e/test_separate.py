"""Whole runs whose engines have ranks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.observe.timeline import ENGINES, IDLE, SAMPLING, TRAINER, UPDATE, read_timeline
from tests.e2e.recipe import MEASURED, SMALL, metrics_of, run_job, task_flags
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TP2 = ("--tensor-model-parallel-size", "2")


def test_synchronous_engines_reproduce_a_colocated_run(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    tokens = (
        *SMALL,
        *TP2,
        "--rl-num-steps",
        "3",
        "--rl-eval-interval",
        "2",
        "--rl-num-eval-prompts",
        "8",
    )
    apart = ("--rl-rollout-ranks", "2-3", "--rl-max-staleness", "0")
    for name, world_size, more in (("together", 2, ()), ("apart", 4, apart)):
        flags = task_flags(warmed_checkpoint, tmp_path / name, *tokens, *more)
        run_job(ranks, flags, world_size=world_size).require(0)
    together, apart_ = (metrics_of(tmp_path / name) for name in ("together", "apart"))
    assert _lasting(apart_) == _lasting(together)
    _check_idle_times(tmp_path / "apart")


def _check_idle_times(run_dir: Path) -> None:
    """Both sides wait for each other, and the timeline has a row for each."""
    timeline = read_timeline(run_dir / "timeline.jsonl")
    for step, metrics in enumerate(metrics_of(run_dir)[:-1]):
        assert 0 < metrics["idle/trainers"] < 1 and 0 < metrics["idle/engines"] < 1
        whats = {
            line.role: {span.what for span in line.spans} for line in timeline if line.step == step
        }
        assert {IDLE, UPDATE, SAMPLING} <= whats[ENGINES]
        assert {IDLE, "train"} <= whats[TRAINER] and "rollout" not in whats[TRAINER]


def _lasting(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            name: value
            for name, value in step.items()
            if not name.startswith((*MEASURED, "reshard/"))
        }
        for step in metrics
    ]
