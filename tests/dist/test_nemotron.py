"""Nemotron-3 in Megatron, whose experts vLLM does not run here: against transformers.

What `test_families.py` shows with engines is shown by `tests/cuda/test_vllm_models.py` instead.
Nemotron-H is here for packed rows and context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.checkpoints import assert_log_probs_equal_transformers, differing, loaded
from tests.dist.layouts import SPLITS, job_flags
from tests.dist.test_families import saved_by_transformers
from tests.dist.test_sparse_attention import WAYS
from tests.rank_pool import RankPool

pytestmark = pytest.mark.timeout(400)

# arch -> fields of config.json, of odd sizes.
CASES = {
    "nemotron_h": {"ssm_state_size": 7, "mamba_head_dim": 11, "hybrid_override_pattern": "MM*-"},
    "nemotron_3": {"ssm_state_size": 9, "moe_intermediate_size": 52},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arch", CASES)
def test_log_probs_equal_transformers_and_export_the_checkpoint(
    arch: str,
    way: str,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    checkpoint, (split, more) = checkpoint_factory(arch, overrides=CASES[arch]), WAYS[way]
    if arch == "nemotron_h":
        split = split.replace("ep2", "ep1")
    log_probs = ranks.run(
        "tests.dist.jobs:log_probs_and_export",
        world_size=SPLITS[split][3],
        flags=job_flags(checkpoint, split, *more),
        target=tmp_path / "exported",
    )
    assert_log_probs_equal_transformers(log_probs, checkpoint)
    assert differing(checkpoint, tmp_path / "exported") == []
    loaded(tmp_path / "exported")


def test_folder_saved_by_transformers_is_read_as_the_published_one(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    published = checkpoint_factory("nemotron_3")
    saved = saved_by_transformers(published, tmp_path)
    log_probs = ranks.run(
        "tests.dist.jobs:log_probs_and_export",
        world_size=1,
        flags=job_flags(saved, "tp1_pp1_ep1"),
        target=tmp_path / "exported",
    )
    assert_log_probs_equal_transformers(log_probs, published)
    assert differing(saved, tmp_path / "exported") == []
