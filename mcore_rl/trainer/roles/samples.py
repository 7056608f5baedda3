"""A step's samples in the layouts of several models, and a number per token of them.

Roles are told of samples by their tokens and nothing else. A number per token goes from the ranks
and order of one layout to those of another; in between each token has its place among all of the
step's: sample by sample, in their order.
Shape legend: n samples and T tokens of the step, t tokens of a rank's samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.dealing import Cuts, Prompts, plan_step
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.batching.table import SampleTable, SampleTokens
from mcore_rl.batching.train_batches import build_train_batch, split_mini_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.common import objects
from mcore_rl.model.layout import TrainLayout
from mcore_rl.moe.routing import RoutedLayers, joined
from mcore_rl.rollout.keeper import SampleKeeper
from mcore_rl.trainer.roles.remote import Role


def samples_to_tensors(
    table: SampleTable, tokens: Mapping[int, SampleTokens]
) -> dict[str, torch.Tensor]:
    """`token_ids` `[T]` int64, all samples one after the other, and of each whether it was
    `generated`; `[n]` int64 `prompt` and `response`, how many of them are which, `draws`, of which
    those of one prompt have the same, and `valid`, 1 for what can be learnt from."""
    rows = [tokens[row] for row in range(len(table))]
    ids = [np.empty(0, dtype=np.int32), *(row.token_ids for row in rows)]
    generated = [np.empty(0, dtype=np.bool_), *(row.is_generated for row in rows)]
    return {
        "token_ids": torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        "generated": torch.from_numpy(np.concatenate(generated)),
        "prompt": torch.from_numpy(table.prompt_lengths),
        "response": torch.from_numpy(table.response_lengths),
        "draws": torch.from_numpy(table.draws),
        "valid": torch.from_numpy(table.valid.astype(np.int64)),
    }


def tensors_to_samples(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[SampleTable, dict[int, SampleTokens]]:
    """The samples again, without log-probs and rewards."""
    table = SampleTable.of_lengths(
        tensors["prompt"].numpy(),
        tensors["response"].numpy(),
        draws=tensors["draws"].numpy(),
        valid=tensors["valid"].numpy(),
    )
    ends = table.lengths.cumsum()[:-1]
    ids = np.split(tensors["token_ids"].numpy().astype(np.int32), ends)
    generated = np.split(tensors["generated"].numpy(), ends)
    return table, {
        row: SampleTokens(ids[row], generated[row], np.zeros(len(ids[row]), dtype=np.float32))
        for row in range(len(table))
    }


def told_of(keeper: SampleKeeper, table: SampleTable, role: Role) -> dict[str, torch.Tensor]:
    """`samples_to_tensors` of a step where a role is told of it: on all ranks, or on the first
    alone. Collective over the world."""
    everything = list(range(len(table)))
    hears = [rank == 0 or not role.is_apart for rank in range(dist.get_world_size())]
    tokens = keeper.send(table, [everything if each else [] for each in hears])
    return samples_to_tensors(table, tokens) if hears[dist.get_rank()] else {}


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


def batch_of_rank(
    table: SampleTable,
    tokens: Mapping[int, SampleTokens],
    *,
    num_mini_batches: int,
    layout: TrainLayout,
    batching: MicroBatching,
    rank: int,
    orders: np.ndarray | None = None,
) -> TrainBatch:
    """What a rank of `layout` gets of a step's samples, as `plan_epochs` deals them out."""
    epochs = plan_epochs(
        table,
        num_mini_batches=num_mini_batches,
        dp_size=layout.dp_size,
        batching=batching,
        orders=orders,
    )
    return batch_by_plan(table, tokens, epochs, layout.dp_rank(rank))


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


def samples_of_ranks(epochs: Sequence[Sequence[Cuts]]) -> list[list[int]]:
    """Which samples of the step each data-parallel rank learns from, in any epoch, each once."""
    return [
        list(
            dict.fromkeys(
                sample
                for cuts in of_rank
                for mini_batch in cuts
                for micro_batch in mini_batch
                for sample in micro_batch
            )
        )
        for of_rank in zip(*epochs, strict=True)
    ]


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
    batch: TrainBatch,
    num_epochs: int,
    lengths: np.ndarray,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Iterator[TrainBatch]:
    """The mini-batches of a step, one optimizer update each, in order, as this rank has them.

    Where an epoch deals samples out to other ranks, what the stages before have found of them goes
    there first, one number per token after the other: collective over `group`, the data-parallel
    one of the layout that `batch` is of. `lengths` `[n]` are the tokens of all samples.
    """
    later = batch.later
    assert not later or len(later) == num_epochs - 1, f"{len(later)} later of {num_epochs} epochs"
    for field in dataclasses.fields(batch) if later else ():
        value = getattr(batch, field.name)
        if value is None or getattr(later[0], field.name) is not None:
            continue  # not found, or made of the samples themselves
        if field.name.startswith("routes"):
            continue  # below
        everywhere = to_all(value, batch, lengths, group, device)
        later = tuple(
            dataclasses.replace(each, **{field.name: of_batch(everywhere, each, lengths)})
            for each in later
        )
    if later and batch.routes is not None and later[0].routes is None:
        later = with_routes_of(batch, later, group)
    for epoch in (batch, *(later or [batch] * (num_epochs - 1))):
        yield from split_mini_batches(epoch)


def with_routes_of(
    batch: TrainBatch, later: Sequence[TrainBatch], group: dist.ProcessGroup
) -> tuple[TrainBatch, ...]:
    """`later` with the routes that other ranks have recorded of its samples in their `batch`.

    They go from rank to rank, once. Collective over the world; `group` is the data-parallel one.
    """
    assert batch.routes is not None and batch.routes_known is not None
    wanted = list(dict.fromkeys(i for each in later for i in each.sample_ids.tolist()))
    told = objects.all_gather((batch.sample_ids.tolist(), batch.lengths.tolist(), wanted))
    peers = dist.get_process_group_ranks(group)
    ends = np.cumsum(batch.lengths.tolist())
    packed = torch.cat([batch.routes_known[:, None].view(torch.uint8), _as_bytes(batch.routes)], 1)
    own = dict(zip(batch.sample_ids.tolist(), np.split(packed.numpy(), ends[:-1]), strict=True))
    outgoing = [np.empty(0, dtype=np.uint8)] * len(told)
    incoming, lengths = [0] * len(told), {}
    for peer in peers:
        has, their_lengths, wants = told[peer]
        lengths |= dict(zip(has, their_lengths, strict=True))
        pieces = [own[sample].ravel() for sample in wants if sample in own]
        outgoing[peer] = np.concatenate([outgoing[peer], *pieces])
        incoming[peer] = sum(lengths[i] for i in wanted if i in set(has)) * packed.shape[1]
    found: dict[int, torch.Tensor] = {}
    for peer, data in enumerate(objects.exchange(outgoing, incoming)):
        rows, has = torch.from_numpy(data).view(-1, packed.shape[1]), set(told[peer][0])
        for sample in [i for i in wanted if i in has] if peer in peers else ():
            found[sample], rows = rows[: lengths[sample]], rows[lengths[sample] :]
    moved = []
    for each in later:
        rows = torch.cat([packed[:0], *(found[i] for i in each.sample_ids.tolist())])
        ids = rows[:, 1:].contiguous().view(batch.routes.dtype)
        routes = ids.view(each.num_tokens, *batch.routes.shape[1:])
        known = rows[:, 0].contiguous().view(torch.bool)
        moved.append(dataclasses.replace(each, routes=routes, routes_known=known))
    return tuple(moved)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """`[t, ...]` -> `[t, bytes]`."""
    return values.flatten(1).contiguous().view(torch.uint8)


def to_all(
    values: torch.Tensor,
    batch: TrainBatch,
    lengths: np.ndarray,
    group: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """`[t]` of the samples in `batch` -> `[T]` of all samples, on the CPU of every rank.

    Collective over `group`, the data-parallel one of the layout that `batch` is of.
    """
    everywhere = torch.zeros(int(lengths.sum()), device=device)
    everywhere[_places(batch, lengths)] = values.to(device)
    dist.all_reduce(everywhere, group=group)
    return everywhere.cpu()


def of_batch(everywhere: torch.Tensor, batch: TrainBatch, lengths: np.ndarray) -> torch.Tensor:
    """`[T]` of all samples -> `[t]` of those in `batch`."""
    return everywhere[_places(batch, lengths)]


def _places(batch: TrainBatch, lengths: np.ndarray) -> torch.Tensor:
    """`[t]`: where a batch's tokens are among all of the step's."""
    starts = torch.from_numpy(lengths.cumsum() - lengths)
    own = batch.lengths.cumsum(0) - batch.lengths
    shift = starts[batch.sample_ids] - own
    return torch.arange(batch.num_tokens) + shift.repeat_interleave(batch.lengths)
