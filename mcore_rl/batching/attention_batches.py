"""Packed samples of similar lengths, put side by side so that one call attends to many of them.

A kernel that is called for every sample of a packed row spends more time on being called than on a
short sample; padding all samples to the longest would waste as much where lengths differ. So the
segments of a row are sorted by their lengths and cut into batches in which padding is bounded.

Shape legend: k segments of a row, b of a batch, q and s the most queries and keys in it.
This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.batching.rows import prefix_lengths

# A batch's segments have at least this share of the queries and keys of its longest, or are
# shorter by no more than so many.
LEAST_SHARE, MOST_PADDING = 0.8, 8
# Booleans of a mask, of which kernels make floats; beyond, prompts' queries are computed again.
MOST_OF_A_MASK = 2**22


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Where the queries and keys of some segments are in a row; padding is anywhere in the row."""

    queries: torch.Tensor  # [b, q] int64
    is_query: torch.Tensor  # [b, q] bool, False for padding and for what another batch computes
    keys: torch.Tensor  # [b, s] int64
    visible: torch.Tensor | None  # [b, 1, q, s] bool; None: q = s, and keys up to the query's own
    is_whole_row: bool = False  # one segment that is all of the row


def similar_segments(bounds: torch.Tensor, prefix_of: torch.Tensor | None) -> list[SegmentBatch]:
    """Every position of the row is a query of exactly one batch.

    Segments begin at `bounds` `[k + 1]`; `prefix_of` `[k]` names the segment that goes before each,
    itself if there is none. A query sees that one whole, and its own up to itself.
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
        _batch(starts[of], lengths[of], before_starts[of], before[of])
        for of in _similar(lengths.tolist(), before.tolist(), bounds.device)
    ]


def _similar(lengths: list[int], before: list[int], device: torch.device) -> list[torch.Tensor]:
    """Segments in groups; none of no length."""
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
    # Behind the last key of a segment there may be no row any more. No query sees it.
    keys = torch.where(place < (before + lengths)[:, None], keys, 0)
    num_queries = int(lengths.max())
    with_mask = bool(before.any()) and len(starts) * num_queries * num_keys <= MOST_OF_A_MASK
    if not with_mask:  # the prompt's queries as well, as the causal mask needs no memory
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
