"""How samples become micro-batches: what `--rl-max-tokens-per-microbatch` and the layout say.

This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mcore_rl.batching.context_chunks import chunks_of_sample


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
