"""Megatron against transformers, and a checkpoint there and back, over splits.

Of the two main architectures; test_families does it for every family, over TP2 PP2 EP2.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.dist.checkpoints import assert_log_probs_equal_transformers, differing
from tests.dist.layouts import SPLITS, job_flags
from tests.rank_pool import RankPool

COMPARED = ("tp1_pp1_ep1", "tp2_pp1_ep1", "tp1_pp2_ep1", "tp1_pp1_ep2")
CASES = [(arch, split) for arch in ("deepseek_v3", "qwen3_moe") for split in COMPARED]


@pytest.mark.parametrize(("arch", "split"), CASES)
def test_log_probs_and_export_equal_transformers_in_float32(
    arch: str,
    split: str,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    checkpoint = checkpoint_factory(arch)
    target = tmp_path / "exported"
    results = ranks.run(
        "tests.dist.jobs:log_probs_and_export",
        world_size=SPLITS[split][3],
        flags=job_flags(checkpoint, split),
        target=target,
    )
    assert_log_probs_equal_transformers(results, checkpoint)
    assert differing(checkpoint, target) == []
    assert len(list(target.glob("*.safetensors"))) > 1, "one file shows nothing about several"
    AutoModelForCausalLM.from_pretrained(target)


def test_weight_that_is_not_finite_ends_all_ranks_with_one_sentence(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    """Only the second stage reads it."""
    broken = Path(shutil.copytree(checkpoint_factory("deepseek_v3"), tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.experts.3.up_proj.weight"][7, 9] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    outcomes = ranks.run_raw(
        "tests.dist.jobs:log_probs_and_export",
        world_size=2,
        flags=job_flags(broken, "tp1_pp2_ep1"),
        target=tmp_path / "out",
    )
    assert [outcome.exit_code for outcome in outcomes] == [2, 2], outcomes[0].output[-2000:]
    assert f"model.layers.1.mlp.experts.3.up_proj.weight in {broken}" in outcomes[0].output
    assert "holds nan at [7, 9]" in outcomes[0].output
    assert not any("Traceback" in outcome.output for outcome in outcomes)
