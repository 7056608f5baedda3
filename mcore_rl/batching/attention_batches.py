"""Batches of packed samples with similar lengths, so that one attention call handles many.

One kernel call per sample of a packed row costs more in call overhead than in work on short
samples; padding all samples to the longest wastes as much if lengths differ. The segments of a row
are therefore sorted by length and cut into batches with bounded padding.

Shape legend: k segments of a row, b of a batch, q and s the most queries and keys in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.batching.rows import prefix_lengths, prefixes_of

# A segment of a batch has at least LEAST_SHARE of the queries and keys of the longest segment, or
# is at most MOST_PADDING shorter.
LEAST_SHARE, MOST_PADDING = 0.8, 8
# Maximum elements of a bool mask, which kernels convert to float. Above it, the queries of the
# prompt are recomputed.
MOST_OF_A_MASK = 2**22


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Places of some segments' queries and keys in a row; padding may point anywhere in it.

    Example: segments of 3 and 2 tokens without a prefix:

        queries, keys  [[0, 1, 2], [3, 4, 0]]
        is_query       [[T, T, T], [T, T, F]]
    """

    queries: torch.Tensor  # [b, q] int64
    is_query: torch.Tensor  # [b, q] bool, False for padding and queries of another batch
    keys: torch.Tensor  # [b, s] int64
    visible: torch.Tensor | None  # [b, 1, q, s] bool; None: q = s, and keys up to the query's own
    is_whole_row: bool = False  # one segment that fills the row


@dataclass(frozen=True, slots=True)
class RowBatches:
    """The batches of a row, with the places of all of them, one batch after the other."""

    batches: list[SegmentBatch]
    queries: torch.Tensor  # [sum of b * q] int64
    keys: torch.Tensor  # [sum of b * s] int64
    outputs: torch.Tensor  # [t] int64: of each position of the row, its place among the queries

    @property
    def query_sizes(self) -> list[int]:
        """Return how many of `queries` each batch has."""
        return [batch.queries.numel() for batch in self.batches]

    @property
    def key_sizes(self) -> list[int]:
        """Return how many of `keys` each batch has."""
        return [batch.keys.numel() for batch in self.batches]


_BATCHES = "_mcore_rl_batches"


def batches_of(bounds: torch.Tensor) -> RowBatches:
    """Return the batches of a row whose segments begin at `bounds` `[k + 1]`, with the prefixes
    attached to it. They stay attached for the other layers."""
    found: RowBatches | None = getattr(bounds, _BATCHES, None)
    if found is None:
        batches = similar_segments(bounds, prefixes_of(bounds))
        queries = torch.cat([batch.queries.flatten() for batch in batches])
        # Without padding.
        taken = torch.cat([batch.is_query.flatten() for batch in batches]).nonzero().flatten()
        found = RowBatches(
            batches,
            queries,
            keys=torch.cat([batch.keys.flatten() for batch in batches]),
            outputs=taken[queries[taken].argsort()],
        )
        setattr(bounds, _BATCHES, found)
    return found


def similar_segments(bounds: torch.Tensor, prefix_of: torch.Tensor | None) -> list[SegmentBatch]:
    """Return the batches of a row; every position is a query of exactly one batch.

    Segments begin at `bounds` `[k + 1]`; `prefix_of` `[k]` is the segment before each, or itself. A
    query sees all of that segment, and its own segment up to itself.
    """
    starts, lengths = bounds[:-1].long(), bounds.diff().long()
    if prefix_of is None:
        before, before_starts = torch.zeros_like(lengths), starts
    else:
        before, before_starts = prefix_lengths(bounds, prefix_of).long(), starts[prefix_of]
    if len(lengths) == 1:
        everything = torch.arange(int(lengths), device=bounds.device)[None]
        return [SegmentBatch(everything, everything >= 0, everything, None, is_whole_row=True)]
    return [
        _batch(starts[segments], lengths[segments], before_starts[segments], before[segments])
        for segments in _similar(lengths.tolist(), before.tolist(), bounds.device)
    ]


def _similar(lengths: list[int], before: list[int], device: torch.device) -> list[torch.Tensor]:
    """Return groups of similar segments, without empty segments."""
    keys = [own + prefix for own, prefix in zip(lengths, before, strict=True)]
    order = [i for i in range(len(keys)) if lengths[i] > 0]
    order.sort(key=lambda i: (lengths[i], keys[i]), reverse=True)
    groups: list[list[int]] = []
    least = most = 0  # keys in the last group
    for i in order:
        least, most = min(least, keys[i]), max(most, keys[i])
        if groups and _alike(lengths[i], lengths[groups[-1][0]]) and _alike(least, most):
            groups[-1].append(i)
        else:
            groups.append([i])
            least = most = keys[i]
    return [torch.tensor(group, device=device) for group in groups]


def _alike(shorter: int, longer: int) -> bool:
    return shorter >= LEAST_SHARE * longer or longer - shorter <= MOST_PADDING


def _batch(
    starts: torch.Tensor, lengths: torch.Tensor, before_starts: torch.Tensor, before: torch.Tensor
) -> SegmentBatch:
    num_keys = int((before + lengths).max())
    place = torch.arange(num_keys, device=starts.device)
    keys = torch.where(
        place < before[:, None],
        before_starts[:, None] + place,
        (starts - before)[:, None] + place,
    )
    # Places after a segment's last key may lie outside the row. No query sees them.
    keys = torch.where(place < (before + lengths)[:, None], keys, 0)
    num_queries = int(lengths.max())
    with_mask = bool(before.any()) and len(starts) * num_queries * num_keys <= MOST_OF_A_MASK
    if not with_mask:  # includes the prompt's queries; the causal mask needs no memory
        own = (place >= before[:, None]) & (place < (before + lengths)[:, None])
        return SegmentBatch(keys, own, keys, None)
    query = torch.arange(num_queries, device=starts.device)
    is_query = query < lengths[:, None]
    visible = place <= (before[:, None] + query)[:, :, None]
    return SegmentBatch(
        queries=torch.where(is_query, starts[:, None] + query, 0),
        is_query=is_query,
        keys=keys,
        visible=visible[:, None],
    )
