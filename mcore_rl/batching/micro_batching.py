"""How samples become micro-batches, and which positions of a row a context-parallel rank takes.

Context parallelism cuts every sample of a packed row, and every padded row, into twice as many
equal chunks as there are ranks; rank i takes chunk i from the front and chunk i from the back, so
that a causal mask gives all of them the same work. It is the order in which Megatron cuts its own
batches, and the only one that Transformer Engine's attention knows.

Shape legend: k samples of a row.
This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

_Number = TypeVar("_Number", int, np.ndarray, torch.Tensor)


def chunks_of_sample(cp_size: int) -> int:
    """How many equal chunks context parallelism cuts a sample into; what its length divides by."""
    return 2 * cp_size if cp_size > 1 else 1


def positions_on_cp_rank(
    bounds: torch.Tensor, share: int, *, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """`[share]` int64, the positions of a row that a context-parallel rank takes, ascending.

    The row's samples begin at `bounds` `[k + 1]`, from 0 to `share` x `cp_size`; their lengths
    are multiples of `chunks_of_sample`. Any device; nothing waits for it.
    """
    starts, inside = samples_on_cp_rank(bounds, share, cp_size=cp_size, cp_rank=cp_rank)
    return starts + inside


def samples_on_cp_rank(
    bounds: torch.Tensor, share: int, *, cp_size: int, cp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `positions_on_cp_rank`: where in the row its sample begins, and the position in there."""
    lengths = bounds.diff() // cp_size  # on each rank
    of_samples = torch.stack([bounds[:-1], bounds[:-1] // cp_size, lengths // 2])
    starts, mine, half = of_samples.repeat_interleave(lengths, dim=1, output_size=share).long()
    nth = torch.arange(share, device=bounds.device) - mine
    # Half of them are chunk i from the front, the others chunk i from the back.
    skipped = torch.where(nth < half, cp_rank, 2 * (cp_size - 1) - cp_rank)
    return starts, nth + half * skipped


def round_up(number: _Number, multiple_of: int) -> _Number:
    """The next multiple, of each number."""
    return -(-number // multiple_of) * multiple_of


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """How samples become micro-batches.

    With `max_tokens` > 0 samples are packed into one row a micro-batch, of at most so many tokens;
    else a micro-batch is `micro_batch_size` padded rows of one sample each.
    """

    max_tokens: int = 0  # --rl-max-tokens-per-microbatch
    micro_batch_size: int = 1  # --micro-batch-size, without packing
    # Row lengths: sequence parallelism needs a multiple of tp_size on every context-parallel rank.
    multiple_of: int = 1
    cp_size: int = 1
    # Megatron's pipeline sends buffers of one shape, so all rows of a rank have the longest length.
    same_length: bool = False
    # The interleaved schedule takes micro-batches by the pipeline's size.
    count_multiple_of: int = 1
    # Packed and without context parallelism: a prompt is computed once for its samples in a row.
    share_prompts: bool = False  # --rl-share-prompts
    # What a sample costs, of its length; equal costs balance data-parallel ranks.
    cost: Callable[[np.ndarray], np.ndarray] = np.asarray

    @property
    def packed(self) -> bool:
        return self.max_tokens > 0

    @property
    def row_multiple(self) -> int:
        """What the length of every row is a multiple of."""
        return math.lcm(self.multiple_of, chunks_of_sample(self.cp_size))
