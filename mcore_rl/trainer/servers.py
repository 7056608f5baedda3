"""`--rl-rollout-servers`, as the actor's ranks use them; `controller_ranks` sends the requests.

Weights travel from the actor's shards to the workers of all servers (`hybrid_engine.remote`). A
server that fails an update gets no requests until a later one succeeds; nor does one that scores
canaries otherwise than the actor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
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
from mcore_rl.hybrid_engine.remote.engine_client import HTTPEngineClient
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
from mcore_rl.trainer.controller_ranks import ControllerRanks
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.roles.remote import RemoteRole
from mcore_rl.trainer.rollouts import NoServersLeft
from mcore_rl.trainer.sampling import Start
from mcore_rl.trainer.sampling_ranks import SamplingRanks
from mcore_rl.trainer.separate import RemoteRollouts, RemoteSampleStore, log_bank

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_CANARY_SECONDS = 60.0  # in which failed requests for canaries are repeated


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
        self._connected: dict[tuple[str, ...], MegatronTrainerWeightTransferEngine] = {}
        self._failing: dict[str, str] = {}  # servers that failed the last update, and why
        self._suspects: set[str] = set()  # servers that failed their last canaries

    def __enter__(self) -> Self:
        self.weight_version += 1
        self.update()
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: servers keep their weights and may keep sampling."""

    def update(self) -> None:
        """Give the weights to all servers that can be reached; wait until there is one."""
        for hook in self.on_reshard_start:
            hook(ReshardReport(TO_ROLLOUT, self.weight_version, 0.0))
        started = time.perf_counter()
        reports: list[UpdateReport] = []
        while not reports:
            found = self._role.call(ControllerRanks.begin_update)
            held: list[str] = []
            groups = self._together(found["urls"])
            for urls in groups:
                if (report := self._send(urls)) is not None:
                    if sound := self._sound(urls):
                        held += sound
                        reports.append(report)
                elif len(urls) > 1:  # a failure of several does not tell whose it is
                    groups += [(url,) for url in urls]
            if not reports:
                self._wait(found["seconds"])
        self._role.call(ControllerRanks.admit, urls=held, weight_version=self.weight_version)
        whole = replace(
            _joined(reports, self.weight_version, time.perf_counter() - started),
            attested=self._job.config.weight_sync.attest != OFF,  # a failure of it raises
        )
        for hook in self.on_reshard_end:
            hook(whole)

    def _wait(self, seconds: float) -> None:
        """Wait for servers, none of which has had requests for `seconds`."""
        limit = 60 * self._job.config.rollout.rollout_server_wait_minutes
        if seconds >= limit:
            self.weight_version -= 1
            reasons = "; ".join(f"{url}: {why}" for url, why in self._failing.items())
            raise NoServersLeft(f"none was left for {seconds:.0f} s{reasons and f' ({reasons})'}")
        time.sleep(min(_RETRY_SECONDS, limit - seconds))

    def _together(self, urls: Sequence[str]) -> list[tuple[str, ...]]:
        """Return which servers are updated together: all that did not fail the last update."""
        self._failing = {url: why for url, why in self._failing.items() if url in urls}
        sound = tuple(url for url in urls if url not in self._failing)
        return [each for each in (sound, *((url,) for url in self._failing)) if each]

    def _send(self, urls: tuple[str, ...]) -> UpdateReport | None:
        """Send the weights to servers; return None if that fails. One with another model ends all
        ranks with exit code 2."""
        for others in [each for each in self._connected if each != urls and {*each} & {*urls}]:
            self._connected.pop(others).shutdown()
        try:
            if urls not in self._connected:
                self._connected[urls] = self._engine(urls)
                self._connected[urls].connect()
            report = self._connected[urls].send_weights(str(self.weight_version))
        except RuntimeError as error:  # the same on all ranks
            self._connected.pop(urls).shutdown()
            why = str(error).splitlines()[0]
            if NO_FIT in why and len(urls) == 1:
                agreed_in_world(partial(_refuse, urls[0], why, self._job.spec.checkpoint.folder))
            logger.warning("[Servers] %s did not receive the weights: %s", ", ".join(urls), why)
            self._failing |= dict.fromkeys(urls, why)
            return None
        for url in urls:
            self._failing.pop(url, None)
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
        self._failing |= faults
        return [url for url in urls if url not in faults]

    def _faults(self, canary: Canary, urls: Sequence[str]) -> dict[str, str]:
        """Return the servers that score canaries otherwise, or not at all, and the differences."""
        env = self._job.config.rollout.rollout_servers_header_env
        header = header_from(env, "--rl-rollout-servers-header-env")
        prompts = [np.array(ids, dtype=np.int32) for ids in canary.prompts]
        faults: dict[str, str] = {}
        for url in urls:
            try:
                scores = PromptScores(url, header).log_probs(prompts, _CANARY_SECONDS)
                result = canary.compare_with([each[:-1] for each in scores], self.weight_version)
                text, is_sound = str(result), result.ok
                logger.info("[Canary] %s: %s", url, text)
            except ScoringFailed as error:
                text, is_sound = f"canaries were not scored: {error}", False
            if not is_sound:
                logger.warning("[Servers] %s gets no requests: %s", url, text)
                faults[url] = text
        return faults

    def _engine(self, urls: Sequence[str]) -> MegatronTrainerWeightTransferEngine:
        rollout, options = self._job.config.rollout, self._job.config.weight_sync
        info = MegatronTrainerInitInfo(
            rank=dist.get_rank(),
            bucket_bytes=options.reshard_bucket_mb << 20,
            attest=options.attest,
        )
        clients = [
            HTTPEngineClient(url, header_env=rollout.rollout_servers_header_env) for url in urls
        ]
        return MegatronTrainerWeightTransferEngine(info, source=self._source, engines=clients)

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
    )


class ServerRollouts(RemoteRollouts):
    """Samples of servers. Methods are collective over the actor's ranks, and raise NoServersLeft as
    if their step had not begun."""

    manager: ServerSync

    def _sample_eval(self, step: int, weight_version: int) -> None:
        while not self._role.call(
            ControllerRanks.sample_eval, step=step, weight_version=weight_version
        ):
            self.manager.update()

    def _collect(self, weight_version: int) -> dict[str, Any]:
        while not (answer := super()._collect(weight_version)):
            try:
                self.manager.update()
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
