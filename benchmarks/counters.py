"""Counters of the traffic that torch.distributed's calls bring to one rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass(slots=True)
class Traffic:
    """Traffic of one rank. Pickled objects and reductions, which carry no weights, are control."""

    received_bytes: int = 0
    num_calls: int = 0  # each message of a batch of point-to-point messages counts
    control_bytes: int = 0
    control_calls: int = 0

    def add(self, num_bytes: int, *, control: bool) -> None:
        if control:
            self.control_bytes += num_bytes
            self.control_calls += 1
        else:
            self.received_bytes += num_bytes
            self.num_calls += 1


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count broadcasts, all-gathers, reductions and batches of messages in a `with` block.

    They are replaced in both modules that callers use, so that calls inside of object collectives
    count, too. Other collectives, which no path uses, raise RuntimeError.
    """
    traffic = Traffic()
    pickling = 0

    def through(name: str, received: Callable[..., int]) -> Callable[..., Any]:
        original = getattr(dist, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            control = pickling > 0 or name == "all_reduce"
            traffic.add(received(*args, **kwargs), control=control)
            return original(*args, **kwargs)

        return call

    def of_objects(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal pickling
            pickling += 1
            try:
                return original(*args, **kwargs)
            finally:
                pickling -= 1

        return call

    def batch(operations: list[dist.P2POp]) -> Any:
        for operation in operations:
            comes = operation.op is dist.irecv
            traffic.add(operation.tensor.nbytes if comes else 0, control=False)
        return send_batch(operations)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this collective is not counted; add it to benchmarks/counters.py")

    send_batch = dist.batch_isend_irecv
    replaced: dict[str, Any] = {
        "broadcast": through("broadcast", received_of_broadcast),
        "all_gather": through("all_gather", received_of_all_gather),
        "all_reduce": through("all_reduce", lambda tensor, *args, **kwargs: tensor.nbytes),
        "batch_isend_irecv": batch,
        "all_gather_object": of_objects("all_gather_object"),
        "broadcast_object_list": of_objects("broadcast_object_list"),
    }
    replaced |= dict.fromkeys("send recv scatter gather reduce all_to_all_single".split(), refuse)
    replaced |= dict.fromkeys(("all_to_all", "all_gather_into_tensor", "reduce_scatter"), refuse)
    with patch.multiple(dist, **replaced), patch.multiple(distributed_c10d, **replaced):
        yield traffic


def received_of_broadcast(
    tensor: Any, src: int | None = None, group: Any = None, *args: Any, **more
) -> int:
    """Return the bytes that a broadcast brings to this rank."""
    source = more.get("group_src")
    here = dist.get_rank() if source is None else dist.get_rank(group)
    return 0 if here == (src if source is None else source) else tensor.nbytes


def received_of_all_gather(
    tensor_list: Any, tensor: Any, group: Any = None, *args: Any, **more
) -> int:
    """Return the bytes that an all-gather brings to this rank from others."""
    return sum(each.nbytes for each in tensor_list) - tensor_list[dist.get_rank(group)].nbytes
