"""`--rl-rollout-servers`, as the actor's ranks use them; `controller_ranks` sends the requests.

Weights travel from the actor's shards to the workers of all servers (`hybrid_engine.remote`). A
server that fails an update gets no requests until a later one succeeds; nor does one that does not
fit the job, or that scores canaries otherwise than the actor. While others get the weights, updates
leave it out, for longer after each failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.common.addresses import header_from
from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.proof.attest import OFF
from mcore_rl.hybrid_engine.proof.canary import Canary
from mcore_rl.hybrid_engine.remote.engine import NO_FIT
from mcore_rl.hybrid_engine.remote.engine_client import HealthWatch, HTTPEngineClient
from mcore_rl.hybrid_engine.remote.prompt_scores import PromptScores, ScoringFailed
from mcore_rl.hybrid_engine.remote.session import UpdateReport
from mcore_rl.hybrid_engine.remote.trainer import (
    MegatronTrainerInitInfo,
    MegatronTrainerWeightTransferEngine,
    ShardSource,
)
from mcore_rl.hybrid_engine.switch_report import TO_ROLLOUT, Hook, ReshardReport
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.timeline import IDLE
from mcore_rl.trainer.controller_ranks import ControllerRanks
from mcore_rl.trainer.hand_overs import hand_over_options
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.roles.remote import RemoteRole
from mcore_rl.trainer.rollouts import NoServersLeft
from mcore_rl.trainer.sampling import Start
from mcore_rl.trainer.sampling_ranks import SamplingRanks
from mcore_rl.trainer.separate import TRAINING, RemoteRollouts, RemoteSampleStore, log_bank
from mcore_rl.trainer.server_checks import check_server

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_CANARY_SECONDS = 60.0  # of a request for canaries, and in which failed ones are repeated
_PROBE_SECONDS = 30.0  # without an answer, before a server gets weights and meanwhile
_MAX_PAUSE = 64  # updates


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a server failed, in which update the last time, and how many updates then leave it out.

    Example: `_Failure("returns raw_logprobs", last=7, pause=4)` is left out up to the update 11.
    """

    why: str
    last: int
    pause: int = 1

    def again(self, why: str, update: int) -> _Failure:
        """Return the failure after one more, which may be in the same update."""
        if update == self.last:
            return replace(self, why=why)
        return _Failure(why, update, min(2 * self.pause, _MAX_PAUSE))

    def is_over(self, update: int) -> bool:
        """Return whether to try the server again."""
        return update > self.last + self.pause


class ServerSync:
    """The weight sync of servers: `with servers:` gives them new weights. Collective over the
    actor's ranks. Raises NoServersLeft; the weight version is then the one before."""

    def __init__(
        self, job: Job, role: RemoteRole, source: ShardSource, canary: Canary | None = None
    ) -> None:
        self._job, self._role, self._source, self._canary = job, role, source, canary
        self.weight_version = 0
        self.on_reshard_start: list[Hook] = []
        self.on_reshard_end: list[Hook] = []
        self.while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._connected: dict[tuple[str, ...], MegatronTrainerWeightTransferEngine] = {}
        self._num_updates = 0
        self._failing: dict[str, _Failure] = {}
        self._capacities: dict[str, int] = {}  # requests that a server runs at a time
        self._suspects: set[str] = set()  # servers that failed their last canaries
        self._health = HealthWatch(())  # of the servers that get weights now, on rank 0

    def __enter__(self) -> Self:
        self.weight_version += 1
        self.update()
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: servers keep their weights and may keep sampling."""

    def update(self, *, is_stuck: bool = False) -> None:
        """Give the weights to all servers that can be reached; wait until there is one, within
        `while_waiting`. `is_stuck`: because sampling could not continue with the last update."""
        for hook in self.on_reshard_start:
            hook(ReshardReport(TO_ROLLOUT, self.weight_version, 0.0))
        self._num_updates += 1
        held: dict[str, UpdateReport] = {}
        seconds = 0.0  # without waits
        while not held:
            started = time.perf_counter()
            answer = self._role.call(ControllerRanks.begin_update)
            if is_stuck:
                self._require_patience(answer)
                is_stuck = False
            held = self._give_all(answer["urls"])
            seconds += time.perf_counter() - started
            if not held:
                self._wait(answer)
        capacities = {url: self._capacities[url] for url in held}
        self._role.call(
            ControllerRanks.admit, capacities=capacities, weight_version=self.weight_version
        )
        whole = replace(
            _joined(list(held.values()), self.weight_version, seconds),
            attested=self._job.config.weight_sync.attest != OFF,  # a failure of it raises
        )
        for hook in self.on_reshard_end:
            hook(whole)

    def _require_patience(self, answer: dict[str, Any]) -> float:
        """Return for how many seconds the run may continue without a token. Raises
        NoServersLeft."""
        waited: float = answer["seconds"]
        left = 60 * self._job.config.rollout.rollout_server_wait_minutes - waited
        if left <= 0:
            self.weight_version -= 1
            faults = answer["faults"] | {url: each.why for url, each in self._failing.items()}
            reasons = "; ".join(f"{url}: {why}" for url, why in faults.items())
            raise NoServersLeft(
                f"none was left that samples for {waited:.0f} s{reasons and f' ({reasons})'}"
            )
        return left

    def _wait(self, answer: dict[str, Any]) -> None:
        """Wait for servers, none of which has the weights."""
        left = self._require_patience(answer)
        with self.while_waiting():
            time.sleep(min(_RETRY_SECONDS, left))

    def _give_all(self, urls: Collection[str]) -> dict[str, UpdateReport]:
        """Give the weights to servers: together to those that have not failed, then to each of the
        others that is due, or to all of these if no other server has the weights."""
        self._failing = {url: each for url, each in self._failing.items() if url in urls}
        failing = dict(self._failing)
        held = self._give(tuple(url for url in urls if url not in failing))
        for url, failure in failing.items():
            if not held or failure.is_over(self._num_updates):
                held |= self._give((url,))
        return held

    def _give(self, urls: tuple[str, ...]) -> dict[str, UpdateReport]:
        """Give the weights to servers, together or, if that fails, to each alone. Return those that
        can get requests."""
        urls = self._fitting(urls)
        if not urls:
            return {}
        report = self._send(urls)
        if report is None:
            others = tuple(url for url in urls if not self._has_failed(url))
            if others != urls:
                return self._give(others)
            alone = [self._give((url,)) for url in urls]  # nobody knows whose failure it is
            return {url: each for reports in alone for url, each in reports.items()}
        sound = self._sound(urls)
        for url in sound:
            self._failing.pop(url, None)
        return dict.fromkeys(sound, report)

    def _fitting(self, urls: tuple[str, ...]) -> tuple[str, ...]:
        """Return the servers without those that have a worker that hangs, and without those that do
        not fit the job. The latter before each connection: a server that has restarted has none,
        and may have other options."""
        if not urls:
            return urls
        mine = self._checked(urls) if dist.get_rank() == 0 else None
        capacities, faults = objects.broadcast(mine)
        self._capacities |= capacities
        for url, why in faults.items():
            self._fail(url, why)
        return tuple(capacities)

    def _checked(self, urls: tuple[str, ...]) -> tuple[dict[str, int], dict[str, str]]:
        """Return the capacities of the servers that fit the job, and what is wrong with others."""
        are_new = urls not in self._connected

        def check(url: str) -> int | str:
            try:
                self._client(url).require_workers()
                return check_server(url, self._job.spec) if are_new else self._capacities[url]
            except UsageError as error:
                return f"{error.found}; {error.remedy}"
            except RuntimeError as error:
                return str(error)

        with ThreadPoolExecutor(len(urls)) as pool:
            results = dict(zip(urls, pool.map(check, urls), strict=True))
        capacities = {url: each for url, each in results.items() if isinstance(each, int)}
        asked = self._job.config.engine.rollout_max_num_seqs
        for url, capacity in capacities.items():
            if capacity < asked and self._capacities.get(url) != capacity:
                logger.info(
                    "[Servers] %s gets at most %d requests at a time, its --max-num-seqs, instead "
                    "of --rl-rollout-max-num-seqs %d",
                    *(url, capacity, asked),
                )
        return capacities, {url: each for url, each in results.items() if isinstance(each, str)}

    def _fail(self, url: str, why: str) -> None:
        """Note that a server has failed this update."""
        before = self._failing.get(url)
        if before is None or before.why != why:
            logger.warning("[Servers] %s gets no requests: %s", url, why)
        now = self._num_updates
        self._failing[url] = _Failure(why, now) if before is None else before.again(why, now)

    def _has_failed(self, url: str) -> bool:
        """Return whether a server has failed this update."""
        return url in self._failing and self._failing[url].last == self._num_updates

    def _send(self, urls: tuple[str, ...]) -> UpdateReport | None:
        """Send the weights to servers; return None if that fails, after `_fail` for those whose
        failure it is, if that is known. One with another model ends all ranks with exit code 2."""
        for others in [each for each in self._connected if each != urls and {*each} & {*urls}]:
            self._connected.pop(others).shutdown()
        try:
            with self._watched(urls) as self._health:
                if urls not in self._connected:
                    self._connected[urls] = self._engine(urls)
                    self._connected[urls].connect()
                report = self._connected[urls].send_weights(str(self.weight_version))
        except RuntimeError as error:  # the same on all ranks
            connection = self._connected.pop(urls)
            connection.shutdown()
            why = str(error).splitlines()[0]
            hanging = {urls[number]: why for number in connection.hanging} | self._health.faults
            hanging = objects.broadcast(hanging)
            for url, fault in hanging.items():
                self._fail(url, f"it hung while it received the weights: {fault}")
            if hanging:
                return None
            if NO_FIT in why and len(urls) == 1:
                agreed_in_world(partial(_refuse, urls[0], why, self._job.spec.checkpoint.folder))
            if len(urls) == 1:
                self._fail(urls[0], f"it did not receive the weights: {why}")
            else:
                logger.warning("[Servers] %s did not receive the weights: %s", ", ".join(urls), why)
            return None
        return report

    def _sound(self, urls: tuple[str, ...]) -> list[str]:
        """Return those of the updated servers that score canaries as the actor does, if canaries
        are due; all, if not."""
        canary = self._canary
        is_due = canary is not None and canary.due(self.weight_version)
        if canary is None or not (is_due or self._suspects.intersection(urls)):
            return [*urls]
        canary.score()
        mine = self._faults(canary, urls) if dist.get_rank() == 0 else None
        faults: dict[str, str] = objects.broadcast(mine)
        self._suspects = self._suspects.difference(urls) | faults.keys()
        for url, why in faults.items():
            self._fail(url, why)
        return [url for url in urls if url not in faults]

    def _faults(self, canary: Canary, urls: Sequence[str]) -> dict[str, str]:
        """Return the servers that score canaries otherwise, or not at all, and the differences."""
        env = self._job.config.rollout.rollout_servers_header_env
        header = header_from(env, "--rl-rollout-servers-header-env")
        prompts = [np.array(ids, dtype=np.int32) for ids in canary.prompts]
        faults: dict[str, str] = {}
        for url in urls:
            try:
                client = PromptScores(url, header, request_seconds=_CANARY_SECONDS)
                scores = client.log_probs(prompts, _CANARY_SECONDS)
                result = canary.compare_with([each[:-1] for each in scores], self.weight_version)
                text, is_sound = str(result), result.ok
                logger.info("[Canary] %s: %s", url, text)
            except ScoringFailed as error:
                text, is_sound = f"canaries were not scored: {error}", False
            if not is_sound:
                faults[url] = text
        return faults

    def _engine(self, urls: Sequence[str]) -> MegatronTrainerWeightTransferEngine:
        rollout = self._job.config.rollout
        # Servers are on machines of their own: ranks are near each other by host name.
        options = replace(hand_over_options(self._job), ranks_per_node=None)
        info = MegatronTrainerInitInfo(rank=dist.get_rank(), options=options)
        clients = [
            HTTPEngineClient(url, header_env=rollout.rollout_servers_header_env) for url in urls
        ]
        return MegatronTrainerWeightTransferEngine(
            info, source=self._source, engines=clients, check=lambda: self._health.check()
        )

    def _watched(self, urls: Sequence[str]) -> HealthWatch:
        return HealthWatch([self._client(url) for url in urls if dist.get_rank() == 0])

    def _client(self, url: str) -> HTTPEngineClient:
        """Return a client for probes."""
        env = self._job.config.rollout.rollout_servers_header_env
        return HTTPEngineClient(url, _PROBE_SECONDS, header_env=env)

    def close(self) -> None:
        """Close the connections. Local."""
        for engine in self._connected.values():
            engine.shutdown()
        self._connected = {}


def _refuse(url: str, why: str, folder: Path) -> NoReturn:
    raise UsageError(
        f"serves another model than --rl-hf-checkpoint {folder} ({why})",
        flag=f"--rl-rollout-servers {url}",
        remedy="start it with the checkpoint of the job",
    )


def _joined(reports: Sequence[UpdateReport], version: int, seconds: float) -> ReshardReport:
    """Return the report of an update in parts; bytes are the largest of any worker."""
    return ReshardReport(
        TO_ROLLOUT,
        version,
        seconds,
        received_bytes=max(max(each.received_bytes) for each in reports),
        lower_bound_bytes=max(max(each.needed_bytes) for each in reports),
        repeated=any(each.repeated for each in reports),
    )


class ServerRollouts(RemoteRollouts):
    """Samples of servers. Methods are collective over the actor's ranks, and raise NoServersLeft as
    if their step had not begun."""

    manager: ServerSync

    def __init__(
        self,
        role: RemoteRole,
        manager: ServerSync,
        sample_store: RemoteSampleStore,
        timers: StageTimers,
        position: int,
    ) -> None:
        super().__init__(role, manager, sample_store, timers, position)
        manager.while_waiting = self._waiting_for_servers

    @contextmanager
    def _waiting_for_servers(self) -> Iterator[None]:
        """Count what happens inside as rollout, and as idle time. The watchdog does not end
        a run that waits: it gives each of these short stages its time, and then the hand-over."""
        with self._timers("rollout"), self._doing(IDLE):
            yield

    def _update(self, stage: str) -> None:
        """Update the servers within a stage, which does not count what other stages count."""

        def counted() -> float:
            return self._timers["reshard_to_rollout"] + self._timers["rollout"]

        before = counted()
        with self._doing(TRAINING):
            self.manager.update(is_stuck=True)
        self._timers.add(stage, before - counted())

    def _sample_eval(self, step: int, weight_version: int) -> None:
        while not self._role.call(
            ControllerRanks.sample_eval, step=step, weight_version=weight_version
        ):
            self._update("eval")

    def _collect(self, weight_version: int) -> dict[str, Any]:
        while not (answer := super()._collect(weight_version)):
            try:
                self._update("rollout")
            except NoServersLeft:
                self._role.call(ControllerRanks.abandon_step)
                raise
        return answer

    def close(self) -> None:
        self.manager.close()
        super().close()


def connect_servers(
    job: Job,
    role: RemoteRole,
    shards: ModelShards,
    sample_store: RemoteSampleStore,
    canary: Canary | None,
    start: Start,
    timers: StageTimers,
) -> ServerRollouts:
    """Wait for controllers that `start_engines` has started. Collective over the actor's ranks."""
    log_bank(role.call(SamplingRanks.connect, **start.message()))
    source = ShardSource(shards, dict(job.spec.checkpoint.tensors))
    sync = ServerSync(job, role, source, canary)
    return ServerRollouts(role, sync, sample_store, timers, start.position)
