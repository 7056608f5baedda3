"""A step's samples in the layouts of several models, each of which divides them in its own way.

Roles get numbers of all samples. Tokens, and results per token, go from rank to rank to those that
train on the sample (`batching.sample_exchange`): from one layout to another, and within a layout
from the first epoch to later ones. Shape legend: n samples of the step, t tokens of a rank's
samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.assignment import Cuts, Prompts, plan_step
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.batching.sample_exchange import Division, RowExchange, SampleRows, Shares
from mcore_rl.batching.table import SampleTable, SampleTokens
from mcore_rl.batching.train_batches import build_train_batch, split_mini_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.common import objects
from mcore_rl.moe.routing import RoutedLayers, concatenated


def table_to_tensors(table: SampleTable) -> dict[str, torch.Tensor]:
    """Return the table as `[n]` int64 tensors for a role: `prompt` and `response` are numbers of
    tokens, samples of one prompt have the same number in `draws`, `valid` is 1 for samples to train
    on."""
    return {
        "prompt": torch.from_numpy(table.prompt_lengths),
        "response": torch.from_numpy(table.response_lengths),
        "draws": torch.from_numpy(table.draws),
        "valid": torch.from_numpy(table.valid.astype(np.int64)),
    }


def tensors_to_table(tensors: Mapping[str, torch.Tensor]) -> SampleTable:
    """Return the table of `table_to_tensors`, without rewards."""
    return SampleTable.of_lengths(
        tensors["prompt"].numpy(),
        tensors["response"].numpy(),
        draws=tensors["draws"].numpy(),
        valid=tensors["valid"].numpy(),
    )


def plan_epochs(
    table: SampleTable,
    *,
    num_mini_batches: int,
    dp_size: int,
    batching: MicroBatching,
    orders: np.ndarray | None = None,
) -> list[list[Cuts]]:
    """Return, by epoch and data-parallel rank, the cuts of a step's samples.

    `orders` `[e, n]` is the order of samples in each epoch (default: one epoch, in their order).
    With a single mini-batch all epochs train on the same one, so there is one plan.
    """
    prompts = Prompts.of(table)
    return [
        plan_step(
            table.lengths,
            num_mini_batches=num_mini_batches,
            dp_size=dp_size,
            batching=batching,
            prompts=prompts,
            order=order,
        )
        for order in ([None] if orders is None else orders[: None if num_mini_batches > 1 else 1])
    ]


def batch_by_plan(
    table: SampleTable,
    tokens: Mapping[int, SampleTokens],
    epochs: Sequence[Sequence[Cuts]],
    dp_rank: int,
) -> TrainBatch:
    """Return a data-parallel rank's batch of a step's samples by `plan_epochs`; `tokens` has its
    samples' tokens."""
    first, *later = (build_train_batch(table, tokens, plan[dp_rank]) for plan in epochs)
    return dataclasses.replace(first, later=tuple(later))


def with_given_routes(
    batch: TrainBatch, tokens: Mapping[int, SampleTokens], of: RoutedLayers
) -> TrainBatch:
    """Return a rank's batch, and those of later epochs, with the experts of sampling for the layers
    `of` its stage."""

    def routed(each: TrainBatch) -> TrainBatch:
        routes = [tokens[sample].routes for sample in each.sample_ids.tolist()]
        ids, known = concatenated(routes, each.lengths.tolist(), of)
        return dataclasses.replace(
            each, routes=torch.from_numpy(ids), routes_known=torch.from_numpy(known)
        )

    return dataclasses.replace(routed(batch), later=tuple(routed(each) for each in batch.later))


def with_top_tokens(
    batch: TrainBatch, tokens: Mapping[int, SampleTokens], num_top: int
) -> TrainBatch:
    """Return a rank's batch, and those of later epochs, with the engine's `num_top` most probable
    tokens."""

    def filled(each: TrainBatch) -> TrainBatch:
        columns = np.zeros((each.num_tokens, 2 * num_top), dtype=np.float32)
        ends = each.lengths.cumsum(0).tolist()
        for sample, end in zip(each.sample_ids.tolist(), ends, strict=True):
            top = tokens[sample].top_tokens
            assert top is not None, "the samples come without them"
            here = columns[end - 1 - len(top.ids) : end - 1]
            here[:, :num_top], here[:, num_top:] = top.log_probs, top.ids  # exact below 2^24
        return dataclasses.replace(each, top_tokens=torch.from_numpy(columns))

    return dataclasses.replace(filled(batch), later=tuple(filled(each) for each in batch.later))


def mini_batches(
    batch: TrainBatch, num_epochs: int, division: Division, group: dist.ProcessGroup
) -> Iterator[TrainBatch]:
    """Yield the mini-batches of a step on this rank, in order, one optimizer update each.

    If an epoch assigns samples to other ranks, the earlier stages' results go there first, from
    rank to rank: collective over the world. `group` is the data-parallel group of the layout of
    `batch` and `division`.
    """
    later = batch.later
    assert not later or len(later) == num_epochs - 1, f"{len(later)} later of {num_epochs} epochs"
    for epoch in (batch, *(_found_later(batch, division, group) or [batch] * (num_epochs - 1))):
        yield from split_mini_batches(epoch)


def _found_later(
    batch: TrainBatch, division: Division, group: dist.ProcessGroup
) -> tuple[TrainBatch, ...]:
    """Return `batch.later` with the fields that only the first epoch's tokens have so far.

    A rank gets them from the rank that had the sample first and has the same place in TP, CP and
    PP, since the choices of experts differ between stages.
    """
    fields = {
        field.name: getattr(batch, field.name).numpy()
        for field in dataclasses.fields(batch)
        # Other fields are absent everywhere, or built from the samples, as turn rewards are, which
        # an empty batch lacks: all ranks must move the same fields.
        if field.name != "turn_rewards"
        and isinstance(getattr(batch, field.name), torch.Tensor)
        and any(getattr(each, field.name) is None for each in batch.later)
    }
    if not fields:
        return batch.later
    columns = [value.reshape(len(value), math.prod(value.shape[1:])) for value in fields.values()]
    # A row of bytes per token, with the fields as columns.
    rows = np.concatenate([np.ascontiguousarray(each).view(np.uint8) for each in columns], axis=1)
    ends = np.cumsum([each.shape[1] * each.itemsize for each in columns])[:-1]
    peers = tuple((rank,) for rank in dist.get_process_group_ranks(group))
    first, every = division.first.samples, division.every.samples
    lacking = [more[len(had) :] for had, more in zip(first, every, strict=True)]
    exchange = RowExchange(
        division.lengths, Shares(first, peers), Shares(tuple(lacking), peers), rows
    )
    rank = dist.get_rank()
    came = exchange.moved(rank, dist.get_world_size(), objects.exchange)
    at = peers.index((rank,))
    known = SampleRows(every[at], division.lengths, np.concatenate([rows, came]))
    moved = []
    for each in batch.later:
        parts = np.split(known.of(each.sample_ids.numpy()), ends, axis=1)
        known_fields: dict[str, Any] = {
            name: torch.from_numpy(
                np.ascontiguousarray(part)
                .view(value.dtype)
                .reshape(each.num_tokens, *value.shape[1:])
            )
            for (name, value), part in zip(fields.items(), parts, strict=True)
        }
        moved.append(dataclasses.replace(each, **known_fields))
    return tuple(moved)
