"""Megatron's saves of `--async-save`: its queue of requests, which a process of each rank writes.

    rank      copy in host memory ─► training continues ─► every step: ended on all ranks? finalize
    process                      └─► write, flush ─────────────────────┘

The process is that of `patches/megatron/background_saving`. Functions are collective over the
ranks that save.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from mcore_rl.megatron import adapter as megatron_adapter  # first: it applies the patches
from mcore_rl.patches.megatron import background_saving

from megatron.core.dist_checkpointing.strategies.async_utils import (  # isort: skip
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
)

__all__ = ["finish", "release", "reserve", "take_digests", "use", "with_arguments"]
assert megatron_adapter  # imported for its effect


class _Writing(AsyncCaller):
    """Megatron's interface to what writes one request, which the request's function starts."""

    def __init__(self) -> None:
        self._written: Future[Any] | None = None  # None: this rank has nothing to write

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        if async_req.async_fn is not None:
            self._written = async_req.async_fn()

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        if self._written is not None and blocking:
            self._written.exception()  # waits; finalization raises it
        runs = self._written is not None and not self._written.done()
        return not runs if no_dist else bool(self.sync_all_async_calls(int(runs)))

    def close(self, abort: bool = False) -> None:
        """Do nothing: the process ends with this one."""

    def __del__(self) -> None:
        """Do nothing, as above."""


class _Queue(AsyncCallsQueue):
    """Megatron's queue, whose finalizing functions see the arguments of the time of the request:
    they write and delete where these say."""

    def _get_async_caller(self) -> Any:  # an AsyncCaller; Megatron's type names two of its own
        return _Writing()

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        from megatron.training.global_vars import get_args

        args = get_args()
        values = {name: getattr(args, name) for name in ("save", "save_retain_interval")}
        finalize = [
            functools.partial(_called_with, args, values, function)
            for function in async_request.finalize_fns
        ]
        return int(super().schedule_async_request(async_request._replace(finalize_fns=finalize)))


def _called_with(
    args: argparse.Namespace, values: dict[str, Any], function: Callable[[], None]
) -> None:
    with with_arguments(args, **values):
        function()


@contextlib.contextmanager
def with_arguments(args: argparse.Namespace, **values: Any) -> Iterator[None]:
    """Set arguments temporarily."""
    before = {name: getattr(args, name) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(before)


_queue = _Queue()


def use() -> None:
    """Make Megatron's saves with `args.async_save` requests of this queue."""
    from megatron.training import async_utils

    async_utils._async_calls_queue = _queue


def reserve(state: megatron_adapter.TrainState) -> None:
    """Start to make host memory for the copies of the first save, once updates have made the
    optimizer's state. A second call has no effect."""
    by_kind = megatron_adapter.train_tensors(state)
    tensors = [tensor for kind in ("parameters", "optimizer") for _, tensor in by_kind[kind]]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    background_saving.reserve(num_bytes + num_bytes // 100)  # with gaps between tensors


def release() -> None:
    """Free the host memory of copies, after the last save."""
    background_saving.release()


def take_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the files below `folder` that this rank's process has written, by their
    name there. Not collective; each is returned once."""
    mine = [path for path in background_saving.digests if path.is_relative_to(folder)]
    return {p.relative_to(folder).as_posix(): background_saving.digests.pop(p) for p in mine}


def finish(*, waits: bool) -> bool:
    """Finalize the saves whose files are written on all ranks, with `waits` all of them. Return
    whether none is left. Raises torch's CheckpointException on all ranks for a failed one."""
    if _queue.async_calls:  # the same on all ranks
        _queue.maybe_finalize_async_calls(blocking=waits)
    return not _queue.async_calls
