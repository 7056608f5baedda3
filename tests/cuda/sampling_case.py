"""Requests whose next token vLLM's sampler draws in triton_job.py."""

from __future__ import annotations

from typing import Any

import torch

SAMPLING: tuple[dict[str, Any], ...] = (
    dict(temperature=1.0),
    dict(temperature=0.7),
    dict(temperature=1.0, top_p=0.9),
    dict(temperature=1.3, top_p=0.5),
    dict(temperature=1.0, top_k=50),
    dict(temperature=0.6, top_p=0.95, top_k=20),
    dict(temperature=0.0),
)
# Up to 63 bits, as a run's are; the position is that of the token before.
SEEDS = tuple((1 << 62) + 987654321987 * number for number in range(len(SAMPLING)))
POSITIONS = tuple(range(100, 100 + len(SAMPLING)))
VOCAB_SIZE = 3000


def logits() -> torch.Tensor:
    """`[requests, v]` float32"""
    generator = torch.Generator().manual_seed(1)
    return 3 * torch.randn(len(SAMPLING), VOCAB_SIZE, generator=generator)
