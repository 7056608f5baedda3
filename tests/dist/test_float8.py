"""A checkpoint in FP8 blocks on four ranks: into Megatron, into vLLM, and back.

Everything is held against a bfloat16 folder that has what the blocks stand for, of whole tensors.
No dimension that is cut is a multiple of 128 blocks of 128, so that TP cuts through blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_rl.model.config_json import read_model_shape
from tests.dist.jobs import random_tokens
from tests.dist.layouts import job_flags
from tests.dist.test_families import PROMPTS, loaded, log_probs_of
from tests.float8_checkpoint import make_float8
from tests.rank_pool import RankPool

SIZES = {
    "hidden_size": 192,
    "intermediate_size": 320,  # 160 rows or columns of a TP rank
    "moe_intermediate_size": 160,  # of the shared expert 80
    "qk_nope_head_dim": 48,
    "v_head_dim": 48,
}


@dataclass(frozen=True)
class Outcome:
    blocks: Path
    standing_for: Path
    exported: Path
    exported_blocks: Path
    results: list[dict[str, Any]]  # each rank's


@pytest.fixture(scope="module")
def outcome(
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcome:
    """One start of Megatron and of the engines."""
    folder = tmp_path_factory.mktemp("float8")
    blocks, standing_for = make_float8(checkpoint_factory("kimi_k2", overrides=SIZES), folder)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    flags = [
        *job_flags(blocks, "tp2_pp2_ep2"),
        *("--rl-prompts", str(prompts), "--rl-no-chat-template"),
        *("--rl-cache-dir", str(folder / "cache")),
    ]
    exported, exported_blocks = folder / "exported", folder / "exported_blocks"
    results = ranks.run(
        "tests.dist.families_jobs:all_ways",
        world_size=4,
        flags=flags,
        target=exported,
        published=standing_for,
        float8_target=exported_blocks,
    )
    return Outcome(blocks, standing_for, exported, exported_blocks, results)


def content(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def differing(a: Path, b: Path, at_least: int = 41) -> list[str]:
    """Names of what is in one folder only, or not the same bytes."""
    left, right = content(a), content(b)
    both = left.keys() & right.keys()
    assert len(both) >= at_least
    return sorted(left.keys() ^ right.keys()) + [
        name
        for name in sorted(both)
        if left[name].dtype != right[name].dtype
        or not torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8))
    ]


def test_megatron_has_what_the_blocks_stand_for(outcome: Outcome) -> None:
    assert differing(outcome.exported, outcome.standing_for) == []
    model = loaded(outcome.exported)
    expected = log_probs_of(model, random_tokens(model.config.vocab_size))
    for result in outcome.results:
        found = torch.tensor(result["log_probs"])[:, :-1]
        assert (found - expected).abs().max() <= 1e-4


def test_blocks_that_nobody_trained_are_exported_as_published(outcome: Outcome) -> None:
    assert differing(outcome.exported_blocks, outcome.blocks) == []
    before, after = (
        json.loads((folder / "config.json").read_text())
        for folder in (outcome.blocks, outcome.exported_blocks)
    )
    assert after == before
    assert read_model_shape(outcome.exported).quantization is None


def test_engine_starts_from_the_folder_and_gets_what_the_blocks_stand_for(
    outcome: Outcome,
) -> None:
    """Against vLLM's own load of the bfloat16 folder, by its own loader from its files."""
    for result in outcome.results:
        assert result["num_stored"] > 15
        verification = result["verification"]
        assert verification["stored_equal"], verification["differing"]
        assert verification["num_tensors"] == len(content(outcome.standing_for))
        assert result["published_stored_otherwise"] == []
        assert result["published_log_probs"] == verification["vllm_log_probs"]
        assert verification["mean_abs_difference"] < 0.04
