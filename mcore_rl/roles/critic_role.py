"""The critic as the learner sees it: on the actor's ranks in turn, or on ranks of its own.

Apart, the values are made while the actor scores the same samples, and the critic learns while the
actor does. What crosses over is the samples' tokens, a value and a return per token, and numbers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TextIO

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.algorithms.value_loss import ValueLossSums
from mcore_rl.batching.micro_batching import MicroBatching
from mcore_rl.batching.train_batches import num_tokens
from mcore_rl.batching.types import ScoredRollout, StepBatch, TrainBatch
from mcore_rl.common import objects
from mcore_rl.flags.options import RLConfig
from mcore_rl.hybrid_engine.memory.device import highest_bytes
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.optimizer import UpdateResult
from mcore_rl.megatron.runner import ModelRunner
from mcore_rl.model.layout import TrainLayout
from mcore_rl.roles.bridge import Bridge, Message
from mcore_rl.roles.critic import Critic, ValueUpdateStats
from mcore_rl.roles.critic_startup import save_critic
from mcore_rl.roles.samples import samples_to_tensors, tensors_to_samples
from mcore_rl.roles.tokens import batch_of_rank, mini_batches, of_batch, to_all


class CriticRole(Protocol):
    """All methods are collective over the actor's ranks."""

    dp_size: int
    batching: MicroBatching

    def wait(self) -> None:
        """Until it is built; before anything else."""

    def take(
        self,
        scored: Sequence[ScoredRollout],
        lengths: np.ndarray,
        orders: np.ndarray,
        of_actor: TrainBatch,
    ) -> TrainBatch | None:
        """A step begins; what this rank gets of its samples, if it has a part of the critic.

        `orders` `[e, n]` are those by which the epochs of actor and critic divide them.
        """

    def with_values(self, batch: StepBatch) -> StepBatch:
        """The batch with values of every token, before any update."""

    def begin_update(self, batch: StepBatch) -> None:
        """Learn from the returns in the actor's part of the batch."""

    def end_update(self) -> list[ValueUpdateStats]:
        """What the updates did, once they are done."""

    def metrics(self) -> dict[str, float]:
        """`critic/...` of the last updates."""

    def save(self, num_steps: int, checkpoints: Path) -> None:
        """Write a Megatron checkpoint beside the actor's."""

    def close(self) -> None:
        """No step follows. Idempotent."""

    def abandon(self) -> None:
        """This rank has failed, and `close` is to wait for nobody."""


class ColocatedCritic:
    """A critic on the ranks of the actor, in turn with it, in its own layout."""

    def __init__(
        self, critic: Critic, config: RLConfig, of_actor: ModelRunner, actor_layout: TrainLayout
    ) -> None:
        self.model = critic
        self._config = config
        self._of_actor = of_actor
        # With equal layouts every rank has the same samples for both.
        self.shares_layout = critic.layout == actor_layout
        self.dp_size, self.batching = critic.layout.dp_size, critic.batching
        self._updates: list[ValueUpdateStats] = []

    def wait(self) -> None:
        """It is there."""

    def take(
        self,
        scored: Sequence[ScoredRollout],
        lengths: np.ndarray,
        orders: np.ndarray,
        of_actor: TrainBatch,
    ) -> TrainBatch:
        if self.shares_layout:
            return of_actor
        return batch_of_rank(
            scored,
            lengths,
            num_mini_batches=self._config.num_mini_batches,
            layout=self.model.layout,
            batching=self.batching,
            rank=dist.get_rank(),
            orders=orders,
        )

    def with_values(self, batch: StepBatch) -> StepBatch:
        assert batch.critic is not None
        values = self.model.values(batch.critic)
        here = values
        if not self.shares_layout:
            runner = self.model.runner
            everywhere = to_all(
                values, batch.critic, batch.lengths, runner.groups["dp"], runner.device
            )
            here = of_batch(everywhere, batch.actor, batch.lengths)
        return dataclasses.replace(
            batch,
            actor=dataclasses.replace(batch.actor, values=here),
            critic=dataclasses.replace(batch.critic, values=values),
        )

    def begin_update(self, batch: StepBatch) -> None:
        assert batch.critic is not None and batch.actor.returns is not None
        returns = batch.actor.returns
        if not self.shares_layout:
            runner = self._of_actor
            everywhere = to_all(
                returns, batch.actor, batch.lengths, runner.groups["dp"], runner.device
            )
            returns = of_batch(everywhere, batch.critic, batch.lengths)
        own = dataclasses.replace(batch.critic, returns=returns)
        self._updates = _updates(self.model, own, batch.lengths, self._config.num_epochs)

    def end_update(self) -> list[ValueUpdateStats]:
        return self._updates

    def metrics(self) -> dict[str, float]:
        return {"critic/learning_rate": self.model.optimizer.learning_rate}

    def save(self, num_steps: int, checkpoints: Path) -> None:
        save_critic(self.model, num_steps, checkpoints)

    def close(self) -> None:
        """Nothing waits for this one."""

    def abandon(self) -> None:
        """Nor does it for others."""


def _updates(
    critic: Critic, batch: TrainBatch, lengths: np.ndarray, num_epochs: int
) -> list[ValueUpdateStats]:
    """Have the critic learn from its part of a step."""
    dp_group, device = critic.runner.groups["dp"], critic.runner.device
    return [
        critic.update(part) for part in mini_batches(batch, num_epochs, lengths, dp_group, device)
    ]


class RemoteCritic:
    """The actor's side of a critic on ranks of its own; `serve_critic` is the other."""

    def __init__(self, of_actor: ModelRunner, bridge: Bridge | None, *, iteration: int) -> None:
        """`bridge` on the first rank only. The critic's ranks begin to build it."""
        self._of_actor, self._bridge = of_actor, bridge
        self._metrics: dict[str, float] = {}
        self._is_closed = False
        self._tell(Message("start", {"iteration": iteration}))

    def wait(self) -> None:
        """Until the critic is built."""
        facts = self._answer().numbers
        self.dp_size = facts["dp_size"]
        self.batching = MicroBatching(**facts["batching"])

    def take(
        self,
        scored: Sequence[ScoredRollout],
        lengths: np.ndarray,
        orders: np.ndarray,
        of_actor: TrainBatch,
    ) -> None:
        if self._bridge is not None:
            tensors = {**samples_to_tensors(scored), "orders": torch.from_numpy(orders)}
            self._bridge.tell(Message("samples", tensors=tensors))

    def with_values(self, batch: StepBatch) -> StepBatch:
        everywhere = self._answer().tensors["values"]
        values = of_batch(everywhere, batch.actor, batch.lengths)
        return dataclasses.replace(batch, actor=dataclasses.replace(batch.actor, values=values))

    def begin_update(self, batch: StepBatch) -> None:
        assert batch.actor.returns is not None
        runner = self._of_actor
        everywhere = to_all(
            batch.actor.returns, batch.actor, batch.lengths, runner.groups["dp"], runner.device
        )
        self._tell(Message("returns", tensors={"returns": everywhere}))

    def end_update(self) -> list[ValueUpdateStats]:
        answer = self._answer()
        self._metrics = dict(answer.numbers["metrics"])
        sums = answer.tensors["sums"]
        return [
            ValueUpdateStats(ValueLossSums.from_stacked(row), UpdateResult(norm, skipped))
            for row, (norm, skipped) in zip(sums, answer.numbers["results"], strict=True)
        ]

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def save(self, num_steps: int, checkpoints: Path) -> None:
        self._tell(Message("save", {"num_steps": num_steps, "folder": str(checkpoints)}))
        self._answer()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._tell(Message("stop"))

    def abandon(self) -> None:
        """The critic may be giving an answer that nobody hears any more, and hear nothing itself.
        It learns of this rank's end by its connection, or from the launcher."""
        self._is_closed = True

    def _tell(self, message: Message) -> None:
        if self._bridge is not None:
            self._bridge.tell(message)

    def _answer(self) -> Message:
        """What the critic answered, on every rank of the actor."""
        return objects.broadcast(None if self._bridge is None else self._bridge.hear_answer())


def serve_critic(
    bridge: Bridge,
    build: Callable[[int], Critic],
    config: RLConfig,
    *,
    log: TextIO | None = None,
) -> None:
    """Be a rank of the critic until the actor closes it. Collective over the critic's ranks.

    `build` makes the critic, given the step that the actor is of.
    """
    start = bridge.hear()
    assert start.name == "start", start.name
    critic = build(start.numbers["iteration"])
    layout, batching, runner = critic.layout, critic.batching, critic.runner
    facts = ("max_tokens", "micro_batch_size", "count_multiple_of", "share_prompts")
    bridge.answer(
        Message(
            "ready",
            {
                "dp_size": layout.dp_size,
                "batching": {name: getattr(batching, name) for name in facts},
            },
        )
    )
    batch, lengths, values_seconds = None, np.empty(0, dtype=np.int64), 0.0
    while (message := bridge.hear()).name != "stop":
        started = time.perf_counter()
        if message.name == "samples":
            scored = tensors_to_samples(message.tensors)
            lengths = np.array([num_tokens(sample) for sample in scored], dtype=np.int64)
            batch = batch_of_rank(
                scored,
                lengths,
                num_mini_batches=config.num_mini_batches,
                layout=layout,
                batching=batching,
                rank=dist.get_rank(),
                orders=message.tensors["orders"].numpy(),
            )
            batch = dataclasses.replace(batch, values=critic.values(batch))
            assert batch.values is not None
            everywhere = to_all(batch.values, batch, lengths, runner.groups["dp"], runner.device)
            bridge.answer(Message("values", tensors={"values": everywhere}))
            values_seconds = time.perf_counter() - started
        elif message.name == "returns":
            assert batch is not None, "returns of no samples"
            returns = of_batch(message.tensors["returns"], batch, lengths)
            own = dataclasses.replace(batch, returns=returns)
            updates = _updates(critic, own, lengths, config.num_epochs)
            seconds = {"values": values_seconds, "update": time.perf_counter() - started}
            bridge.answer(_report(critic, updates, seconds))
        elif message.name == "save":
            with megatron_adapter.megatron_output_to(log):
                save_critic(critic, message.numbers["num_steps"], Path(message.numbers["folder"]))
            bridge.answer(Message("saved"))
        else:
            raise AssertionError(f"a critic knows no {message.name}")


def _report(
    critic: Critic, updates: Sequence[ValueUpdateStats], seconds: dict[str, float]
) -> Message:
    host_bytes, device_bytes = highest_bytes()
    peaks = torch.tensor(
        [host_bytes, device_bytes], dtype=torch.float64, device=critic.runner.device
    )
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    metrics = {
        "critic/learning_rate": critic.optimizer.learning_rate,
        "critic/values_seconds": seconds["values"],
        "critic/update_seconds": seconds["update"],
        "critic/host_peak_bytes": float(peaks[0]),
        "critic/device_peak_bytes": float(peaks[1]),
    }
    results = [(update.result.grad_norm, update.result.skipped) for update in updates]
    sums = torch.stack([update.sums.stacked() for update in updates])
    return Message("updated", {"results": results, "metrics": metrics}, {"sums": sums})
