"""A step's samples in the layouts of several models, each of which divides them in its own way.

Roles are told of all samples by numbers. Tokens, and what is found of each, go rank to rank to
those who learn from the sample (`mcore_rl.batching.moves`), from one layout to another, and in one
layout from the first epoch to later ones.
Shape legend: n samples of the step, t tokens of a rank's samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.dealing import Cuts, Prompts, plan_step
from mcore_rl.batching.moves import Division, Parcel, SampleRows, Shares
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.batching.table import SampleTable, SampleTokens
from mcore_rl.batching.train_batches import build_train_batch, split_mini_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.common import objects
from mcore_rl.moe.routing import RoutedLayers, joined


def table_to_tensors(table: SampleTable) -> dict[str, torch.Tensor]:
    """What a role is told of all samples: `[n]` int64 `prompt` and `response`, how many tokens are
    which, `draws`, of which those of one prompt have the same, and `valid`, 1 for what can be
    learned from."""
    return {
        "prompt": torch.from_numpy(table.prompt_lengths),
        "response": torch.from_numpy(table.response_lengths),
        "draws": torch.from_numpy(table.draws),
        "valid": torch.from_numpy(table.valid.astype(np.int64)),
    }


def tensors_to_table(tensors: Mapping[str, torch.Tensor]) -> SampleTable:
    """The table again, without rewards."""
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
    """By epoch and data-parallel rank, what of a step's samples it learns from.

    `orders` `[e, n]` are those of the epochs (default: one, as they are). With a single mini-batch
    all epochs learn from the same one, so that there is one plan.
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
    """What a data-parallel rank gets of a step's samples by `plan_epochs`; of these it has the
    `tokens`."""
    first, *later = (build_train_batch(table, tokens, plan[dp_rank]) for plan in epochs)
    return dataclasses.replace(first, later=tuple(later))


def with_given_routes(
    batch: TrainBatch, tokens: Mapping[int, SampleTokens], of: RoutedLayers
) -> TrainBatch:
    """A rank's batch, and those of later epochs, with the experts that samples were sampled with,
    `of` the layers of its stage."""

    def routed(each: TrainBatch) -> TrainBatch:
        routes = [tokens[sample].routes for sample in each.sample_ids.tolist()]
        ids, known = joined(routes, each.lengths.tolist(), of)
        return dataclasses.replace(
            each, routes=torch.from_numpy(ids), routes_known=torch.from_numpy(known)
        )

    return dataclasses.replace(routed(batch), later=tuple(routed(each) for each in batch.later))


def mini_batches(
    batch: TrainBatch, num_epochs: int, division: Division, group: dist.ProcessGroup
) -> Iterator[TrainBatch]:
    """The mini-batches of a step, one optimizer update each, in order, as this rank has them.

    Where an epoch deals samples out to other ranks, what the stages before have found of them goes
    there first, from rank to rank: collective over the world. `group` is the data-parallel one of
    the layout that `batch` and `division` are of.
    """
    later = batch.later
    assert not later or len(later) == num_epochs - 1, f"{len(later)} later of {num_epochs} epochs"
    for epoch in (batch, *(_found_later(batch, division, group) or [batch] * (num_epochs - 1))):
        yield from split_mini_batches(epoch)


def _found_later(
    batch: TrainBatch, division: Division, group: dist.ProcessGroup
) -> tuple[TrainBatch, ...]:
    """`batch.later` with what is known of the first epoch's tokens alone.

    A rank gets what it lacks from the one that had the sample first and has its place in TP, CP and
    PP: of these, choices of experts are another stage's.
    """
    fields = {
        field.name: getattr(batch, field.name).numpy()
        for field in dataclasses.fields(batch)
        # Or it is found for none of them, or made of the samples themselves, as rewards of turns
        # are, which an empty batch has none of: all ranks are to move the same.
        if field.name != "turn_rewards"
        and isinstance(getattr(batch, field.name), torch.Tensor)
        and any(getattr(each, field.name) is None for each in batch.later)
    }
    if not fields:
        return batch.later
    columns = [value.reshape(len(value), math.prod(value.shape[1:])) for value in fields.values()]
    # A row of bytes a token, one column beside the other.
    rows = np.concatenate([np.ascontiguousarray(each).view(np.uint8) for each in columns], axis=1)
    ends = np.cumsum([each.shape[1] * each.itemsize for each in columns])[:-1]
    peers = tuple((rank,) for rank in dist.get_process_group_ranks(group))
    first, every = division.first.samples, division.every.samples
    lacking = [more[len(had) :] for had, more in zip(first, every, strict=True)]
    parcel = Parcel(division.lengths, Shares(first, peers), Shares(tuple(lacking), peers), rows)
    rank = dist.get_rank()
    came = parcel.moved(rank, dist.get_world_size(), objects.exchange)
    at = peers.index((rank,))
    known = SampleRows(every[at], division.lengths, np.concatenate([rows, came]))
    moved = []
    for each in batch.later:
        parts = np.split(known.of(each.sample_ids.numpy()), ends, axis=1)
        found: dict[str, Any] = {
            name: torch.from_numpy(
                np.ascontiguousarray(part)
                .view(value.dtype)
                .reshape(each.num_tokens, *value.shape[1:])
            )
            for (name, value), part in zip(fields.items(), parts, strict=True)
        }
        moved.append(dataclasses.replace(each, **found))
    return tuple(moved)
