"""A micro-batch as the rows of a model: all its samples packed into one, with the lengths that keep
attention inside each, or one padded row a sample.

With `share_prompts` consecutive samples of a packed micro-batch that have one prompt share its
tokens: a group of n samples after a prompt of p tokens takes p - 1 + sum(1 + response) positions
instead of sum(p + response), and attention lets each sample see the shared ones before its own. The
prompt's last token stays with each sample, as it scores the first token of a response. (Prefix
sharing, as in "Prefix Grouper", arXiv 2506.05433.)

Context parallelism cuts every sample of a packed row, and every padded row, into twice as many
equal chunks as there are ranks; rank i takes chunk i from the front and chunk i from the back, so
that a causal mask gives all of them the same work. It is the order in which Megatron cuts its own
batches, and the only one that Transformer Engine's attention knows.

Shape legend: b samples of a micro-batch, t their tokens, one sample after the other; s positions of
a row, on all context-parallel ranks; k segments of a packed row.
This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
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
    """For `positions_on_cp_rank`: the start of each sample in the row, and the position in it."""
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


@dataclass(frozen=True, slots=True)
class ModelRows:
    """A micro-batch as a model takes it on one context-parallel rank, and where its tokens are."""

    token_ids: torch.Tensor  # [rows, s / cp_size] int64, padded with 0 behind tokens that count
    position_ids: torch.Tensor  # [rows, s / cp_size] int64, from 0 in every sample
    target_ids: torch.Tensor  # [rows, s / cp_size] int64, next tokens; the last of a sample: masked
    # [k + 1] int32, where the samples of the whole packed row begin, with the padding that each
    # has, that of the row being one more; None where each row is one sample. A prompt that samples
    # share is one more, too, and what is left of each has an entry of its own.
    cu_seqlens: torch.Tensor | None
    longest: int  # positions of the longest sample, on all context-parallel ranks
    # [t] int64, of the tokens in the rows of all context-parallel ranks, rank after rank, flattened
    places: torch.Tensor
    # [k] int64, for each of those k the one that goes before it, a shared prompt; itself: none.
    # None where nothing is shared.
    prefix_of: torch.Tensor | None = None


def row_length(micro_batches: Sequence[TrainBatch], batching: MicroBatching) -> int | None:
    """The length that all rows of these micro-batches have, or None if each has its own."""
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
    """What a packed row consists of: samples, or shared prompts and what is left of samples."""

    lengths: torch.Tensor  # [k] int64, with what context parallelism pads them by
    prefix_of: torch.Tensor  # [k] int64, the segment before it, or itself
    own: torch.Tensor  # [b] int64, the segment of each sample
    shared: torch.Tensor  # [b] int64, tokens of it that are in the segment before


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
    """(first, last + 1) of consecutive samples that share their prompt, or of single ones."""
    runs: list[tuple[int, int]] = []
    last_prompt = b""
    ends = micro_batch.lengths.cumsum(0)
    starts = (ends - micro_batch.lengths).tolist()
    for sample, length in enumerate(micro_batch.prompt_lengths.tolist()):
        prompt = micro_batch.token_ids[starts[sample] : starts[sample] + length].numpy().tobytes()
        # A prompt of one token is what each sample keeps.
        if batching.share_prompts and length > 1 and prompt == last_prompt:
            runs[-1] = (runs[-1][0], sample + 1)
        else:
            runs.append((sample, sample + 1))
        last_prompt = prompt
    return runs


def lay_out(
    micro_batch: TrainBatch, batching: MicroBatching, length: int | None, cp_rank: int = 0
) -> ModelRows:
    """The rows of a micro-batch, of `length` positions or as many as it needs, and of these the
    part of a context-parallel rank.

    Because of the causal mask padding on the right changes no earlier position, and all of it is
    masked. Packed, the padding of the row is a sample of its own, while what context parallelism
    adds to a sample is its end.
    """
    length = _needed(micro_batch, batching) if length is None else length
    lengths = micro_batch.lengths
    places = _counted(lengths)  # in each sample, and then in the whole rows
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
        offsets = torch.zeros_like(starts)  # positions in its sample that a segment begins at
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
    # A position of a row is the n-th of those on all context-parallel ranks.
    nth = order.flatten().argsort()[places % length]
    mine = order[cp_rank]
    return ModelRows(
        token_ids=token_ids[:, mine],
        position_ids=_counted(bounds.diff(), offsets)[mine].repeat(num_rows, 1),
        target_ids=token_ids.roll(-1, dims=1)[:, mine],
        cu_seqlens=cu_seqlens,
        longest=longest,
        places=(nth // share * num_rows + places // length) * share + nth % share,
        prefix_of=prefix_of,
    )


def tokens_in_rows(rows: ModelRows, num_tokens: int, cp_rank: int = 0) -> torch.Tensor:
    """`[rows, s / cp_size]` int64: which of a micro-batch's `num_tokens` tokens, one sample after
    the other, a position holds; -1 for padding. Of a prompt that samples share: the first one's."""
    num_here, places = rows.token_ids.numel(), rows.places.numpy()
    first, here = cp_rank * num_here, np.full(num_here, -1)
    mine = (places >= first) & (places < first + num_here)
    # Of several assignments to one place numpy keeps the last.
    here[places[mine][::-1] - first] = np.arange(num_tokens)[mine][::-1]
    return torch.from_numpy(here).view(rows.token_ids.shape)


def _bounds(lengths: torch.Tensor, length: int) -> torch.Tensor:
    """`[k + 1]`: where samples begin in a row of `length` positions, and its padding behind."""
    ends = lengths.cumsum(0).tolist()
    if not ends or ends[-1] < length:
        ends.append(length)
    return torch.tensor([0, *ends])


def _counted(lengths: torch.Tensor, first: torch.Tensor | int = 0) -> torch.Tensor:
    """`first`, `first` + 1, ... in each of some pieces that lie one after the other."""
    starts = lengths.cumsum(0) - lengths - first
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
