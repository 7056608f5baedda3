"""From scored rollouts to the tensors that a model eats, and their division into micro-batches.

A step's samples are cut into mini-batches (consecutive, so that an update learns from the same
samples in every layout), the samples of each dealt out to the data-parallel ranks, and those of a
rank to micro-batches. `plan_step` decides this from lengths alone and gives every rank as many
micro-batches as any other: ranks with different numbers would wait for each other forever.
`lay_out` then makes a micro-batch the rows of a model: all its samples packed into one row, with
the lengths that keep attention inside each, or one padded row a sample.

With `share_prompts` consecutive samples of a packed micro-batch that have one prompt share its
tokens: a group of n samples after a prompt of p tokens takes p - 1 + sum(1 + response) positions
instead of sum(p + response), and attention lets each sample see the shared ones before its own. The
prompt's last token stays with each sample, as it scores the first token of a response. (Prefix
sharing, as in "Prefix Grouper", arXiv 2506.05433.)

With context parallelism every sample of a packed row, and every padded row, is cut into twice as
many equal chunks as there are ranks; rank i takes chunk i from the front and chunk i from the back,
so that a causal mask gives all of them the same work. It is the order in which Megatron cuts its
own batches, and the only one that Transformer Engine's attention knows.

Shape legend: n samples of the step, b samples of a rank or micro-batch, t their tokens, one sample
after the other; s positions of a row, on all context-parallel ranks.
This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from mcore_rl.balance import partition
from mcore_rl.types import ScoredRollout, TrainBatch

_Number = TypeVar("_Number", int, np.ndarray, torch.Tensor)


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


# Samples of one prompt are dealt out together, but no more of them than a data-parallel rank, and a
# micro-batch, has room for this many times: fewer and larger pieces are hard to balance.
PIECES = 2


@dataclass(frozen=True, slots=True)
class Prompts:
    """Which samples of a step have one prompt, and how long it is."""

    ids: np.ndarray  # [n] int64, the same for consecutive samples of one prompt, else different
    lengths: np.ndarray  # [n] int64, tokens of the sample's prompt

    @classmethod
    def of(cls, scored: Sequence[ScoredRollout]) -> Prompts:
        prompts = [sample.rollout.prompt.token_ids for sample in scored]
        is_new = [
            now is not before and not np.array_equal(now, before)
            for before, now in itertools.pairwise(prompts)
        ]
        return cls(
            ids=np.cumsum([0, *is_new])[: len(prompts)],
            lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int64),
        )

    @classmethod
    def all_different(cls, num_samples: int) -> Prompts:
        """Samples that share nothing."""
        return cls(ids=np.arange(num_samples), lengths=np.zeros(num_samples, dtype=np.int64))


Cuts = tuple[tuple[tuple[int, ...], ...], ...]  # mini-batch -> micro-batch -> sample of the step


def plan_step(
    lengths: Sequence[int] | np.ndarray,
    *,
    num_mini_batches: int,
    dp_size: int,
    batching: MicroBatching,
    prompts: Prompts | None = None,
) -> list[Cuts]:
    """What each data-parallel rank trains on, in which mini-batch and micro-batch.

    `lengths` `[n]` are prompt plus response tokens of the step's samples. Mini-batch k is the k-th
    of `num_mini_batches` equal consecutive parts of them. Every sample is dealt out exactly once;
    all ranks have equally many micro-batches in a mini-batch, a multiple of `count_multiple_of`.

    Packed, ranks and then micro-batches are balanced by cost (Karmarkar-Karp, see
    `mcore_rl.balance`); there are as few micro-batches as the token budget allows, and some are
    empty where there are fewer samples than that. The budget counts samples as context parallelism
    pads them; one that is longer is a RuntimeError naming it. Where prompts are shared, `prompts`
    says by whom, and samples of one prompt stay together as far as budget and balance allow.
    Padded, samples are dealt out like cards, and their number must divide.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not batching.share_prompts or prompts is None:
        prompts = Prompts.all_different(len(lengths))
    assert num_mini_batches >= 1 and len(lengths) % num_mini_batches == 0, (
        f"{len(lengths)} samples do not divide into {num_mini_batches} mini-batches"
    )
    assert dp_size >= 1, f"dp_size {dp_size}"
    mini_batches = np.split(np.arange(len(lengths)), num_mini_batches)
    if batching.packed:
        by_mini_batch = [
            _deal_packed(samples, lengths, prompts, dp_size, batching) for samples in mini_batches
        ]
    else:
        by_mini_batch = [_deal_padded(samples, dp_size, batching) for samples in mini_batches]
    return [tuple(ranks[dp_rank] for ranks in by_mini_batch) for dp_rank in range(dp_size)]


def _deal_padded(
    samples: np.ndarray, dp_size: int, batching: MicroBatching
) -> list[tuple[tuple[int, ...], ...]]:
    size = batching.micro_batch_size
    assert size >= 1 and len(samples) % (dp_size * size) == 0, (
        f"{len(samples)} samples do not divide into {dp_size} ranks x micro-batches of {size}"
    )
    return [
        tuple(tuple(int(i) for i in mine[at : at + size]) for at in range(0, len(mine), size))
        for mine in (samples[dp_rank::dp_size] for dp_rank in range(dp_size))
    ]


def _deal_packed(
    samples: np.ndarray,
    lengths: np.ndarray,
    prompts: Prompts,
    dp_size: int,
    batching: MicroBatching,
) -> list[tuple[tuple[int, ...], ...]]:
    in_row = round_up(lengths, chunks_of_sample(batching.cp_size))
    too_long = samples[in_row[samples] > batching.max_tokens]
    if len(too_long):
        tokens, positions = lengths[too_long[0]], in_row[too_long[0]]
        padded = f", padded to {positions} for context parallelism" if positions > tokens else ""
        raise RuntimeError(
            f"sample {too_long[0]} has {tokens} tokens{padded}, more than the "
            f"{batching.max_tokens} of --rl-max-tokens-per-microbatch"
        )
    together = np.maximum(prompts.lengths[samples] - 1, 0)  # what a piece has once
    costs_together = np.asarray(batching.cost(together), dtype=np.float64)
    own = in_row[samples] - together
    own_costs = np.asarray(batching.cost(lengths[samples]), dtype=np.float64) - costs_together
    is_first = np.diff(prompts.ids[samples], prepend=-1) != 0
    all_costs = own_costs.sum() + costs_together[is_first].sum()
    starts = _piece_starts(
        prompts.ids[samples],
        _Amounts(own_costs, costs_together, all_costs / (PIECES * dp_size)),
        _Amounts(own, together, batching.max_tokens / PIECES),
    )
    pieces = np.split(samples, starts[1:])
    costs = np.add.reduceat(own_costs, starts) + costs_together[starts]
    tokens = np.add.reduceat(own, starts) + together[starts]
    of_rank = partition(costs, dp_size)
    most = max(int(tokens[mine].sum()) for mine in of_rank)
    count = round_up(max(1, -(-most // batching.max_tokens)), batching.count_multiple_of)
    while True:
        dealt = [[mine[bin_] for bin_ in partition(costs[mine], count)] for mine in of_rank]
        if all(tokens[bin_].sum() <= batching.max_tokens for bins in dealt for bin_ in bins):
            break
        count += batching.count_multiple_of
    return [
        tuple(tuple(int(i) for piece in bin_ for i in pieces[piece]) for bin_ in bins)
        for bins in dealt
    ]


@dataclass(frozen=True, slots=True)
class _Amounts:
    """Costs or tokens of samples: of each by itself, of what it shares, and the most of a piece."""

    own: np.ndarray
    together: np.ndarray
    most: float


def _piece_starts(prompt_ids: np.ndarray, *amounts: _Amounts) -> np.ndarray:
    """Where runs of samples begin that are dealt out as one: a prompt's samples, or, as `amounts`
    limit them, parts of these."""
    starts = [0]
    sums = [of.together[0] + of.own[0] for of in amounts]
    for i in range(1, len(prompt_ids)):
        longer = [total + of.own[i] for total, of in zip(sums, amounts, strict=True)]
        fits = all(total <= of.most for total, of in zip(longer, amounts, strict=True))
        if fits and prompt_ids[i] == prompt_ids[starts[-1]]:
            sums = longer
        else:
            starts.append(i)
            sums = [of.together[i] + of.own[i] for of in amounts]
    return np.array(starts)


def build_train_batch(scored: Sequence[ScoredRollout], cuts: Cuts) -> TrainBatch:
    """One rank's samples on the CPU, in the order of `cuts`, without what log-probs bring.

    `scored` are all samples of the step, of which those in `cuts` are taken. A response of r tokens
    after a prompt of p is scored by positions p-1 .. p+r-2. An empty response has no loss token.

    RuntimeError: a prompt is empty (its first response token would have nothing to be scored by),
    or a response and its log-probs differ in length.
    """
    rows = [row for mini_batch in cuts for micro_batch in mini_batch for row in micro_batch]
    lengths = np.array([num_tokens(scored[row]) for row in rows], dtype=np.int64)
    token_ids = np.empty(lengths.sum(), dtype=np.int64)
    loss_mask = np.zeros(token_ids.shape, dtype=np.bool_)
    rollout_log_probs = np.zeros(token_ids.shape, dtype=np.float32)
    end = 0
    for row, length in zip(rows, lengths, strict=True):
        rollout = scored[row].rollout
        start, end = end, end + int(length)
        response = start + len(rollout.prompt.token_ids)
        token_ids[start:response] = rollout.prompt.token_ids
        token_ids[response:end] = rollout.response_token_ids
        loss_mask[response - 1 : end - 1] = True
        rollout_log_probs[response - 1 : end - 1] = rollout.rollout_log_probs
    prompt_lengths = [len(scored[row].rollout.prompt.token_ids) for row in rows]
    return TrainBatch(
        token_ids=torch.from_numpy(token_ids),
        lengths=torch.from_numpy(lengths),
        prompt_lengths=torch.tensor(prompt_lengths, dtype=torch.int64),
        sample_ids=torch.tensor(rows, dtype=torch.int64),
        loss_mask=torch.from_numpy(loss_mask),
        rollout_log_probs=torch.from_numpy(rollout_log_probs),
        cuts=tuple(tuple(len(micro_batch) for micro_batch in mini_batch) for mini_batch in cuts),
    )


def batch_of_tokens(
    token_ids: Sequence[Sequence[int]], *, count_multiple_of: int = 1
) -> TrainBatch:
    """Sequences to be scored, each in a micro-batch of its own, all positions in the loss mask.

    The last one is repeated until there is a multiple of `count_multiple_of` micro-batches.
    """
    sequences = [*token_ids, *[token_ids[-1]] * (-len(token_ids) % count_multiple_of)]
    lengths = torch.tensor([len(ids) for ids in sequences])
    flat = [token for ids in sequences for token in ids]
    return TrainBatch(
        token_ids=torch.tensor(flat, dtype=torch.int64),
        lengths=lengths,
        prompt_lengths=torch.zeros_like(lengths),
        sample_ids=torch.arange(len(lengths)),
        loss_mask=torch.ones(len(flat), dtype=torch.bool),
        rollout_log_probs=torch.zeros(len(flat)),
        cuts=((1,) * len(lengths),),
    )


def num_tokens(sample: ScoredRollout) -> int:
    """Prompt and response tokens of a sample whose parts fit together; RuntimeError if not."""
    rollout = sample.rollout
    num_prompt, num_response = len(rollout.prompt.token_ids), len(rollout.response_token_ids)
    name = f"prompt {rollout.prompt.index}, sample {rollout.sample_index}"
    if num_prompt == 0:
        raise RuntimeError(f"{name}: the prompt has no token")
    if len(rollout.rollout_log_probs) != num_response:
        raise RuntimeError(
            f"{name}: expected {num_response} rollout_log_probs, one per response token, "
            f"got {len(rollout.rollout_log_probs)}"
        )
    return num_prompt + num_response


def split_mini_batches(batch: TrainBatch) -> list[TrainBatch]:
    """The parts of a batch that one optimizer step each learns from; the tensors are views."""
    ends = np.cumsum([sum(sizes) for sizes in batch.cuts])
    return [
        _slice(batch, int(end) - sum(sizes), int(end), (sizes,))
        for end, sizes in zip(ends, batch.cuts, strict=True)
    ]


def split_micro_batches(batch: TrainBatch) -> list[TrainBatch]:
    """The parts of a batch that go through the model at one time; the tensors are views."""
    sizes = [size for mini_batch in batch.cuts for size in mini_batch]
    ends = np.cumsum(sizes)
    return [
        _slice(batch, int(end) - size, int(end), ((size,),))
        for end, size in zip(ends, sizes, strict=True)
    ]


def take(batch: TrainBatch, cuts: Cuts) -> TrainBatch:
    """The samples of `cuts`, by their place in `batch`, in this order and cut like this."""
    rows = [row for mini_batch in cuts for micro_batch in mini_batch for row in micro_batch]
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    pieces = [
        torch.arange(starts[row], starts[row] + int(batch.lengths[row]), dtype=torch.int64)
        for row in rows
    ]
    tokens = torch.cat([torch.empty(0, dtype=torch.int64), *pieces])
    sizes = tuple(tuple(len(micro_batch) for micro_batch in mini_batch) for mini_batch in cuts)
    return _selected(batch, tokens, torch.tensor(rows, dtype=torch.int64), sizes)


def _slice(
    batch: TrainBatch, first: int, last: int, cuts: tuple[tuple[int, ...], ...]
) -> TrainBatch:
    start = int(batch.lengths[:first].sum())
    tokens = slice(start, start + int(batch.lengths[first:last].sum()))
    return _selected(batch, tokens, slice(first, last), cuts)


def _selected(
    batch: TrainBatch,
    tokens: slice | torch.Tensor,
    samples: slice | torch.Tensor,
    cuts: tuple[tuple[int, ...], ...],
) -> TrainBatch:
    selected: dict[str, object] = {"cuts": cuts}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if field.name in ("lengths", "prompt_lengths", "sample_ids"):
            selected[field.name] = value[samples]
        elif field.name != "cuts":
            selected[field.name] = None if value is None else value[tokens]
    return TrainBatch(**selected)  # type: ignore[arg-type]


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
