"""Sets of processes with ranks of their own, over which a plan can be carried out.

A transfer inside a training job runs over that job's default process group. One between a trainer
and engines that run elsewhere runs over a world that joins both: each side has a default process
group already, so this one is made beside it, from a TCP store that trainer rank 0 hosts.

What is done once per connection or update goes through the store and never waits for a process
that has given up: a rank that fails says why in the store, and all who wait there hear it.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist

from mcore_rl.common import objects

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_FAILURE = "failure"
_POLL_SECONDS = (0.002, 0.25)  # first and longest pause between two looks into the store


class World(Protocol):
    """Ranks 0 to `size - 1`, of which this process is `rank`.

    `control` is a gloo group of all of them, for what is said beside the weights.
    """

    rank: int
    size: int
    control: Any

    def new_group(self, ranks: Sequence[int]) -> Any:
        """A process group over `ranks`, in whose calls `src` and `dst` are ranks of this world.

        Called by all ranks of the world in the same order. Those outside get
        `GroupMember.NON_GROUP_MEMBER`. `dist.destroy_process_group` frees it.
        """
        ...


class DefaultWorld:
    """The ranks of this job. Its groups are for tensors on `device`: gloo's, or those of the job's
    own backend."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._backend = "gloo" if device.type == "cpu" else None
        self.control = objects.start()

    def new_group(self, ranks: Sequence[int]) -> Any:
        # torch's default is 30 minutes over gloo and 10 over NCCL, whatever the world's own is.
        timeout = objects.timeout_of_world()
        return dist.new_group(sorted(ranks), timeout=timeout, backend=self._backend)


class PeerFailure(RuntimeError):
    """Another rank of a joined world failed, or the connection to it broke; the text says which."""


class JoinedWorld:
    """Processes of several jobs, met in a store, beside the default process groups they have.

    Constructing it is collective: `size` processes with the same `store` and `name`. `backend` is
    that of the groups of `new_group`, "gloo" or "nccl"; what is said in `exchange` travels by gloo
    always. No wait is longer than `timeout_seconds`. `check`, which may be set later too, is called
    while this rank waits in `meet`; what it raises fails the world. After a failure nothing but
    `close` is possible.

    What is said is JSON. The network between the processes must be trusted all the same, as
    torch.distributed always asks: whoever reaches the store can send weights.
    """

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
        """Wait for all ranks; everyone gets what each has said, in rank order. For short messages.

        Raises PeerFailure, on all ranks, if one called `fail` or did not come in time.
        """
        self._num_meetings += 1
        at = f"meeting/{self._num_meetings}"
        pause, longest = _POLL_SECONDS
        deadline = time.monotonic() + self._timeout.total_seconds()
        try:
            self._store.set(f"{at}/{self.rank}", json.dumps(message))
            waiting = list(range(self.size))
            while waiting := [r for r in waiting if not self._store.check([f"{at}/{r}"])]:
                if self._store.check([_FAILURE]):
                    raise self._failure("stopped waiting")
                self._require_hope()
                if time.monotonic() > deadline:
                    seconds = self._timeout.total_seconds()
                    raise self._failure(f"rank {waiting[0]} did not come within {seconds:g} s")
                time.sleep(pause)
                pause = min(2 * pause, longest)
            # All came here, so all have read what was said the last time.
            self._store.delete_key(f"meeting/{self._num_meetings - 1}/{self.rank}")
            return [json.loads(self._store.get(f"{at}/{r}")) for r in range(self.size)]
        except dist.DistError as error:
            raise self._failure(f"the store is gone: {error}") from error

    def _require_hope(self) -> None:
        try:
            self.check()
        except Exception as error:  # whatever it is, the others must hear of it
            raise self._failure(str(error)) from error

    def exchange(self, message: Any) -> list[Any]:
        """`meet`, for messages of any size."""
        data = zlib.compress(json.dumps(message).encode(), 1)
        sizes = self.meet(len(data))
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in sizes]
        try:
            dist.all_gather(everyone, mine, group=self.control)
        except (RuntimeError, ValueError) as error:
            raise self._failure(f"the connection broke: {error}") from error
        return [
            json.loads(zlib.decompress(data[:size].numpy().tobytes()))
            for data, size in zip(everyone, sizes, strict=True)
        ]

    def fail(self, reason: str) -> str:
        """Tell all ranks that this one gives up; returns what failed first, here or elsewhere.

        Not collective. Closes this rank's connections, at which calls of others end with an error.
        """
        told = f"rank {self.rank}: {reason}"
        with contextlib.suppress(Exception):  # the store may be gone, which is then the failure
            told = self._store.compare_set(_FAILURE, "", told).decode()
        self.close()
        return told

    def _failure(self, what: str) -> PeerFailure:
        return PeerFailure(self.fail(what))

    def close(self) -> None:
        """Close all connections of this rank. Not collective; may be called again."""
        for group in self._groups:
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        self._groups.clear()
        # The sockets close when the last reference goes, here or with what was made of a group.
        self.control = None


def host_store(address: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    """A store that this process hosts for as long as it is kept; `port` 0 takes a free one."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, multi_tenant=True
    )


def reach_store(address: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    """The store that another process hosts. Raises RuntimeError if it does not answer in time."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def new_name() -> str:
    """A name for a joined world that no other has."""
    return uuid.uuid4().hex[:12]


def _make_backend(
    backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    # vLLM's, which does the same for its own groups across jobs and follows torch's versions.
    from vllm.distributed.utils import init_gloo_process_group
    from vllm.platforms import current_platform

    if backend == "gloo":
        group: dist.ProcessGroup = init_gloo_process_group(store, rank, size, timeout)
    else:
        make = current_platform.stateless_init_device_torch_dist_pg
        group = make(backend, store, rank, size, timeout)
    return group


def _register(
    group: dist.ProcessGroup,
    name: GroupName,
    backend: str,
    store: dist.Store,
    ranks: dict[int, int],
) -> None:
    """Make `group` known to torch.distributed's functions, with `ranks` of the world -> its own.

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
