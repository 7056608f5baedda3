"""gpt-oss as it is published, in MXFP4, on four ranks: into Megatron, into vLLM, and back.

Everything is held against a bfloat16 folder that has what the blocks stand for, of whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from mcore_rl.model.config_json import read_model_shape
from tests.dist.jobs import random_tokens
from tests.dist.layouts import job_flags
from tests.dist.test_families import PROMPTS, loaded, log_probs_of
from tests.dist.test_float8 import content, differing
from tests.mxfp4_checkpoint import make_mxfp4
from tests.rank_pool import RankPool


def test_mxfp4_is_trained_served_and_exported_as_what_it_stands_for(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    """One start of Megatron and of the engines."""
    published, standing_for = make_mxfp4(checkpoint_factory("gpt_oss"), tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    flags = [
        *job_flags(published, "tp2_pp2_ep1"),  # engines split experts, too
        *("--rl-prompts", str(prompts), "--rl-no-chat-template"),
        *("--rl-cache-dir", str(tmp_path / "cache")),
    ]
    exported = tmp_path / "exported"
    results = ranks.run(
        "tests.dist.families_jobs:all_ways",
        world_size=4,
        flags=flags,
        target=exported,
        published=standing_for,
    )
    assert differing(exported, standing_for, at_least=30) == []
    assert read_model_shape(exported).quantization is None
    weight_map = json.loads((exported / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == content(exported).keys()
    model = loaded(exported)
    expected = log_probs_of(model, random_tokens(model.config.vocab_size))
    for result in results:
        found = torch.tensor(result["log_probs"])[:, :-1]
        assert (found - expected).abs().max() <= 1e-4
        # The engine has what its own loader makes of the other folder.
        assert result["num_stored"] > 15
        verification = result["verification"]
        assert verification["stored_equal"], verification["differing"]
        assert result["published_stored_otherwise"] == []
        assert result["published_log_probs"] == verification["vllm_log_probs"]
        assert verification["mean_abs_difference"] < 0.04
