"""Engines in other processes, updated shard to shard: the side of the trainer.

    trainer = MegatronTrainerWeightTransferEngine(info, source=source, engines=[client, ...])
    trainer.connect()              once, and again after a failure
    trainer.send_weights("17")     pause -> start -> every slice to who needs it -> finish -> resume

All calls are collective over the trainer's ranks. Rank 0 also hosts the store in which all ranks
meet, and calls the vLLM servers; the other ranks only send. See `engine` for the other side, and
`session` for the common part.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from mcore_rl.common import objects
from mcore_rl.hybrid_engine.proof.attest import SAMPLE
from mcore_rl.hybrid_engine.remote.engine import (
    BACKEND,
    NO_PLAN,
    MegatronInitInfo,
    MegatronUpdateInfo,
)
from mcore_rl.hybrid_engine.remote.engine_client import EngineClient
from mcore_rl.hybrid_engine.remote.session import Offer, Session, UpdateReport
from mcore_rl.hybrid_engine.transfer.worlds import (
    POLL_SECONDS,
    JoinedWorld,
    host_store,
    reach_store,
)
from mcore_rl.hybrid_engine.weight_stream import HandOverOptions
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.tensors import TensorInfo

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0  # in which the calls of sound servers end after a failure


@dataclass
class MegatronTrainerInitInfo(TrainerInitInfo):
    """The trainer's address and transport; `rank` is `dist.get_rank()`.

    `master_address` must reach trainer rank 0 from every worker; the default is its host name.
    `master_port` 0 takes a free port. `group_backend`, "gloo" or "nccl", carries weights; the
    default is "nccl" if they are on CUDA. No wait is longer than `timeout_seconds`. `pause_mode` is
    a mode of `EngineClient.pause`; None leaves pausing and the prefix cache to the caller.
    `options` are those of the hand-over; by default one row of 32 is verified, different rows each
    time.
    """

    backend: ClassVar[str] = BACKEND

    master_address: str = field(default_factory=socket.gethostname)
    master_port: int = 0
    group_backend: str = ""
    options: HandOverOptions = HandOverOptions(seed=0, attest=SAMPLE)
    timeout_seconds: float = 300.0
    pause_mode: str | None = "keep"


class ShardSource(WeightSource):
    """The trainer's weights as shards: no tensor is ever gathered.

    `shards` is this rank's; `tensors` are the checkpoint's, the same on all ranks.
    """

    def __init__(self, shards: ModelShards, tensors: dict[str, TensorInfo]) -> None:
        self.shards, self.tensors = shards, tensors

    def metadata(self) -> list[ParamMeta]:
        """Return names, dtypes and full shapes of the checkpoint's tensors."""
        return [
            ParamMeta(name, getattr(torch, info.dtype), info.shape)
            for name, info in self.tensors.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise RuntimeError("a ShardSource gives slices, by shards.read; it has no whole tensors")


def start_update(pause_mode: str | None, is_closed: threading.Event, engine: EngineClient) -> None:
    """`is_closed`: the trainer no longer waits for these calls, and may have begun others."""
    if pause_mode is not None:
        engine.pause(pause_mode)
    if is_closed.is_set():
        return
    try:
        engine.start_weight_update()
    except RuntimeError:
        if is_closed.is_set():
            raise
        # A trainer that has ended, or failed at another server, may have begun one.
        with contextlib.suppress(RuntimeError):
            engine.update_weights(asdict(MegatronUpdateInfo(NO_PLAN, "")))
        engine.start_weight_update()


class MegatronTrainerWeightTransferEngine(TrainerWeightTransferEngine[MegatronTrainerInitInfo]):
    """This trainer rank's end of the connection to one or several vLLM servers.

    All methods except `shutdown` are collective over the trainer's default process group, and end
    within the timeout. A failure on any rank or worker raises RuntimeError with the same text on
    all trainer ranks. The connection is then closed, the servers stay paused, and `connect` must be
    called again.
    """

    init_info_cls = MegatronTrainerInitInfo

    def __init__(
        self,
        init_info: MegatronTrainerInitInfo,
        *,
        source: ShardSource,
        engines: Sequence[EngineClient],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called on the sender while it waits; an error that it raises ends the wait,
        on all ranks."""
        super().__init__(client=engines[0], source=source, is_sender=init_info.is_sender)
        on_device = "nccl" if source.shards.device.type == "cuda" else "gloo"
        self._info = replace(init_info, group_backend=init_info.group_backend or on_device)
        self._source, self._engines = source, tuple(engines)
        self._store: dist.TCPStore | None = None
        self._session: Session | None = None
        self._world: JoinedWorld | None = None
        self._calls: list[Future[Any]] = []
        self._num_calls = 0
        self._check, self._is_closed = check, threading.Event()
        self.hanging: list[int] = []  # engines whose calls did not end after the last failure

    @classmethod
    def trainer_init(
        cls,
        init_info: MegatronTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Connect to one server; the constructor of vLLM's `WeightTransferTrainerFactory`."""
        if not isinstance(source, ShardSource):
            raise ValueError(f"the backend {BACKEND} sends shards: give a ShardSource as source")
        trainer = cls(init_info, source=source, engines=[client])
        trainer.connect()
        return trainer

    def connect(self) -> None:
        """Join the workers of all servers in a world, and agree on the plan."""
        self.shutdown()
        self._is_closed = threading.Event()
        self._together(self._connect)

    def send_weights(self, weight_version: str | None = None) -> UpdateReport:
        """Send the current weights to all servers, which then report `weight_version`.

        The default is the number of the call.
        """
        self._num_calls += 1
        version = weight_version or str(self._num_calls)
        report: UpdateReport = self._together(lambda: self._send(version))
        return report

    def shutdown(self) -> None:
        """Close the connection. Not collective; the servers keep running with their weights."""
        if self._session is not None:
            self._session.close()
        if self._world is not None:
            self._world.close()
        self._session = self._world = self._store = None
        self._calls = []
        self._is_closed.set()

    def _together(self, work: Callable[[], Any]) -> Any:
        """Run `work` on all trainer ranks; return its result, or raise the first failure on all."""
        result, fault = None, None
        try:
            result = work()
        except Exception as error:  # of any type: workers and trainer ranks must receive it
            if self._world is not None:
                self._world.fail(str(error))
            # The calls of all others end now: their workers learn of the failure.
            _, running = wait(self._calls, timeout=GRACE_SECONDS)
            self.hanging = [number for number, call in enumerate(self._calls) if call in running]
            self.shutdown()
            fault = error
        mine = None if fault is None else str(fault) or repr(fault)
        try:
            faults = objects.all_gather(mine)
        except RuntimeError as lost:  # a trainer rank is gone
            self.shutdown()
            raise RuntimeError(mine or f"a rank of the trainer is gone: {lost}") from fault
        first = next((text for text in faults if text), None)
        if first is not None:
            self.shutdown()
            raise RuntimeError(first) from fault
        return result

    def _connect(self) -> None:
        info = self._info
        num_trainers = dist.get_world_size()
        meeting_point = self._invite(num_trainers) if self.is_sender else None
        place = objects.broadcast(meeting_point)
        if isinstance(place, str):
            raise RuntimeError(place)
        port, name, size = place
        store = self._store
        if store is None:
            store = reach_store(info.master_address, port, info.timeout_seconds)
        self._world = JoinedWorld(
            store,
            rank=info.rank,
            size=size,
            name=name,
            backend=info.group_backend,
            timeout_seconds=info.timeout_seconds,
            check=self._check_calls,
        )
        shards = self._source.shards
        self._session = Session(
            self._world,
            device=shards.device,
            offer=Offer(self._source.tensors, shards.shape, info.options),
            shards=shards,
        )
        self._wait_for_calls()

    def _invite(self, num_trainers: int) -> tuple[int, str, int] | str:
        """Host the store and call all servers to it; return the world's (port, name, size).

        Returns the error's text if that fails. Only on rank 0. The calls return when the workers
        are connected; `_wait_for_calls` waits for them.
        """
        info = self._info
        try:
            workers = self._call_all(lambda engine: engine.num_workers())
            self._store = host_store(info.master_address, info.master_port, info.timeout_seconds)
        except Exception as error:  # clients may raise any; `_connect` reports it to all ranks
            return str(error)
        name, size = uuid.uuid4().hex[:12], num_trainers + sum(workers)
        offset = num_trainers
        calls = []
        for engine, count in zip(self._engines, workers, strict=True):
            invitation = MegatronInitInfo(
                master_address=info.master_address,
                master_port=self._store.port,
                world_name=name,
                rank_offset=offset,
                world_size=size,
                group_backend=info.group_backend,
                timeout_seconds=info.timeout_seconds,
            )
            calls.append(partial(engine.init_weight_transfer_engine, asdict(invitation)))
            offset += count
        self._start(calls)
        return self._store.port, name, size

    def _send(self, weight_version: str) -> UpdateReport:
        if self._session is None:
            raise RuntimeError("not connected to any engine; call connect first")
        update = MegatronUpdateInfo(self._session.plan_id, weight_version)
        if self.is_sender:
            self._call_all(partial(start_update, self._info.pause_mode, self._is_closed))
            self._start([partial(each.update_weights, asdict(update)) for each in self._engines])
        report = self._session.update(weight_version, plan_id=update.plan_id)
        self._wait_for_calls()
        if self.is_sender:
            self._call_all(lambda engine: engine.finish_weight_update(weight_version))
            if self._info.pause_mode is not None:
                self._call_all(lambda engine: engine.resume())
        return report

    def _call_all(self, call: Callable[[EngineClient], Any]) -> list[Any]:
        """Make a call to all servers at once, and return the answers."""
        self._start([partial(call, engine) for engine in self._engines])
        return self._wait_for_calls()

    def _start(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Start calls that return when the workers have done their part in the next steps."""
        pool = ThreadPoolExecutor(len(calls), thread_name_prefix="mcore_rl_engine")
        self._calls = [pool.submit(call) for call in calls]
        pool.shutdown(wait=False)

    def _check_calls(self) -> None:
        """Raise the error of a call of `_start` or of `check`; while waiting for the workers."""
        self._check()
        for call in self._calls:
            if call.done():
                call.result()

    def _wait_for_calls(self) -> list[Any]:
        """Return the answers to the calls of `_start`. Raises the error of the first that fails."""
        seconds = self._info.timeout_seconds
        deadline = time.monotonic() + seconds
        running: Collection[Future[Any]] = self._calls
        while running and time.monotonic() < deadline:
            _, running = wait(self._calls, timeout=POLL_SECONDS, return_when=FIRST_EXCEPTION)
            self._check_calls()
        if running:
            numbers = [number for number, call in enumerate(self._calls) if call in running]
            raise RuntimeError(f"engines {numbers} did not answer a call within {seconds:g} s")
        answers = [call.result() for call in self._calls]
        self._calls = []
        return answers
