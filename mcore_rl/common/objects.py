"""Python objects between all ranks, over gloo whatever the world speaks.

Over NCCL an object is copied to the device, and gathered there from every rank, padded to the
largest: of a few megabytes of samples, 256 ranks make a gigabyte on each device. So one gloo group
of the whole world serves all objects, and every wait that moves no tensor. Nothing else of mcore_rl
calls torch's functions for objects, or its barrier.

All functions are collective over the world (or over `group`, which must be one over gloo), and the
first of them makes the group: `start` does at a place of one's choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.profiler import record_function

_made: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []  # (world, the group of it)


def start() -> dist.ProcessGroup:
    """The gloo group of this world, made at the first call."""
    world = dist.distributed_c10d._get_default_group()
    if not _made or _made[0][0] is not world:
        _made[:] = [(world, dist.new_group(backend="gloo", timeout=timeout_of_world()))]
    return _made[0][1]


def timeout_of_world() -> timedelta:
    """How long the world waits: torch gives new groups a default that may be another."""
    world = dist.distributed_c10d._get_default_group()
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return dist.distributed_c10d.default_pg_timeout


def all_gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank gives, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size(group or start())
    with _span("all_gather_object", group):
        dist.all_gather_object(everyone, mine, group=group or start())
    return everyone


def gather(mine: Any) -> list[Any] | None:
    """What each rank gives, by rank, on rank 0; None on the others."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    with _span("gather_object"):
        dist.gather_object(mine, everyone, dst=0, group=start())
    return everyone


def broadcast(mine: Any, source: int = 0) -> Any:
    """What rank `source` gives, on all ranks; the others' is not looked at."""
    told = [mine]
    with _span("broadcast_object_list"):
        dist.broadcast_object_list(told, src=source, group=start())
    return told[0]


def exchange(outgoing: Sequence[np.ndarray], incoming_bytes: Sequence[int]) -> list[np.ndarray]:
    """Arrays of bytes between all ranks: what each of them has sent here, by rank.

    `outgoing` is for each rank, `incoming_bytes` how many each will send. The host's memory only.
    """
    sent = torch.from_numpy(np.concatenate(outgoing))
    received = torch.empty(sum(incoming_bytes), dtype=torch.uint8)
    with _span("all_to_all_single"):
        dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=list(incoming_bytes),
            input_split_sizes=[len(each) for each in outgoing],
            group=start(),
        )
    return np.split(received.numpy(), np.cumsum(incoming_bytes)[:-1])


def barrier() -> None:
    """Return once all ranks have come."""
    with _span("barrier"):
        dist.barrier(group=start())


def on_any(here: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether it is so on any rank."""
    flag = torch.tensor([int(here)], dtype=torch.int32)
    with _span("all_reduce", group):
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group or start())
    return bool(flag.item())


def _span(
    name: str, group: dist.ProcessGroup | None = None
) -> contextlib.AbstractContextManager[Any]:
    """For `--rl-trace`, which tells by it what a rank waited for all others: see `trace_table`."""
    if group is not None or not profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return record_function(f"all ranks: {name}")
