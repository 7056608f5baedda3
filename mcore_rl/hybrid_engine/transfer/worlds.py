"""Worlds: sets of processes with their own ranks, over which a plan can be executed.

A transfer inside a training job runs over that job's default process group. A transfer between a
trainer and engines elsewhere runs over a world that joins both. Each side already has a default
process group, so this world is an additional one, made from a TCP store on trainer rank 0.

Messages once per connection or update go through the store and never wait for a process that has
given up: a rank that fails writes the reason to the store, and all ranks that wait there read it.
Objects that ranks of a joined world exchange are MessagePack of known types: no rank unpickles
what another process sends.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
import torch
import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.common.variables import variables

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_FAILURE = "failure"
POLL_SECONDS = 0.25  # the longest pause between two polls of the store
_FIRST_POLL_SECONDS = 0.002
_DEVICE_POLL_SECONDS = 0.0005
# By default PyTorch ends the process of a rank that has lost a peer. Here it must continue: a
# trainer without that server, a server until it is connected again. 2: free the communicator.
_NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class World(Protocol):
    """Ranks 0 to `size - 1`; this process is `rank`.

    `control` is a gloo group of all ranks, for messages other than weights; `everyone` is one for
    tensors on the device, of which the first use is collective. If it `is_joined`, processes go on
    after a failure, which closes its groups.
    """

    rank: int
    size: int
    control: Any
    is_joined: bool

    @property
    def everyone(self) -> Any: ...

    def gather(self, mine: Any, of: Any) -> list[Any]:
        """Return each rank's object, by rank; `of` is the type of all. Collective."""

    def new_group(self, ranks: Sequence[int]) -> Any:
        """Create a process group over `ranks`; its calls' `src` and `dst` are ranks of this world.

        All ranks of the world call it in the same order. Ranks outside the group get
        `GroupMember.NON_GROUP_MEMBER`. `dist.destroy_process_group` frees it.
        """

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Wait until the device has passed an event that messages of this world precede."""

    def wait(self, work: Any, group: Any) -> None:
        """Wait for messages in a group of this world, but not for a lost rank."""

    def lost(self, error: Exception) -> Exception:
        """Return what to raise after an error of messages, which other ranks wait for."""

    def poll(self, since: float, what: str) -> None:
        """Raise an error if messages of this world will not arrive: `what` the caller waits for
        since a time of `time.monotonic`."""


class DefaultWorld:
    """The ranks of this job. Groups are for tensors on `device`: gloo on the CPU, else the job's
    backend."""

    is_joined = False

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._backend = "gloo" if device.type == "cpu" else None
        self.control, self.everyone = objects.start(), dist.group.WORLD

    def new_group(self, ranks: Sequence[int]) -> Any:
        # torch's default is 30 minutes for gloo and 10 for NCCL, whatever the world's timeout is.
        timeout = objects.timeout_of_world()
        return dist.new_group(sorted(ranks), timeout=timeout, backend=self._backend)

    def gather(self, mine: Any, of: Any) -> list[Any]:
        return objects.all_gather(mine, self.control)

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def wait(self, work: Any, group: Any) -> None:
        work.wait()

    def lost(self, error: Exception) -> Exception:
        return error

    def poll(self, since: float, what: str) -> None:
        """Do nothing: the watchdog ends a job with a rank that is lost or stuck."""


class PeerFailure(RuntimeError):
    """Failure of another rank of a joined world, or of the connection to it; the text names it."""


class JoinedWorld:
    """Processes of several jobs that meet in a store, in addition to their default process groups.

    Constructing it is collective over `size` processes with the same `store` and `name`. `backend`
    is that of `everyone` and `new_group`, "gloo" or "nccl"; `gather` always uses gloo. No wait is
    longer than `timeout_seconds`. `check`, which may also be set later, is called while this rank
    waits; an exception from it fails the world. After a failure only `close` is possible.

    The network between the processes must be trusted, as torch.distributed always requires: any
    process that reaches the store can send weights.
    """

    is_joined = True

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        name: str,
        backend: str = "gloo",
        timeout_seconds: float = 300.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size = rank, size
        self._name, self._backend, self.check = name, backend, check
        self._timeout = timedelta(seconds=timeout_seconds)
        self._store = dist.PrefixStore(f"mcore_rl/{name}", store)
        self._groups: list[dist.ProcessGroup] = []
        self._num_groups = self._num_meetings = 0
        self.meet()
        self.control = self._make_group(range(size), "gloo")
        self._everyone: Any = None

    @property
    def everyone(self) -> Any:
        if self._everyone is None:
            self._everyone = self.new_group(range(self.size))
        return self._everyone

    def new_group(self, ranks: Sequence[int]) -> Any:
        return self._make_group(ranks, self._backend)

    def _make_group(self, ranks: Sequence[int], backend: str) -> Any:
        ranks = sorted(ranks)
        self._num_groups += 1
        if self.rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        name = cast("GroupName", f"mcore_rl_{self._name}_{self._num_groups}")
        prefix = dist.PrefixStore(f"group/{self._num_groups}", self._store)
        try:
            group = _make_backend(
                backend, prefix, ranks.index(self.rank), len(ranks), self._timeout
            )
        except RuntimeError as error:
            raise self._failure(f"could not connect to ranks {ranks}: {error}") from error
        group._set_group_name(name)
        _register(group, name, backend, prefix, {rank: at for at, rank in enumerate(ranks)})
        self._groups.append(group)
        return group

    def meet(self, message: Any = None) -> list[Any]:
        """Wait for all ranks; return their messages in rank order. For short messages.

        Raises PeerFailure, on all ranks, if one called `fail` or did not arrive in time.
        """
        self._num_meetings += 1
        at = f"meeting/{self._num_meetings}"
        pause = _FIRST_POLL_SECONDS
        started = time.monotonic()
        try:
            self._store.set(f"{at}/{self.rank}", json.dumps(message))
            waiting = list(range(self.size))
            while waiting := [r for r in waiting if not self._store.check([f"{at}/{r}"])]:
                self.poll(started, f"rank {waiting[0]} did not arrive")
                time.sleep(pause)
                pause = min(2 * pause, POLL_SECONDS)
            # All ranks are here, so all have read the messages of the last meeting.
            self._store.delete_key(f"meeting/{self._num_meetings - 1}/{self.rank}")
            return [json.loads(self._store.get(f"{at}/{r}")) for r in range(self.size)]
        except dist.DistError as error:
            raise self._failure(f"the store is gone: {error}") from error

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Wait until the device has passed `event`. Raises PeerFailure as `meet` does, which also
        ends the messages on the device."""
        started = looked = time.monotonic()
        while not event.query():
            if time.monotonic() > looked + POLL_SECONDS:
                self.poll(started, "messages on the device did not end")
                looked = time.monotonic()
            time.sleep(_DEVICE_POLL_SECONDS)
        self._require_connection()

    def wait(self, work: Any, group: Any) -> None:
        """Wait for messages. Raises PeerFailure as `meet` does, or if the connection breaks."""
        if self._backend == "nccl" and group is not self.control:
            work.wait()  # the device waits
            event = torch.cuda.Event()
            event.record()
            self.synchronize(event)
            return
        started = looked = time.monotonic()
        while not work.is_completed():
            if time.monotonic() > looked + POLL_SECONDS:
                try:
                    self.poll(started, "a collective did not end")
                except PeerFailure:
                    threading.Thread(target=_outwait, args=(work, group), daemon=True).start()
                    raise
                looked = time.monotonic()
            time.sleep(_DEVICE_POLL_SECONDS)
        try:
            work.wait()
        except (RuntimeError, ValueError) as error:
            raise self.lost(error) from None

    def lost(self, error: Exception) -> PeerFailure:
        """Fail the world, whose connections an error of messages has broken."""
        reason = str(error).split(". This is typically")[0]  # without gloo's guesses
        return self.failure(RuntimeError(f"the connection broke: {reason}"), caused_by=error)

    def failure(self, error: Exception, *, caused_by: Exception | None = None) -> PeerFailure:
        """Call `fail` with an error of this rank; return what to raise."""
        # The frames of the failed calls hold process groups, which keep open the connections that
        # the other ranks wait on.
        traceback.clear_frames((caused_by or error).__traceback__)
        return self._failure(str(error) or repr(error))

    def poll(self, since: float, what: str) -> None:
        """Raise PeerFailure if another rank gave up, a connection or `check` fails, or the timeout
        has passed since `since`."""
        try:
            has_failed = self._store.check([_FAILURE])
        except dist.DistError as error:
            raise self._failure(f"the store is gone: {error}") from error
        if has_failed:
            raise self._failure("stopped waiting")
        self._require_connection()
        try:
            self.check()
        except Exception as error:  # of any type: it must be reported to the other ranks
            raise self._failure(str(error)) from error
        if time.monotonic() > since + (most := self._timeout.total_seconds()):
            raise self._failure(f"{what} within {most:g} s")

    def _on_device(self) -> list[Any]:
        """Return the NCCL backends of the groups."""
        device, is_nccl = torch.device("cuda"), self._backend == "nccl"
        return [g._get_backend(device) for g in self._groups if is_nccl and g is not self.control]

    def _require_connection(self) -> None:
        for backend in self._on_device():
            if (error := backend.get_error()).name != "SUCCESS":
                raise self._failure(f"the connection broke: {error.name}")

    def gather(self, mine: Any, of: Any) -> list[Any]:
        """Return each rank's message, of any size. Raises PeerFailure as `meet` does."""
        data = zlib.compress(msgspec.msgpack.encode(mine), 1)
        sizes = self.meet(len(data))
        sent = torch.zeros(max(sizes), dtype=torch.uint8)
        sent[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.empty_like(sent) for _ in sizes]
        self.wait(dist.all_gather(everyone, sent, group=self.control, async_op=True), self.control)
        decoder = msgspec.msgpack.Decoder(of)
        return [
            decoder.decode(zlib.decompress(data[:size].numpy().tobytes()))
            for data, size in zip(everyone, sizes, strict=True)
        ]

    def fail(self, reason: str) -> str:
        """Report to all ranks that this one gives up; return the first failure of any rank.

        Not collective. Closes this rank's connections, which ends other ranks' calls with an error.
        """
        failure = f"rank {self.rank}: {reason}"
        with contextlib.suppress(Exception):  # the store may be gone
            failure = self._store.compare_set(_FAILURE, "", failure).decode()
        for backend in self._on_device():
            backend.abort()  # ends kernels that wait for a peer; closing would wait for them
        self.close()
        return failure

    def _failure(self, what: str) -> PeerFailure:
        return PeerFailure(self.fail(what))

    def close(self) -> None:
        """Close all connections of this rank. Not collective; may be called again."""
        for group in self._groups:
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        self._groups.clear()
        # The sockets close with the last reference, here or in objects made from a group.
        self.control = self._everyone = None


def host_store(address: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    """Host a store in this process while the object lives; `port` 0 takes a free port."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, multi_tenant=True
    )


def reach_store(address: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    """Connect to another process's store. Raises RuntimeError if it does not answer in time."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _make_backend(
    backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    # vLLM creates its own groups across jobs in the same way, and follows torch's versions.
    from vllm.distributed.utils import init_gloo_process_group
    from vllm.platforms import current_platform

    if backend == "gloo":
        group: dist.ProcessGroup = init_gloo_process_group(store, rank, size, timeout)
    else:
        make = current_platform.stateless_init_device_torch_dist_pg
        with variables(_NCCL_VARIABLES):
            group = make(backend, store, rank, size, timeout)
    return group


def _outwait(work: Any, group: Any) -> None:
    """Keep a group until its messages have ended: its destructor would wait for them."""
    with contextlib.suppress(RuntimeError):
        work.wait()
    del group


def _register(
    group: dist.ProcessGroup,
    name: GroupName,
    backend: str,
    store: dist.Store,
    ranks: dict[int, int],
) -> None:
    """Register `group` with torch.distributed's functions; `ranks` maps world ranks to its own.

    torch has no public function for a group outside the default one.
    """
    from torch._C._distributed_c10d import _register_process_group

    world = dist.distributed_c10d._world
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = ranks
    world.pg_backend_config[group] = backend
    world.pg_to_tag[group] = f"ptd:{name}"
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    world.tags_to_pg.setdefault("", []).append(group)
    _register_process_group(name, group)
