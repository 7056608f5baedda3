"""The splits that tests compare, and the flags for them."""

from __future__ import annotations

from pathlib import Path

# (TP, PP, EP), and how many processes it takes.
SPLITS = {
    "tp1_pp1_ep1": (1, 1, 1, 1),
    "tp2_pp1_ep1": (2, 1, 1, 2),
    "tp1_pp2_ep1": (1, 2, 1, 2),
    "tp1_pp1_ep2": (1, 1, 2, 2),
    "tp2_pp2_ep2": (2, 2, 2, 4),
}


def split_flags(split: str) -> list[str]:
    tp_size, pp_size, ep_size, _ = SPLITS[split]
    return [
        *("--tensor-model-parallel-size", str(tp_size)),
        *("--pipeline-model-parallel-size", str(pp_size)),
        *("--expert-model-parallel-size", str(ep_size)),
    ]


def job_flags(checkpoint: Path, split: str, *more: str, micro_batch_size: int = 2) -> list[str]:
    """Flags of a job of 8 samples in 2 mini-batches on a checkpoint, in float32."""
    flags = split_flags(split)
    return [
        *("--rl-hf-checkpoint", str(checkpoint)),
        *("--rl-precision", "fp32"),
        *("--rl-num-prompts-per-step", "4"),
        *("--rl-num-samples-per-prompt", "2"),
        *("--rl-num-mini-batches", "2"),
        *("--rl-max-prompt-tokens", "64"),
        *("--rl-max-response-tokens", "64"),
        *("--micro-batch-size", str(micro_batch_size)),
        *flags,
        *more,
    ]
