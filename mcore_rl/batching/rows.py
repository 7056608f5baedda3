"""Layout of a micro-batch as rows of a model: one packed row, or one padded row per sample.

Attention gets the lengths of the samples in a packed row, and stays within each sample.

With `share_prompts` consecutive samples of one prompt in a packed micro-batch share its tokens. A
group of n samples after a prompt of p tokens then takes p - 1 + sum(1 + response) positions instead
of sum(p + response), and each sample attends to the shared tokens before its own. Each sample keeps
the prompt's last token, which scores the first token of its response. (Prefix sharing, as in
"Prefix Grouper", arXiv 2506.05433.)

Context parallelism cuts every sample of a packed row, and every padded row, into twice as many
equal chunks as there are ranks. Rank i takes chunk i from the front and chunk i from the back, so
that all ranks have the same work under a causal mask. Megatron cuts its own batches in this order,
and Transformer Engine's attention supports no other.

Shape legend: b samples of a micro-batch, t their tokens, one sample after the other; s positions of
a row, on all context-parallel ranks; k segments of a packed row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from mcore_rl.batching.types import TrainBatch

_Number = TypeVar("_Number", int, np.ndarray, torch.Tensor)


def chunks_of_sample(cp_size: int) -> int:
    """Return the number of equal chunks per sample, which must divide its padded length."""
    return 2 * cp_size if cp_size > 1 else 1


def positions_on_cp_rank(
    bounds: torch.Tensor, share: int, *, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Return `[share]` int64, a context-parallel rank's positions of a row, ascending.

    The row's samples begin at `bounds` `[k + 1]`, from 0 to `share` x `cp_size`; their lengths
    are multiples of `chunks_of_sample`. Works on any device, without synchronising.
    """
    starts, inside = samples_on_cp_rank(bounds, share, cp_size=cp_size, cp_rank=cp_rank)
    return starts + inside


def samples_on_cp_rank(
    bounds: torch.Tensor, share: int, *, cp_size: int, cp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `positions_on_cp_rank` in two parts: the sample's start, the place in the sample."""
    lengths = bounds.diff() // cp_size  # on each rank
    per_sample = torch.stack([bounds[:-1], bounds[:-1] // cp_size, lengths // 2])
    starts, mine, half = per_sample.repeat_interleave(lengths, dim=1, output_size=share).long()
    nth = torch.arange(share, device=bounds.device) - mine
    # The first half is chunk i from the front, the second chunk i from the back.
    skipped = torch.where(nth < half, cp_rank, 2 * (cp_size - 1) - cp_rank)
    return starts, nth + half * skipped


def round_up(number: _Number, multiple_of: int) -> _Number:
    """Round up to a multiple, elementwise."""
    return -(-number // multiple_of) * multiple_of


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """Division of samples into micro-batches.

    With `max_tokens` > 0 samples are packed into one row per micro-batch, of at most `max_tokens`
    tokens. Otherwise a micro-batch is `micro_batch_size` padded rows of one sample each.

    Example: `MicroBatching(max_tokens=4096, multiple_of=2)` packs rows for two TP ranks.
    """

    max_tokens: int = 0  # --rl-max-tokens-per-microbatch
    micro_batch_size: int = 1  # --micro-batch-size, without packing
    # Row lengths: sequence parallelism needs a multiple of tp_size on every context-parallel rank.
    multiple_of: int = 1
    cp_size: int = 1
    # Megatron's pipeline sends buffers of one shape, so all rows of a rank have the longest length.
    same_length: bool = False
    # The interleaved schedule needs a multiple of the pipeline size.
    count_multiple_of: int = 1
    # Packed and without context parallelism: a prompt is computed once for its samples in a row.
    share_prompts: bool = False  # --rl-share-prompts
    # Cost of samples as a function of their lengths; equal costs balance data-parallel ranks.
    cost: Callable[[np.ndarray], np.ndarray] = np.asarray

    @property
    def packed(self) -> bool:
        return self.max_tokens > 0

    @property
    def row_multiple(self) -> int:
        """Divisor of the length of every row."""
        return math.lcm(self.multiple_of, chunks_of_sample(self.cp_size))


# Megatron passes only the bounds of a row to attention and rotation, so the prefix of each segment
# is attached to them.
_PREFIXES = "_mcore_rl_prefix_of"


def set_prefixes(bounds: torch.Tensor, prefix_of: torch.Tensor) -> None:
    """Attach to the bounds `[k + 1]` of a packed row the segment before each segment `[k]`."""
    setattr(bounds, _PREFIXES, prefix_of)


def prefixes_of(bounds: torch.Tensor) -> torch.Tensor | None:
    """Return the attached prefixes; None if the samples of a row share nothing."""
    return getattr(bounds, _PREFIXES, None)


def prefix_lengths(bounds: torch.Tensor, prefix_of: torch.Tensor) -> torch.Tensor:
    """Return `[k]`: tokens of the shared prompt before each segment of `bounds`."""
    alone = prefix_of == torch.arange(len(prefix_of), device=prefix_of.device)
    return bounds.diff()[prefix_of].masked_fill(alone, 0)


@dataclass(frozen=True, slots=True)
class ModelRows:
    """Model inputs of a micro-batch on one context-parallel rank, and the places of its tokens.

    Example: samples [5, 6, 7] and [8, 9], packed into a row of 6 positions:

        token_ids     [[5, 6, 7, 8, 9, 0]]
        position_ids  [[0, 1, 2, 0, 1, 0]]
        cu_seqlens    [0, 3, 5, 6]
        places        [0, 1, 2, 3, 4]
        scored        [1, 3], if 7 and 9 were generated
    """

    token_ids: torch.Tensor  # [rows, s / cp_size] int64, padded with 0 after real tokens
    position_ids: torch.Tensor  # [rows, s / cp_size] int64, from 0 in every sample
    target_ids: torch.Tensor  # [rows, s / cp_size] int64, next tokens; the last of a sample: masked
    # [k + 1] int32, starts of the samples, padding included, in the complete packed row; the row's
    # padding is one more entry, a shared prompt is another, and the rest of each of its samples has
    # its own. None where each row is one sample.
    cu_seqlens: torch.Tensor | None
    longest: int  # positions of the longest sample, on all context-parallel ranks
    # [t] int64, places of the tokens in the flattened rows of all context-parallel ranks, in order
    places: torch.Tensor
    # [n] int64, sorted: this rank's positions whose outputs a loss or a metric uses, in
    # [s / cp_size, rows], flattened
    scored: torch.Tensor
    # [k] int64, the segment (a shared prompt) before each of the k segments, or itself.
    # None if nothing is shared.
    prefix_of: torch.Tensor | None = None


def row_length(micro_batches: Sequence[TrainBatch], batching: MicroBatching) -> int | None:
    """Return the common row length of these micro-batches, or None if each has its own."""
    if not batching.same_length:
        return None
    return max(_needed(micro_batch, batching) for micro_batch in micro_batches)


def _needed(micro_batch: TrainBatch, batching: MicroBatching) -> int:
    if batching.packed:
        tokens = int(_segments(micro_batch, batching).lengths.sum())
    else:
        tokens = int(round_up(micro_batch.lengths, chunks_of_sample(batching.cp_size)).max())
    return round_up(max(tokens, 1), batching.row_multiple)


@dataclass(frozen=True, slots=True)
class _Segments:
    """Segments of a packed row: samples, or shared prompts and the rests of their samples."""

    lengths: torch.Tensor  # [k] int64, padded for context parallelism
    prefix_of: torch.Tensor  # [k] int64, the segment before it, or itself
    own: torch.Tensor  # [b] int64, the segment of each sample
    shared: torch.Tensor  # [b] int64, its tokens in the segment before


def _segments(micro_batch: TrainBatch, batching: MicroBatching) -> _Segments:
    shared = torch.zeros_like(micro_batch.lengths)
    lengths: list[int] = []
    prefix_of: list[int] = []
    own: list[int] = []
    for first, last in _samples_of_prompts(micro_batch, batching):
        prefix = len(lengths)
        if last - first > 1:
            tokens = int(micro_batch.prompt_lengths[first]) - 1
            shared[first:last] = tokens
            lengths.append(tokens)
            prefix_of.append(prefix)
        for sample in range(first, last):
            own.append(len(lengths))
            prefix_of.append(prefix)
            lengths.append(int(micro_batch.lengths[sample] - shared[sample]))
    return _Segments(
        lengths=round_up(
            torch.tensor(lengths, dtype=torch.int64), chunks_of_sample(batching.cp_size)
        ),
        prefix_of=torch.tensor(prefix_of, dtype=torch.int64),
        own=torch.tensor(own, dtype=torch.int64),
        shared=shared,
    )


def _samples_of_prompts(micro_batch: TrainBatch, batching: MicroBatching) -> list[tuple[int, int]]:
    """Return (first, last + 1) of consecutive samples that share a prompt, or of single samples."""
    runs: list[tuple[int, int]] = []
    last_prompt = b""
    ends = micro_batch.lengths.cumsum(0)
    starts = (ends - micro_batch.lengths).tolist()
    for sample, length in enumerate(micro_batch.prompt_lengths.tolist()):
        prompt = micro_batch.token_ids[starts[sample] : starts[sample] + length].numpy().tobytes()
        # Each sample keeps the last token, so a prompt of one token cannot be shared.
        if batching.share_prompts and length > 1 and prompt == last_prompt:
            runs[-1] = (runs[-1][0], sample + 1)
        else:
            runs.append((sample, sample + 1))
        last_prompt = prompt
    return runs


def lay_out(
    micro_batch: TrainBatch, batching: MicroBatching, length: int | None, cp_rank: int = 0
) -> ModelRows:
    """Return a context-parallel rank's part of a micro-batch's rows.

    Rows have `length` positions, or as many as needed. Padding on the right does not affect earlier
    positions because of the causal mask, and is masked. In a packed row, the row's padding is a
    separate sample; context parallelism pads the end of each sample.
    """
    length = _needed(micro_batch, batching) if length is None else length
    lengths = micro_batch.lengths
    places = _counted(lengths)  # in each sample, and later in the complete rows
    prefix_of = None
    if batching.packed:
        segments = _segments(micro_batch, batching)
        bounds = _bounds(segments.lengths, length)
        starts, num_rows = bounds[:-1], 1
        before = segments.prefix_of[segments.own]
        places += torch.where(
            places < segments.shared.repeat_interleave(lengths),
            starts[before].repeat_interleave(lengths),
            (starts[segments.own] - segments.shared).repeat_interleave(lengths),
        )
        offsets = torch.zeros_like(starts)  # where each segment begins in its sample
        if segments.shared.any():
            prefix_of = torch.arange(len(starts))
            prefix_of[: len(segments.prefix_of)] = segments.prefix_of
            offsets = prefix_lengths(bounds, prefix_of)
        cu_seqlens, longest = bounds.int(), int((bounds.diff() + offsets).max())
    else:
        bounds, offsets = torch.tensor([0, length]), torch.zeros(1, dtype=torch.int64)
        num_rows = len(lengths)
        places += (torch.arange(num_rows) * length).repeat_interleave(lengths)
        cu_seqlens, longest = None, length
    token_ids = torch.zeros(num_rows * length, dtype=torch.int64)
    token_ids[places] = micro_batch.token_ids
    token_ids = token_ids.view(num_rows, length)
    share = length // batching.cp_size
    order = torch.stack(
        [
            positions_on_cp_rank(bounds, share, cp_size=batching.cp_size, cp_rank=rank)
            for rank in range(batching.cp_size)
        ]
    )
    # nth: index of a row's position in the order over all context-parallel ranks.
    nth = order.flatten().argsort()[places % length]
    mine = order[cp_rank]
    places = (nth // share * num_rows + places // length) * share + nth % share
    return ModelRows(
        token_ids=token_ids[:, mine],
        position_ids=_counted(bounds.diff(), offsets)[mine].repeat(num_rows, 1),
        target_ids=token_ids.roll(-1, dims=1)[:, mine],
        cu_seqlens=cu_seqlens,
        longest=longest,
        places=places,
        scored=_scored(micro_batch, places, num_rows, share, cp_rank),
        prefix_of=prefix_of,
    )


def _scored(
    micro_batch: TrainBatch, places: torch.Tensor, num_rows: int, share: int, cp_rank: int
) -> torch.Tensor:
    """Return `ModelRows.scored`."""
    mask = micro_batch.loss_mask
    if micro_batch.demonstration_mask is not None:
        mask = mask | micro_batch.demonstration_mask
    here = places[mask] - cp_rank * num_rows * share
    here = here[(here >= 0) & (here < num_rows * share)]
    positions: torch.Tensor = (here % share * num_rows + here // share).unique()
    return positions  # once each: samples of a shared prompt repeat its places


def tokens_in_rows(rows: ModelRows, num_tokens: int, cp_rank: int = 0) -> torch.Tensor:
    """Return `[rows, s / cp_size]` int64: the token index of each position; -1 for padding.

    Indices count the micro-batch's `num_tokens` tokens, one sample after the other; a shared prompt
    has those of its first sample."""
    num_here, places = rows.token_ids.numel(), rows.places.numpy()
    first, here = cp_rank * num_here, np.full(num_here, -1)
    mine = (places >= first) & (places < first + num_here)
    # numpy keeps the last of several assignments to one place.
    here[places[mine][::-1] - first] = np.arange(num_tokens)[mine][::-1]
    return torch.from_numpy(here).view(rows.token_ids.shape)


def _bounds(lengths: torch.Tensor, length: int) -> torch.Tensor:
    """Return `[k + 1]`: starts of the samples and the padding in a row of `length` positions."""
    ends = lengths.cumsum(0).tolist()
    if not ends or ends[-1] < length:
        ends.append(length)
    return torch.tensor([0, *ends])


def _counted(lengths: torch.Tensor, first: torch.Tensor | int = 0) -> torch.Tensor:
    """Return `first`, `first` + 1, ... for each of consecutive pieces of `lengths`."""
    starts = lengths.cumsum(0) - lengths - first
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
