"""Dividing samples into bins of equal cost.

Karmarkar and Karp's largest differencing method for k bins ("The differencing method of set
partitioning", UCB/CSD 82/113, 1982): every number starts as a partition of its own, of one full and
k - 1 empty bins; the two partitions whose sums are furthest apart are joined again and again, the
fullest bin of one with the emptiest of the other.

This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.tensors import active_parameters


def partition(costs: Sequence[float] | np.ndarray, num_bins: int) -> list[np.ndarray]:
    """`num_bins` arrays of indices into `costs`, each ascending, of sums that are nearly equal.

    Every index is in exactly one bin; bins are empty where there are fewer numbers than bins. The
    same numbers give the same bins, on every rank.
    """
    costs = np.asarray(costs, dtype=np.float64)
    assert num_bins >= 1, f"{num_bins} bins"
    if num_bins == 1:
        return [np.arange(len(costs))]
    heap: list[tuple[float, int, np.ndarray, list[list[int]]]] = []
    for index, cost in enumerate(costs):
        sums = np.zeros(num_bins)
        sums[-1] = cost
        heap.append((-cost, index, sums, [*([] for _ in range(num_bins - 1)), [index]]))
    heapq.heapify(heap)
    # Ties are broken by age, so that arrays are never compared.
    age = len(costs)
    while len(heap) > 1:
        _, _, sums, bins = heapq.heappop(heap)
        _, _, other_sums, other_bins = heapq.heappop(heap)
        joined = sums + other_sums[::-1]  # both ascend
        merged = [a + b for a, b in zip(bins, reversed(other_bins), strict=True)]
        order = np.argsort(joined, kind="stable")
        joined = joined[order]
        merged = [merged[i] for i in order]
        heapq.heappush(heap, (joined[0] - joined[-1], age, joined, merged))
        age += 1
    found = heap[0][3] if heap else [[] for _ in range(num_bins)]
    return [np.array(sorted(indices), dtype=np.int64) for indices in found]


@dataclass(frozen=True, slots=True)
class SampleFlops:
    """Floating-point operations of a forward pass over one sample, of its length."""

    per_token: float  # matrix products with weights
    per_token_pair: float  # attention, of which a causal mask needs half of all pairs

    @classmethod
    def of(cls, shape: ModelShape) -> SampleFlops:
        """Twice the parameters that a token meets; two products of a query with each earlier key,
        one with its value."""
        if shape.latent is not None:
            width = shape.latent.qk_nope_head_dim + shape.latent.qk_rope_head_dim
            width += shape.latent.v_head_dim
        else:
            width = 2 * shape.head_dim
        pairs = 2.0 * shape.num_layers * shape.num_heads * width / 2
        return cls(per_token=2.0 * active_parameters(shape), per_token_pair=pairs)

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        lengths = np.asarray(lengths, dtype=np.float64)
        return lengths * self.per_token + lengths**2 * self.per_token_pair
