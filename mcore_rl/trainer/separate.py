"""Engines on ranks of their own, as the actor's ranks call them; `sampling_ranks` and
`engine_ranks` are their side."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch.distributed as dist

from mcore_rl.batching.sample_exchange import RowExchange, Shares
from mcore_rl.batching.table import SampleTable, SampleTokens, tokens_to_rows
from mcore_rl.batching.types import ScoredRollout
from mcore_rl.common import objects
from mcore_rl.hybrid_engine.hand_over import HandOver
from mcore_rl.hybrid_engine.proof.canary import Canary
from mcore_rl.hybrid_engine.switch_report import TO_ROLLOUT, Hook, ReshardReport
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.roles import ROLLOUT
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.timeline import IDLE, Activity
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.rollout.sampler import Collected
from mcore_rl.trainer.controller_ranks import NAME as CONTROLLERS
from mcore_rl.trainer.engine_ranks import NAME, EngineRanks
from mcore_rl.trainer.hand_overs import hand_over
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.roles.remote import RemoteRole
from mcore_rl.trainer.rollouts import Rollouts, WeightSync
from mcore_rl.trainer.sampling import Start
from mcore_rl.trainer.sampling_ranks import SamplingRanks

logger = logging.getLogger(__name__)

TRAINING = "training"  # all that is not a wait for engines


class SeparateEngines:
    """The weight sync of engines on ranks of their own: `with engines:` gives them new weights.

    Nothing sleeps and nothing is offloaded. Bytes in its reports are the largest of any engine."""

    def __init__(self, role: RemoteRole, hand_over: HandOver) -> None:
        self._role, self._hand_over = role, hand_over
        self.weight_version = 0
        self.on_reshard_start: list[Hook] = []
        self.on_reshard_end: list[Hook] = []

    def __enter__(self) -> Self:
        self.weight_version += 1
        for hook in self.on_reshard_start:
            hook(ReshardReport(TO_ROLLOUT, self.weight_version, 0.0))
        started = time.perf_counter()
        finish = self._role.begin(EngineRanks.update, weight_version=self.weight_version)
        report = self._hand_over.run(self.weight_version)
        received = finish()
        seconds = time.perf_counter() - started
        for hook in self.on_reshard_end:
            hook(replace(report, duration_seconds=seconds, **received))
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: engines keep their weights and may keep sampling."""


class RemoteSampleStore(SampleStore):
    """The samples of engines on ranks of their own, as the actor's ranks see them."""

    _delivered: tuple[Shares, dict[int, SampleTokens]]
    _load_of_step: np.ndarray

    def __init__(self, role: RemoteRole, *args: Any, **options: Any) -> None:
        """`role` calls the engines; the other arguments are those of `SampleStore`."""
        super().__init__(*args, **options)
        self._role = role

    def deliver(self, table: SampleTable, wanted: Shares) -> dict[int, SampleTokens]:
        finish = self._role.begin(SamplingRanks.deliver, wanted=wanted)
        tokens = super().deliver(table, wanted)
        finish()
        self._delivered = wanted, tokens
        return tokens

    def row_exchange(self, table: SampleTable, wanted: Shares) -> RowExchange:
        """Return the rows of the samples that `deliver` brought to the actor's ranks."""
        held, tokens = self._delivered
        mine = held.of(self._ranks.rank).tolist()
        rows = tokens_to_rows([tokens[sample] for sample in mine])
        return RowExchange(table.lengths, held, wanted, rows)

    def on_first_rank(self, table: SampleTable, rows: Sequence[int]) -> list[ScoredRollout]:
        answer = self._role.call(SamplingRanks.samples, rows=list(rows))
        samples: list[ScoredRollout] = []
        if self._ranks.rank == 0:
            samples = objects.from_bytes(answer["samples"].rows)
        return samples

    def set_load(self, load: np.ndarray) -> None:
        """Set the step's load of all engines."""
        self._load_of_step = load

    def load(self) -> np.ndarray:
        """Return the load of all engines on rank 0, zeros on the others."""
        return self._load_of_step if self._ranks.rank == 0 else 0 * self._load_of_step


class RemoteRollouts(Rollouts):
    """Engines on ranks of their own. Methods are collective over the actor's ranks."""

    sample_store: RemoteSampleStore

    def __init__(
        self,
        role: RemoteRole,
        manager: WeightSync,
        sample_store: RemoteSampleStore,
        timers: StageTimers,
        position: int,
    ) -> None:
        self._role, self._timers, self._position = role, timers, position
        self.manager, self.sample_store = manager, sample_store
        self._activity = Activity()
        self._activity.begin(TRAINING)
        self._has_evaluation = False

    @property
    def position(self) -> int:
        return self._position

    def sample_eval(self, step: int, weight_version: int) -> None:
        with self._timers("eval"), self._doing(IDLE):
            self._sample_eval(step, weight_version)
        self._has_evaluation = True

    def _sample_eval(self, step: int, weight_version: int) -> None:
        self._role.call(SamplingRanks.sample_eval, step=step, weight_version=weight_version)

    def evaluate(self) -> dict[str, float]:
        if not self._has_evaluation:
            return {}  # without a call that engines would have to answer
        self._has_evaluation = False
        with self._timers("eval"), self._doing(IDLE):
            metrics: dict[str, float] = self._role.call(SamplingRanks.evaluate)["metrics"]
        return metrics

    def collect(self, weight_version: int) -> Collected:
        with self._timers("rollout"), self._doing(IDLE):
            answer = self._collect(weight_version)
        self._timers.add("rollout", -answer["reward_seconds"])
        self._timers.add("reward", answer["reward_seconds"])
        self._position = answer["position"]
        self.sample_store.set_load(answer["load"].numpy())
        collected: Collected = objects.from_bytes(answer["collected"].numpy())
        _, idle_share = self._activity.take()
        return replace(collected, metrics=collected.metrics | {"idle/trainers": idle_share})

    def _collect(self, weight_version: int) -> dict[str, Any]:
        return self._role.call(SamplingRanks.collect, weight_version=weight_version)

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Count the time inside as `what`."""
        before = self._activity.begin(what)
        yield
        self._activity.begin(before)

    def undo(self) -> None:
        self._position = self._role.call(SamplingRanks.undo)["position"]

    def save(self, folder: Path) -> None:
        self._role.call(SamplingRanks.save, folder=str(folder))

    def saved(self) -> None:
        self._role.call(SamplingRanks.saved)

    def abandon(self) -> None:
        self._role.abandon()

    def close(self) -> None:
        self._role.close()


def start_engines(job: Job, fingerprints: list[str], day: str) -> RemoteRole:
    """Make the ranks of engines, or controllers of servers, start. Collective over the actor's;
    does not wait.

    `fingerprints` are those of the actor's prompts, `day` is for chat templates."""
    world = job.world
    name = CONTROLLERS if job.spec.roles.has_controllers else NAME
    bridge, group = world.bridges.get(ROLLOUT), world.joint_groups[ROLLOUT]
    return RemoteRole(name, bridge, group, day=day, prompts=fingerprints)


def connect_engines(
    job: Job,
    role: RemoteRole,
    shards: ModelShards,
    sample_store: RemoteSampleStore,
    canary: Canary | None,
    start: Start,
    timers: StageTimers,
) -> RemoteRollouts:
    """Plan the hand-over with engines that `start_engines` has started. Collective over the actor's
    ranks; waits for the engines."""
    finish = role.begin(EngineRanks.connect, **start.message())
    manager = SeparateEngines(role, hand_over(job, shards=shards, canary=canary))
    log_bank(finish())
    return RemoteRollouts(role, manager, sample_store, timers, start.position)


def log_bank(bank: Mapping[str, Any]) -> None:
    """Log what the bank of finished groups has, on the first rank."""
    if dist.get_rank() == 0:
        for text in bank["skipped"]:
            logger.warning("[Resume] skipped in the bank of finished groups: %s", text)
        if bank["num_banked"]:
            logger.info("[Resume] the bank has %d finished groups", bank["num_banked"])
