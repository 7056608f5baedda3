"""Which segment of a packed row goes before each: the prompt that samples share.

Shape legend: k segments of a row.
This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import torch

# Megatron hands the bounds of a row on to attention and rotation, and nothing else of it, so that
# what goes before each segment travels with them.
_PREFIXES = "_mcore_rl_prefix_of"


def set_prefixes(bounds: torch.Tensor, prefix_of: torch.Tensor) -> None:
    """Note on the bounds of a packed row `[k + 1]` which segment goes before each `[k]`."""
    setattr(bounds, _PREFIXES, prefix_of)


def prefixes_of(bounds: torch.Tensor) -> torch.Tensor | None:
    """What was noted; None where the samples of a row share nothing."""
    return getattr(bounds, _PREFIXES, None)


def prefix_lengths(bounds: torch.Tensor, prefix_of: torch.Tensor) -> torch.Tensor:
    """`[k]`: tokens of the shared prompt before each of the segments that begin at `bounds`."""
    alone = prefix_of == torch.arange(len(prefix_of), device=prefix_of.device)
    return bounds.diff()[prefix_of].masked_fill(alone, 0)
