"""The tiny job on other Megatrons: it trains, hands over bit for bit, saves and goes on.

Each is the source of a release, as a package index has it, made a checkout that stands first on
Python's path. By default the oldest alone; `-m versions` takes all of them, and
MCORE_RL_MEGATRON_SOURCES="folder:folder" adds checkouts that no index has, such as Megatron-LM's
main.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.dist.checkpoints import assert_log_probs_equal_transformers, differing
from tests.dist.layouts import job_flags
from tests.megatron_sources import RELEASES, git, other_sources, release
from tests.rank_pool import RankPool
from tests.versions.tiny_job import (
    TinyJob,
    assert_proven,
    assert_resumed,
    assert_stored_as_loaded,
    run_tiny_job,
)

pytestmark = [pytest.mark.slow, pytest.mark.versions, pytest.mark.timeout(1500)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tried" in metafunc.fixturenames:
        asked_for = "versions" in metafunc.config.option.markexpr
        names = [*(RELEASES if asked_for else RELEASES[:1]), *other_sources()]
        metafunc.parametrize("tried", names, indirect=True, scope="module")


@dataclass(frozen=True)
class Tried:
    """A Megatron and what it has left behind. `commit` is that of its checkout, None where it is
    none."""

    version: str | None
    commit: str | None
    pool: RankPool
    job: TinyJob


@pytest.fixture(scope="module")
def tried(request: Any, warmed_checkpoint: Path, tmp_path_factory: Any) -> Iterator[Tried]:
    name = request.param
    source = release(name) if name in RELEASES else Path(name)
    pool = RankPool(first_on_path=source)
    try:
        yield Tried(
            version=name if name in RELEASES else None,
            commit=git(source, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"),
            pool=pool,
            job=run_tiny_job(pool, warmed_checkpoint, tmp_path_factory.mktemp("versions")),
        )
    finally:
        pool.close()


def test_every_hand_over_is_proven_and_the_models_agree(tried: Tried) -> None:
    assert_proven(tried.job)


def test_what_vllm_stores_is_what_its_own_loader_stores(tried: Tried) -> None:
    assert_stored_as_loaded(tried.job)


def test_a_run_resumes_bit_for_bit(tried: Tried) -> None:
    assert_resumed(tried.job)


def test_the_summary_names_the_code_that_ran(tried: Tried) -> None:
    versions = tried.job.versions
    assert versions.get("megatron-core commit") == tried.commit
    if tried.version is not None:
        assert versions["megatron-core"] == tried.version


@pytest.mark.parametrize(
    ("arch", "part"), [("nemotron_3", "Mamba-2 layers"), ("qwen3_next", "gated delta nets")]
)
def test_layers_that_keep_a_state_are_computed_or_refused(
    arch: str, part: str, tried: Tried, checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    """Megatron has them from 0.19 on, under the names that the weight map expects."""
    checkpoint = checkpoint_factory(arch)
    outcomes = tried.pool.run_raw(
        "tests.dist.jobs:log_probs_and_export",
        world_size=2,
        flags=job_flags(checkpoint, "tp2_pp1_ep1"),
        target=tmp_path / "exported",
    )
    said = "".join(outcome.output for outcome in outcomes)
    if tried.version is not None and tried.version < "0.19":
        assert [outcome.exit_code for outcome in outcomes] == [2, 2]
        assert f"{part}, which this Megatron lacks; install megatron-core 0.19" in said
        return
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], said[-4000:]
    assert_log_probs_equal_transformers([outcome.result for outcome in outcomes], checkpoint)
    assert differing(checkpoint, tmp_path / "exported") == []
