"""Exchange of Python objects between all ranks over one gloo group, whatever backend the world
uses.

Over NCCL objects are gathered on every device, padded to the largest: a few megabytes of samples
from each of 256 ranks take a gigabyte. No other module calls torch's object collectives or barrier.

All functions are collective over the world (or over `group`, which must be a gloo group). The first
call creates the group; `start` creates it at a chosen place.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.common.spans import COLLECTIVE, WORLD, span

_made: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []  # (world, its gloo group)


def start() -> dist.ProcessGroup:
    """Return the gloo group of this world, created by the first call."""
    world = dist.distributed_c10d._get_default_group()
    if not _made or _made[0][0] is not world:
        _made[:] = [(world, dist.new_group(backend="gloo", timeout=timeout_of_world()))]
    return _made[0][1]


def timeout_of_world() -> timedelta:
    """Return the world's timeout; torch's default for new groups may differ from it."""
    world = dist.distributed_c10d._get_default_group()
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return dist.distributed_c10d.default_pg_timeout


def all_gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return each rank's object, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size(group or start())
    with span("all_gather_object", COLLECTIVE if group else WORLD):
        dist.all_gather_object(everyone, mine, group=group or start())
    return everyone


def gather(mine: Any) -> list[Any] | None:
    """Return each rank's object, by rank, on rank 0; None on the others."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    with span("gather_object", WORLD):
        dist.gather_object(mine, everyone, dst=0, group=start())
    return everyone


def broadcast(mine: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank `source`'s object on all ranks; the others' objects are ignored."""
    shared = [mine]
    with span("broadcast_object_list", COLLECTIVE if group else WORLD):
        dist.broadcast_object_list(shared, src=source, group=group or start())
    return shared[0]


def exchange(outgoing: Sequence[np.ndarray], incoming_bytes: Sequence[int]) -> list[np.ndarray]:
    """Exchange arrays of bytes between all ranks; return the arrays received, by rank.

    `outgoing` has an array for each rank, `incoming_bytes` each rank's size. Host memory only.
    """
    sent = torch.from_numpy(np.concatenate(outgoing))
    received = torch.empty(sum(incoming_bytes), dtype=torch.uint8)
    with span("all_to_all_single", WORLD):
        dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=list(incoming_bytes),
            input_split_sizes=[len(each) for each in outgoing],
            group=start(),
        )
    return np.split(received.numpy(), np.cumsum(incoming_bytes)[:-1])


def as_bytes(value: Any) -> np.ndarray:
    """Return an object as `[n]` uint8, for other ranks of the job. Local."""
    return np.frombuffer(pickle.dumps(value), dtype=np.uint8)


def from_bytes(data: np.ndarray) -> Any:
    """Return the object of `as_bytes` of a rank of this job. Local."""
    return pickle.loads(data.tobytes())


def barrier() -> None:
    """Return once all ranks have called it."""
    with span("barrier", WORLD):
        dist.barrier(group=start())


def on_any(here: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `here` is true on any rank."""
    flag = torch.tensor([int(here)], dtype=torch.int32)
    with span("all_reduce", COLLECTIVE if group else WORLD):
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group or start())
    return bool(flag.item())
