"""What checkpoints hold, and what transformers computes with them: oracles for several tests."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel

from mcore_rl.model.families import TEXT_CONFIG
from tests.dist.jobs import random_tokens
from tests.dist.layouts import SPLITS, job_flags
from tests.model_shapes import model_class
from tests.multimodal import load_multimodal
from tests.rank_pool import RankPool

# What an engine stores that comes from no checkpoint.
NO_WEIGHT = re.compile(r"(cos_sin_cache|_[kvq]_scale|_prob_scale|_expert_map)$")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def differing(a: Path, b: Path, at_least: int = 20) -> list[str]:
    """Names of the tensors that one folder lacks, or that differ in dtype or in any byte.

    The folders must share `at_least` tensors.
    """
    left, right = tensors_of(a), tensors_of(b)
    both = left.keys() & right.keys()
    assert len(both) >= at_least
    return sorted(left.keys() ^ right.keys()) + [
        name
        for name in sorted(both)
        if left[name].dtype != right[name].dtype
        or not torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8))
    ]


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint in transformers, by the class of its family, whatever its model_type, or by
    that of the multimodal model that it is."""
    # By the class's own reader, which knows how it writes infinite numbers.
    config, _ = PreTrainedConfig.get_config_dict(folder)
    if TEXT_CONFIG in config:
        return load_multimodal(folder, dtype)
    found = model_class(config.pop("model_type"))
    model, info = found.from_pretrained(
        folder,
        config=found.config_class(**config),
        dtype=dtype,
        output_loading_info=True,
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    return model


def log_probs_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """`[samples, positions - 1]` of `tokens`."""
    with torch.no_grad():
        logits = model(tokens).logits.double()
    return logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]


def assert_log_probs_equal_transformers(
    log_probs: Sequence[Any], checkpoint: Path, *, tolerance: float = 1e-4
) -> None:
    """Each rank's log-probs of `random_tokens`, `[samples, positions]`, against float32."""
    model = loaded(checkpoint)
    size = model.config.get_text_config().vocab_size
    expected = log_probs_of(model, random_tokens(size))
    for of_rank in log_probs:  # every rank has all of them
        assert (torch.tensor(of_rank)[:, :-1] - expected).abs().max() <= tolerance


def run_all_ways(
    ranks: RankPool, checkpoint: Path, split: str, folder: Path, *more: str, **arguments: Any
) -> list[dict[str, Any]]:
    """`families_jobs.all_ways` on the ranks of a split; exports to `folder / "exported"`."""
    prompts = folder / "prompts.jsonl"
    letters = [random.Random(seed).choices(string.ascii_letters, k=40) for seed in range(6)]
    rows = [{"prompt": "".join(each), "answer": ""} for each in letters]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ranks.run(
        "tests.dist.families_jobs:all_ways",
        world_size=SPLITS[split][3],
        flags=[
            *job_flags(checkpoint, split),
            *("--rl-prompts", str(prompts), "--rl-no-chat-template"),
            *("--rl-cache-dir", str(folder / "cache"), *more),
        ],
        target=folder / "exported",
        **arguments,
    )
