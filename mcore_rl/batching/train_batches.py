"""Training tensors of a rank, one sample after the other, and their parts.

Shape legend: n samples of the step, b samples of a rank or micro-batch, t their tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from mcore_rl.batching.assignment import Cuts
from mcore_rl.batching.table import SampleTable, SampleTokens
from mcore_rl.batching.types import TrainBatch


def build_train_batch(
    table: SampleTable, tokens: Mapping[int, SampleTokens], cuts: Cuts
) -> TrainBatch:
    """Build one rank's batch on the CPU, in the order of `cuts`, without log-probs of models.

    `table` contains all samples of the step, `tokens` those in `cuts`. A response of r tokens after
    a prompt of p is scored by positions p-1 .. p+r-2. Empty responses and invalid samples (whose
    reward failed) have no loss token: they are scored, but not trained on.
    """
    rows = [row for mini_batch in cuts for micro_batch in mini_batch for row in micro_batch]
    lengths = table.lengths[rows] if rows else np.empty(0, dtype=np.int64)
    token_ids = np.empty(lengths.sum(), dtype=np.int64)
    loss_mask = np.zeros(token_ids.shape, dtype=np.bool_)
    rollout_log_probs = np.zeros(token_ids.shape, dtype=np.float32)
    has_turns = any(tokens[row].turn_rewards is not None for row in rows)
    turn_rewards = np.zeros(token_ids.shape, dtype=np.float32) if has_turns else None
    end = 0
    for row, length in zip(rows, lengths, strict=True):
        start, end = end, end + int(length)
        sample = tokens[row]
        token_ids[start:end] = sample.token_ids
        loss_mask[start : end - 1] = sample.is_generated[1:]
        rollout_log_probs[start : end - 1] = sample.log_probs[1:]
        if turn_rewards is not None and sample.turn_rewards is not None:
            turn_rewards[start : end - 1] = sample.turn_rewards[1:]
        if table.why_not_valid[row] is not None:
            loss_mask[start:end] = False
    return TrainBatch(
        token_ids=torch.from_numpy(token_ids),
        lengths=torch.from_numpy(lengths),
        prompt_lengths=torch.from_numpy(table.prompt_lengths[np.array(rows, dtype=np.int64)]),
        sample_ids=torch.tensor(rows, dtype=torch.int64),
        loss_mask=torch.from_numpy(loss_mask),
        rollout_log_probs=torch.from_numpy(rollout_log_probs),
        turn_rewards=None if turn_rewards is None else torch.from_numpy(turn_rewards),
        cuts=tuple(tuple(len(micro_batch) for micro_batch in mini_batch) for mini_batch in cuts),
    )


def batch_of_tokens(
    token_ids: Sequence[Sequence[int]], *, count_multiple_of: int = 1
) -> TrainBatch:
    """Build a batch of sequences to score, one per micro-batch; the loss mask has all positions.

    The last sequence is repeated up to a multiple of `count_multiple_of` micro-batches.
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


def split_mini_batches(batch: TrainBatch) -> list[TrainBatch]:
    """Split a batch into its mini-batches, one per optimizer step; tensors are views."""
    return _split(batch, batch.cuts)


def split_micro_batches(batch: TrainBatch) -> list[TrainBatch]:
    """Split a batch into its micro-batches, one per forward pass; tensors are views."""
    return _split(batch, [(size,) for mini_batch in batch.cuts for size in mini_batch])


def take(batch: TrainBatch, cuts: Cuts) -> TrainBatch:
    """Return the samples of `cuts` (places in `batch`), in this order and with these cuts."""
    rows = [row for mini_batch in cuts for micro_batch in mini_batch for row in micro_batch]
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    pieces = [
        torch.arange(starts[row], starts[row] + int(batch.lengths[row]), dtype=torch.int64)
        for row in rows
    ]
    tokens = torch.cat([torch.empty(0, dtype=torch.int64), *pieces])
    sizes = tuple(tuple(len(micro_batch) for micro_batch in mini_batch) for mini_batch in cuts)
    return _selected(batch, tokens, torch.tensor(rows, dtype=torch.int64), sizes)


def _split(batch: TrainBatch, parts: Sequence[tuple[int, ...]]) -> list[TrainBatch]:
    """Return consecutive parts, each given by the sizes of its micro-batches."""
    sample_bounds = np.cumsum([0, *(sum(sizes) for sizes in parts)])
    token_bounds = np.cumsum([0, *batch.lengths.tolist()])[sample_bounds]
    samples = pairwise(sample_bounds.tolist())
    tokens = pairwise(token_bounds.tolist())
    return [
        _selected(batch, slice(*its_tokens), slice(*its_samples), (sizes,))
        for its_tokens, its_samples, sizes in zip(tokens, samples, parts, strict=True)
    ]


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
        elif field.name not in ("cuts", "later"):
            selected[field.name] = None if value is None else value[tokens]
    return TrainBatch(**selected)  # type: ignore[arg-type]
