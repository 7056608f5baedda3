"""Megatron's gated delta net with the local kernels: transformers' numbers, in all splits.

That whole models agree, test_families shows, and their updates test_family_invariance.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.checkpoints import assert_log_probs_equal_transformers, differing
from tests.dist.layouts import job_flags
from tests.dist.test_family_invariance import CP2, FLAGS, TP2
from tests.dist.test_invariance import JOB
from tests.dist.updates import Outcome, differences_of, learned
from tests.multimodal import make_multimodal
from tests.rank_pool import RankPool

TOLERANCE = 1e-5  # relative, in float32
ODD = [1, 129, 3, 64, 77]
FOURFOLD = [4, 132, 8, 64, 76]  # two chunks for each of two context-parallel ranks
SPLITS = {
    "one process": ({}, ODD),
    "TP2": ({"tp_size": 2}, ODD),
    "CP2": ({"cp_size": 2}, FOURFOLD),
    "TP2 CP2": ({"tp_size": 2, "cp_size": 2}, FOURFOLD),
}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("split", SPLITS)
def test_output_and_gradients_equal_transformers(split: str, packed: bool, ranks: RankPool) -> None:
    degrees, lengths = SPLITS[split]
    results = ranks.run(
        "tests.dist.delta_net_jobs:compare_with_transformers",
        world_size=degrees.get("tp_size", 1) * degrees.get("cp_size", 1),
        lengths=lengths if packed else [lengths[1]] * 2,
        packed=packed,
        **degrees,
    )
    for found in results:
        assert found.pop("unequal", 0.0) == 0.0  # bit for bit, sample by sample
        assert len(found) == 2 + 6 and max(found.values()) < TOLERANCE, found


PACKED = ("--rl-max-tokens-per-microbatch", "128", "--rl-share-prompts")
UPDATES = {
    "packed": (1, (*PACKED, "off")),
    "packed, with shared prompts": (1, (*PACKED, "on")),
    "packed, TP2": (2, (*PACKED, "off", *TP2)),
    "packed, CP2": (2, (*PACKED, "off", *CP2)),
}


@pytest.mark.slow
def test_update_on_packed_rows_is_that_on_padded_ones(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    def learn(num_processes: int, *flags: str) -> Outcome:
        checkpoint = checkpoint_factory("qwen3_next")
        target = tmp_path / str(len(list(tmp_path.iterdir())))
        common = ["--rl-hf-checkpoint", str(checkpoint), *FLAGS, *flags]
        return learned(ranks, common, num_processes, target, job=JOB, num_steps=1)

    expected = learn(1)
    for name, (num_processes, flags) in UPDATES.items():
        outcome = learn(num_processes, *flags)
        assert bool(outcome.found["sharing"]) == ("shared" in name)
        differences_of(outcome, expected).assert_small()


@pytest.mark.parametrize("arch", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_text_model_saved_from_a_multimodal_one(
    arch: str, checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    """Its names keep their prefix in an export."""
    from transformers import AutoModelForCausalLM

    text = checkpoint_factory(arch)
    whole = make_multimodal(text, arch.removesuffix("_text"), tmp_path / "whole")
    checkpoint = shutil.copytree(text, tmp_path / "text")  # for its tokenizer
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(checkpoint)
    found = ranks.run(
        "tests.dist.jobs:log_probs_and_export",
        world_size=2,
        flags=job_flags(checkpoint, "tp2_pp1_ep1"),
        target=str(tmp_path / "exported"),
    )
    assert_log_probs_equal_transformers(found, checkpoint)
    assert differing(checkpoint, tmp_path / "exported") == []
