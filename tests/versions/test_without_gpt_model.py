"""The tiny job on the installed Megatron without its GPTModel, as on the day that it is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.common.megatron_version import find_megatron
from tests.megatron_sources import megatron_on_the_path
from tests.rank_pool import RankPool
from tests.versions.tiny_job import (
    assert_proven,
    assert_resumed,
    assert_stored_as_loaded,
    run_tiny_job,
)

pytestmark = [pytest.mark.slow, pytest.mark.versions, pytest.mark.timeout(1500)]


def test_a_run_needs_no_gpt_model(warmed_checkpoint: Path, tmp_path: Path) -> None:
    """It trains, hands over, is verified, saves and goes on, with HybridModel by itself."""
    installed = find_megatron()
    assert installed is not None
    source = tmp_path / "megatron"
    megatron_on_the_path(source, installed.version, has_gpt_model=False)
    pool = RankPool(first_on_path=source)
    try:
        job = run_tiny_job(pool, warmed_checkpoint, tmp_path)
    finally:
        pool.close()
    assert_proven(job)
    assert_stored_as_loaded(job)
    assert_resumed(job)
