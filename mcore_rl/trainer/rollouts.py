"""What a run calls of its engines: `Rollouts`, and `Sampling`, which the ranks of engines run.

Engines share the actor's ranks (`LocalRollouts`) or have ranks of their own (`separate`).
"""

from __future__ import annotations

import abc
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.switch_report import Hook
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.rollout.sampler import Collected
from mcore_rl.trainer.roles.remote import Role
from mcore_rl.trainer.sampling import Sampling


class WeightSync(Protocol):
    """Rollout mode: entering it gives the engines the actor's weights. Collective."""

    weight_version: int
    on_reshard_start: list[Hook]
    on_reshard_end: list[Hook]

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        failed: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class NoServersLeft(Exception):
    """No server has received the weights for `--rl-rollout-server-wait-minutes`."""


class Rollouts(abc.ABC):
    """The engines of a run, on the actor's ranks. Methods are collective over these ranks."""

    manager: WeightSync
    sample_store: SampleStore
    reward_model: Role | None = None  # as the actor calls it

    @property
    @abc.abstractmethod
    def position(self) -> int:
        """The number of prompts drawn so far."""

    @abc.abstractmethod
    def sample_eval(self, step: int, weight_version: int) -> None:
        """Sample the held-out prompts, of which there are some; in rollout mode."""

    @abc.abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the last `sample_eval`; empty if there was none since."""

    @abc.abstractmethod
    def collect(self, weight_version: int) -> Collected:
        """Return a step's samples with their rewards; in rollout mode."""

    @abc.abstractmethod
    def undo(self) -> None:
        """Discard the last step, which will be repeated: its prompts count as not drawn."""

    @abc.abstractmethod
    def save(self, folder: Path) -> None:
        """Write what later steps depend on, besides the position."""

    @abc.abstractmethod
    def saved(self) -> None:
        """Remove what nothing needs any more once the checkpoint of `save` is complete."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Make `close` wait for no other rank, because this one has failed. Local."""

    @abc.abstractmethod
    def close(self) -> None:
        """End engines, and processes of rewards and environments. Idempotent."""


class LocalRollouts(Rollouts):
    """Engines on the actor's ranks, which hand their memory over to training in turn."""

    def __init__(
        self,
        sampling: Sampling,
        manager: MegatronVLLMShardingManager,
        sample_store: SampleStore,
        reward_model: Role | None,
    ) -> None:
        self.sampling, self.manager, self.sample_store = sampling, manager, sample_store
        self.reward_model, self._sampler = reward_model, sampling.sampler
        self._prefetch = manager.prefetch

    @property
    def position(self) -> int:
        return self._sampler.position

    def sample_eval(self, step: int, weight_version: int) -> None:
        assert self.sampling.evaluator is not None, "there are no held-out prompts"
        self.sampling.evaluator.sample(step, weight_version)

    def evaluate(self) -> dict[str, float]:
        evaluator = self.sampling.evaluator
        return {} if evaluator is None else evaluator.metrics()

    def collect(self, weight_version: int) -> Collected:
        return self._sampler.collect(weight_version, self._prefetch)

    def undo(self) -> None:
        self._sampler.undo()

    def save(self, folder: Path) -> None:
        self._sampler.save(folder)

    def saved(self) -> None:
        """Do nothing: no other copy exists."""

    def abandon(self) -> None:
        """Do nothing: `close` does not wait."""

    def close(self) -> None:
        self.sampling.close()
