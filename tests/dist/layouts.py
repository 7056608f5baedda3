"""The splits that tests compare, and the flags for them."""

from __future__ import annotations

from pathlib import Path

import torch

# (TP, PP, EP, world size)
SPLITS = {
    "tp1_pp1_ep1": (1, 1, 1, 1),
    "dp2": (1, 1, 1, 2),
    "tp2_pp1_ep1": (2, 1, 1, 2),
    "tp1_pp2_ep1": (1, 2, 1, 2),
    "tp1_pp1_ep2": (1, 1, 2, 2),
    "tp2_pp1_ep2": (2, 1, 2, 2),
    "tp2_pp2_ep1": (2, 2, 1, 4),
    "tp1_pp2_ep2": (1, 2, 2, 4),
    "tp2_pp2_ep2": (2, 2, 2, 4),
}


def job_flags(
    checkpoint: Path,
    split: str,
    *more: str,
    precision: str = "fp32",
    micro_batch_size: int = 2,
) -> list[str]:
    """Flags of a job of 8 samples in 2 mini-batches on a checkpoint."""
    tp_size, pp_size, ep_size, _ = SPLITS[split]
    # The default of 1 GiB is filled with zeros at each start of an engine.
    cache = () if torch.cuda.is_available() else ("--rl-rollout-kv-cache-gib", "0.1")
    return [
        *("--rl-hf-checkpoint", str(checkpoint)),
        *("--rl-precision", precision),
        *("--rl-num-prompts-per-step", "4"),
        *("--rl-num-samples-per-prompt", "2"),
        *("--rl-num-mini-batches", "2"),
        *("--rl-max-prompt-tokens", "64"),
        *("--rl-max-response-tokens", "64"),
        *("--micro-batch-size", str(micro_batch_size)),
        *("--tensor-model-parallel-size", str(tp_size)),
        *("--pipeline-model-parallel-size", str(pp_size)),
        *("--expert-model-parallel-size", str(ep_size)),
        *cache,
        *more,
    ]
