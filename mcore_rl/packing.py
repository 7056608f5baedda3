"""From scored rollouts to the tensors that a model eats, and their division into micro-batches.

A step's samples are cut into mini-batches (consecutive, so that an update learns from the same
samples in every layout), the samples of each dealt out to the data-parallel ranks, and those of a
rank to micro-batches. `plan_step` decides this from lengths alone and gives every rank as many
micro-batches as any other: ranks with different numbers would wait for each other forever.
`lay_out` then makes a micro-batch the rows of a model: all its samples packed into one row, with
the lengths that keep attention inside each, or one padded row a sample.

Shape legend: n samples of the step, b samples of a rank or micro-batch, t their tokens, one sample
after the other; s positions of a row.
This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mcore_rl.balance import partition
from mcore_rl.types import ScoredRollout, TrainBatch


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """How samples become micro-batches.

    With `max_tokens` > 0 samples are packed into one row a micro-batch, of at most so many tokens;
    else a micro-batch is `micro_batch_size` padded rows of one sample each.
    """

    max_tokens: int = 0  # --rl-max-tokens-per-microbatch
    micro_batch_size: int = 1  # --micro-batch-size, without packing
    # Row lengths: sequence parallelism needs a multiple of tp_size.
    multiple_of: int = 1
    # Megatron's pipeline sends buffers of one shape, so all rows of a rank have the longest length.
    same_length: bool = False
    # The interleaved schedule takes micro-batches by the pipeline's size.
    count_multiple_of: int = 1
    # What a sample costs, of its length; equal costs balance data-parallel ranks.
    cost: Callable[[np.ndarray], np.ndarray] = np.asarray

    @property
    def packed(self) -> bool:
        return self.max_tokens > 0


Cuts = tuple[tuple[tuple[int, ...], ...], ...]  # mini-batch -> micro-batch -> sample of the step


def plan_step(
    lengths: Sequence[int] | np.ndarray,
    *,
    num_mini_batches: int,
    dp_size: int,
    batching: MicroBatching,
) -> list[Cuts]:
    """What each data-parallel rank trains on, in which mini-batch and micro-batch.

    `lengths` `[n]` are prompt plus response tokens of the step's samples. Mini-batch k is the k-th
    of `num_mini_batches` equal consecutive parts of them. Every sample is dealt out exactly once;
    all ranks have equally many micro-batches in a mini-batch, a multiple of `count_multiple_of`.

    Packed, ranks and then micro-batches are balanced by cost (Karmarkar-Karp, see
    `mcore_rl.balance`); there are as few micro-batches as the token budget allows, and some are
    empty where there are fewer samples than that. A sample longer than the budget is a RuntimeError
    naming it. Padded, samples are dealt out like cards, and their number must divide.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert num_mini_batches >= 1 and len(lengths) % num_mini_batches == 0, (
        f"{len(lengths)} samples do not divide into {num_mini_batches} mini-batches"
    )
    assert dp_size >= 1, f"dp_size {dp_size}"
    deal = _deal_packed if batching.packed else _deal_padded
    by_mini_batch = [
        deal(samples, lengths, dp_size, batching)
        for samples in np.split(np.arange(len(lengths)), num_mini_batches)
    ]
    return [tuple(ranks[dp_rank] for ranks in by_mini_batch) for dp_rank in range(dp_size)]


def _deal_padded(
    samples: np.ndarray, lengths: np.ndarray, dp_size: int, batching: MicroBatching
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
    samples: np.ndarray, lengths: np.ndarray, dp_size: int, batching: MicroBatching
) -> list[tuple[tuple[int, ...], ...]]:
    too_long = samples[lengths[samples] > batching.max_tokens]
    if len(too_long):
        raise RuntimeError(
            f"sample {too_long[0]} has {lengths[too_long[0]]} tokens, more than the "
            f"{batching.max_tokens} of --rl-max-tokens-per-microbatch"
        )
    costs = np.asarray(batching.cost(lengths), dtype=np.float64)
    of_rank = [samples[bin_] for bin_ in partition(costs[samples], dp_size)]
    most = max(int(lengths[mine].sum()) for mine in of_rank)
    count = _round_up(max(1, -(-most // batching.max_tokens)), batching.count_multiple_of)
    while True:
        dealt = [[mine[bin_] for bin_ in partition(costs[mine], count)] for mine in of_rank]
        if all(lengths[bin_].sum() <= batching.max_tokens for bins in dealt for bin_ in bins):
            return [tuple(tuple(int(i) for i in bin_) for bin_ in bins) for bins in dealt]
        count += batching.count_multiple_of


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
    return TrainBatch(
        token_ids=torch.from_numpy(token_ids),
        lengths=torch.from_numpy(lengths),
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
        if field.name in ("lengths", "sample_ids"):
            selected[field.name] = value[samples]
        elif field.name != "cuts":
            selected[field.name] = None if value is None else value[tokens]
    return TrainBatch(**selected)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ModelRows:
    """A micro-batch as a model takes it, and where its tokens are in there."""

    token_ids: torch.Tensor  # [rows, s] int64, padded with 0 behind every token that counts
    position_ids: torch.Tensor  # [rows, s] int64, from 0 in every sample
    # [k + 1] int32, where the samples of a packed row begin, its padding being one more; None
    # where each row is one sample.
    cu_seqlens: torch.Tensor | None
    longest: int  # tokens of the longest sample
    places: torch.Tensor  # [t] int64, of the tokens in the flattened rows

    @property
    def target_ids(self) -> torch.Tensor:
        """`[rows, s]`, each position's next token. The last of a sample has none: it is masked."""
        return self.token_ids.roll(-1, dims=1)


def row_length(micro_batches: Sequence[TrainBatch], batching: MicroBatching) -> int | None:
    """The length that all rows of these micro-batches have, or None if each has its own."""
    if not batching.same_length:
        return None
    return max(_needed(micro_batch, batching) for micro_batch in micro_batches)


def _needed(micro_batch: TrainBatch, batching: MicroBatching) -> int:
    tokens = micro_batch.num_tokens
    if not batching.packed:
        tokens = int(micro_batch.lengths.max())
    return _round_up(max(tokens, 1), batching.multiple_of)


def lay_out(micro_batch: TrainBatch, batching: MicroBatching, length: int | None) -> ModelRows:
    """The rows of a micro-batch, of `length` positions or as many as it needs.

    Because of the causal mask padding on the right changes no earlier position, and all of it is
    masked. Packed, the padding is a sample of its own.
    """
    length = _needed(micro_batch, batching) if length is None else length
    lengths = micro_batch.lengths
    starts = lengths.cumsum(0) - lengths
    in_sample = torch.arange(micro_batch.num_tokens) - starts.repeat_interleave(lengths)
    if batching.packed:
        num_rows, places = 1, torch.arange(micro_batch.num_tokens)
        ends = lengths.cumsum(0).tolist()
        if not ends or ends[-1] < length:
            ends.append(length)
        cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32)
        longest = int(cu_seqlens.diff().max())
    else:
        num_rows, cu_seqlens, longest = micro_batch.num_samples, None, length
        places = torch.arange(num_rows).repeat_interleave(lengths) * length + in_sample
    token_ids = torch.zeros(num_rows * length, dtype=torch.int64)
    token_ids[places] = micro_batch.token_ids
    position_ids = torch.arange(length).repeat(num_rows)
    if batching.packed:
        # Behind the samples the padding counts from 0, too.
        position_ids -= micro_batch.num_tokens
        position_ids[places] = in_sample
    return ModelRows(
        token_ids=token_ids.view(num_rows, length),
        position_ids=position_ids.view(num_rows, length),
        cu_seqlens=cu_seqlens,
        longest=longest,
        places=places,
    )


def _round_up(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of
