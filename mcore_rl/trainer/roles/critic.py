"""The critic: Megatron's model as a value function, with values before the update and its update.

`Critic` is the model on a rank, built by `build_critic`. It has its own layout, optimizer, schedule
and checkpoints, all in its `MegatronWorld`, which every method enters. `ServedCritic` makes it a
role (see `remote`), and `StepCritic` calls that role on the actor's ranks. They exchange numbers of
all samples; a sample's tokens, with a value and a return for each, go only to the ranks that train
on it. On ranks of its own the critic scores and trains while the actor does.

Shape legend: n samples of the step; t tokens of a rank's samples, in scoring alignment
(`mcore_rl.batching.types`): position j's value is that of the state in which token j+1 is chosen.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypedDict

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.algorithms.aggregation import Denominators
from mcore_rl.algorithms.value_loss import ValueLossSums, value_loss
from mcore_rl.batching.assignment import Cuts, division_of
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.batching.sample_exchange import Division, RowExchange, Shares
from mcore_rl.batching.table import SampleTable, rows_to_tokens
from mcore_rl.batching.types import StepBatch, TrainBatch
from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.config import RLConfig, TrainerOptions
from mcore_rl.hybrid_engine.memory.usage import highest_bytes
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.hf_checkpoint import load_into_megatron
from mcore_rl.megatron.optimizer import CheckedOptimizer, UpdateResult
from mcore_rl.megatron.runner import ModelRunner
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.megatron.value_head import build_value_model
from mcore_rl.megatron.world import MegatronWorld, parsed_args
from mcore_rl.model.tensors import VALUE_HEAD
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.spec import ValueModelSpec
from mcore_rl.trainer.resume.checkpoint_writer import OpenCheckpoint, begin_checkpoint
from mcore_rl.trainer.resume.folders import complete_steps, critic_folder, iteration_name
from mcore_rl.trainer.resume.trainer_state import (
    TRAINER,
    TrainerState,
    load_trainer_state,
    trainer_writer,
)
from mcore_rl.trainer.roles.remote import Role
from mcore_rl.trainer.roles.samples import (
    batch_by_plan,
    mini_batches,
    plan_epochs,
    table_to_tensors,
    tensors_to_table,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ValueUpdateStats:
    """The outcome of one optimizer step; sums are over the global mini-batch, same on all ranks."""

    sums: ValueLossSums
    result: UpdateResult


class Critic:
    """The value function on this rank's pipeline stage and TP shard, in its own layout.

    All methods are collective over the ranks of that layout, and called outside of its world.
    """

    def __init__(
        self,
        world: MegatronWorld,
        config: RLConfig,
        state: megatron_adapter.TrainState,
        shards: ModelShards,
        batching: MicroBatching,
    ) -> None:
        self.world, self.state, self.shards, self.batching = world, state, shards, batching
        self.layout = world.layout
        self._open: OpenCheckpoint | None = None  # being written
        self._loss_config = config.recipe.value_loss_config(config.rollout.max_response_tokens)
        with world:
            self.runner = ModelRunner(world.args, state, self.layout, batching)
        self.optimizer = CheckedOptimizer(
            state, name="critic", on_nonfinite_grad=config.trainer.on_nonfinite_grad
        )

    def values(self, batch: TrainBatch) -> torch.Tensor:
        """Return the value of every position, `[t]` float32 on the CPU, on all TP, CP and PP ranks.

        `batch` is this rank's in the critic's layout.
        """
        with self.world:
            return self.runner.evaluate(batch, num_outputs=1)[:, 0].contiguous()

    def update(self, batch: TrainBatch) -> ValueUpdateStats:
        """Take one optimizer step on one mini-batch; `batch` is this DP rank's part of it.

        `batch` must have `values` and `returns`. Raises RuntimeError on all ranks for a non-finite
        loss or gradient, unless set to skip it.
        """
        with self.world:
            counts = self.runner.global_counts(batch)
            loss = functools.partial(self._loss, denominators=counts.denominators)
            total = self.runner.accumulate_gradients(
                batch, loss, num_sums=len(ValueLossSums.__slots__)
            )
            result = self.optimizer.step(
                num_samples=counts.num_samples, nonfinite_losses=total.nonfinite_ranks
            )
            megatron_adapter.finish_param_sync(self.world.args, self.state)
            return ValueUpdateStats(ValueLossSums.from_stacked(total.sums), result)

    def _loss(
        self, outputs: torch.Tensor, samples: TrainBatch, *, denominators: Denominators
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert samples.values is not None and samples.returns is not None, (
            "a stage before the update left out a tensor of the batch"
        )
        out = value_loss(
            outputs[:, 0],
            old_values=samples.values,
            returns=samples.returns,
            loss_mask=samples.loss_mask,
            lengths=samples.lengths,
            denominators=denominators,
            config=self._loss_config,
        )
        return out.loss, out.sums.stacked()

    def save(self, num_steps: int, checkpoints: Path) -> None:
        """Begin a checkpoint, with the generators of its ranks, next to the actor's."""
        with self.world as world:

            def write_model(saving: Path) -> None:
                megatron_checkpoint.save_checkpoint(world.args, self.state, num_steps, saving)

            trainer = TrainerState(num_steps, self.layout.describe())
            writers = [write_model, trainer_writer(trainer)]
            self._open = begin_checkpoint(critic_folder(checkpoints), num_steps, writers)

    def has_saved(self, *, waits: bool) -> bool:
        """Return whether the checkpoint is complete; see `OpenCheckpoint.advance`."""
        if self._open is not None and self._open.advance(waits=waits):
            self._open = None
        return self._open is None

    def restore_random_states(self) -> None:
        """Restore this rank's random states from the loaded checkpoint, if it has any."""
        args = self.world.args
        if args.load is None or args.no_load_rng:
            return
        trainer = Path(args.load) / iteration_name(args.ckpt_step) / TRAINER
        if trainer.is_dir():  # false if Megatron wrote the checkpoint
            state, rng = agreed_in_world(lambda: load_trainer_state(trainer))
            if rng is not None and state.layout == self.layout.describe():
                rng.restore()


def build_critic(
    spec: ValueModelSpec,
    config: RLConfig,
    actor_args: argparse.Namespace,
    provider: Callable[..., Any] | None = None,
    *,
    actor_iteration: int = 0,
    log: TextIO | None = None,
) -> Critic:
    """Build the critic through Megatron and fill it. Collective.

    A Megatron checkpoint below `--load`, in its folder `critic`, wins over the Hugging Face one.
    Raises RuntimeError if its step differs from `actor_iteration`, the step of the actor's.
    """
    if spec.tokens is None:
        own = {"lr": config.critic.lr, "clip_grad": config.critic.clip_grad}
        changes = {name: value for name, value in own.items() if value is not None}
        changes.update(_longer_schedule(config, actor_args))
        args = argparse.Namespace(**{**vars(actor_args), **changes})
    else:
        args = parsed_args(spec.tokens, spec.extra_args, actor_args, log=log)
    _load_from_beside(args, actor_iteration)
    args.iteration = 0
    world, state, shards = build_value_model(
        spec.shape,
        spec.checkpoint,
        args,
        megatron_adapter.setup,
        provider,
        requested_class=config.trainer.model_class,
        log=log,
    )
    with world:
        if state.iteration == 0:
            if actor_args.finetune and critic_folder(Path(actor_args.load or "")).is_dir():
                logger.warning(
                    "--finetune loads only the actor's weights: the critic starts from %s",
                    spec.checkpoint.folder,
                )
            elif actor_iteration:
                logger.warning(
                    "no critic is next to the actor's checkpoint: it starts from %s",
                    spec.checkpoint.folder,
                )
            absent = frozenset() if spec.has_head else frozenset({VALUE_HEAD})
            agreed_in_world(lambda: load_into_megatron(spec.checkpoint, shards, absent=absent))
            megatron_adapter.reload_main_params(state)
            if config.trainer.dither:
                megatron_adapter.dither_main_params(state)
    batching = config.micro_batching(spec.shape, world.layout, vars(world.args))
    return Critic(world, config, state, shards, batching)


def _longer_schedule(config: RLConfig, actor_args: argparse.Namespace) -> dict[str, int]:
    """Return a fork's critic's schedule: the actor's updates plus the warm-up's."""
    more = config.num_updates(of_critic=True) - config.num_updates(of_critic=False)
    lengths = {name: getattr(actor_args, name) for name in ("train_iters", "lr_decay_iters")}
    # Megatron has set the second to the first for the actor unless the user set it.
    return {
        name: length + more for name, length in lengths.items() if length == lengths["train_iters"]
    }


def _load_from_beside(args: argparse.Namespace, actor_iteration: int) -> None:
    """Set `--load` and `--ckpt-step` to the critic's checkpoint, or unset them."""
    saved = critic_folder(Path(args.load)) if args.load else None
    args.load, args.ckpt_step = None, None
    if saved is None or not actor_iteration:
        return
    if min(complete_steps(saved), default=actor_iteration + 1) > actor_iteration:
        return  # none, or of a later save that was killed before the actor's
    if not (saved / iteration_name(actor_iteration)).is_dir():
        raise RuntimeError(
            f"the critic in {saved} is not of step {actor_iteration}, as the actor is; load a step "
            "of both with --ckpt-step"
        )
    args.load, args.ckpt_step = str(saved), actor_iteration


@dataclass(frozen=True, slots=True)
class _Step:
    """The division of a step's samples, the same on all of the critic's ranks."""

    table: SampleTable
    epochs: list[list[Cuts]]
    division: Division


class Saved(TypedDict):
    """Whether the checkpoint that was begun is complete."""

    is_complete: bool


class BatchingFacts(TypedDict):
    """The fields of `MicroBatching` that batch accounting needs."""

    max_tokens: int
    micro_batch_size: int
    count_multiple_of: int
    share_prompts: bool


class CriticFacts(TypedDict):
    """How the critic divides samples."""

    dp_size: int
    batching: BatchingFacts


class Divided(TypedDict):
    """Which rank gets which samples."""

    first: Shares  # in the first epoch
    every: Shares  # in any epoch


class CriticValues(TypedDict):
    """The values of every token before any update, `[t]` float32."""

    values: RowExchange


class CriticUpdates(TypedDict):
    """The outcomes of a step's updates."""

    sums: torch.Tensor  # [u, s] `ValueLossSums` of each update
    results: list[tuple[float, bool]]  # (grad_norm, skipped) of each update
    metrics: dict[str, float]  # `critic/...`


class ServedCritic:
    """The critic as a role, called once per stage of a step with facts from the actor's ranks.

    All methods are collective over the ranks of its layout.
    """

    def __init__(
        self,
        model: Critic,
        options: TrainerOptions,
        *,
        is_separate: bool,
        log: TextIO | None = None,
    ) -> None:
        """On ranks of its own (`is_separate`) it reports the time and memory that it takes."""
        self.model, self._options, self._is_separate, self._log = model, options, is_separate, log
        self.batch: TrainBatch | None = None  # of the step, this rank's part
        self._step: _Step | None = None
        self._seconds: dict[str, float] = {}

    def facts(self) -> CriticFacts:
        """Return how it divides samples."""
        of = self.model.batching
        batching = BatchingFacts(
            max_tokens=of.max_tokens,
            micro_batch_size=of.micro_batch_size,
            count_multiple_of=of.count_multiple_of,
            share_prompts=of.share_prompts,
        )
        return {"dp_size": self.model.layout.dp_size, "batching": batching}

    def divide(self, /, *, orders: torch.Tensor, **numbers: torch.Tensor) -> Divided:
        """Begin a step; return which rank gets which samples.

        `numbers` come from `table_to_tensors`; `orders` `[e, n]` is the order of samples in each
        epoch, for actor and critic.
        """
        table = tensors_to_table(numbers)
        epochs = plan_epochs(
            table,
            num_mini_batches=self._options.num_mini_batches,
            dp_size=self.model.layout.dp_size,
            batching=self.model.batching,
            orders=orders.numpy(),
        )
        division = division_of(epochs, table.lengths, self.model.layout.dp_ranks())
        self._step = _Step(table, epochs, division)
        return {"first": division.first, "every": division.every}

    def values(self, *, tokens: RowExchange, asked_by: Shares) -> CriticValues:
        """Return the values of every token before any update, for the ranks that asked.

        `tokens` brings `[t, 5]`, the rows of `tokens_to_rows` for all samples that this rank gets.
        """
        started = time.perf_counter()
        assert self._step is not None, "values before divide"
        table, division, rank = self._step.table, self._step.division, dist.get_rank()
        mine = division.every.of(rank)
        own_tokens = rows_to_tokens(tokens.rows, table.lengths[mine])
        batch = batch_by_plan(
            table,
            dict(zip(mine.tolist(), own_tokens, strict=True)),
            self._step.epochs,
            self.model.layout.dp_rank(rank),
        )
        values = self.model.values(batch)
        self.batch = dataclasses.replace(batch, values=values)
        self._seconds["values"] = time.perf_counter() - started
        return {"values": RowExchange(table.lengths, division.first, asked_by, values.numpy())}

    def update(self, *, returns: RowExchange) -> CriticUpdates:
        """Train on the returns of this rank's samples, `[t]` float32."""
        assert self.batch is not None and self._step is not None, "update before values"
        started = time.perf_counter()
        batch = dataclasses.replace(self.batch, returns=torch.from_numpy(returns.rows))
        group = self.model.runner.groups["dp"]
        parts = mini_batches(batch, self._options.num_epochs, self._step.division, group)
        updates = [self.model.update(part) for part in parts]
        self._seconds["update"] = time.perf_counter() - started
        return {
            "sums": torch.stack([update.sums.stacked() for update in updates]),
            "results": [(update.result.grad_norm, update.result.skipped) for update in updates],
            "metrics": self._metrics(),
        }

    def _metrics(self) -> dict[str, float]:
        metrics = {"critic/learning_rate": self.model.optimizer.learning_rate}
        if self._is_separate:
            host_bytes, device_bytes = highest_bytes()
            peaks = torch.tensor(
                [host_bytes, device_bytes], dtype=torch.float64, device=self.model.runner.device
            )
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
            metrics.update({f"critic/{name}_seconds": each for name, each in self._seconds.items()})
            metrics["critic/host_peak_bytes"] = float(peaks[0])
            metrics["critic/device_peak_bytes"] = float(peaks[1])
        return metrics

    def save(self, *, num_steps: int, folder: str) -> None:
        """Begin a Megatron checkpoint next to the actor's."""
        with megatron_adapter.megatron_output_to(self._log):
            self.model.save(num_steps, Path(folder))

    def has_saved(self, *, waits: bool) -> Saved:
        """Return whether the checkpoint is complete; `waits` completes it."""
        with megatron_adapter.megatron_output_to(self._log):
            return {"is_complete": self.model.has_saved(waits=waits)}


class StepCritic:
    """The critic as the actor's ranks call it. All methods are collective over these ranks."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self._first: Shares | None = None  # its ranks' samples of the step, by its own division
        self._metrics: Mapping[str, float] = {}

    def facts(self) -> tuple[int, MicroBatching]:
        """Return its data-parallel size and how it divides samples. Waits until it is built."""
        facts = self.role.call(ServedCritic.facts)
        return facts["dp_size"], MicroBatching(**facts["batching"])

    def divide(
        self, sample_store: SampleStore, table: SampleTable, orders: np.ndarray
    ) -> RowExchange:
        """Make it divide a step's samples by the epochs' `orders` `[e, n]`. Returns their tokens,
        to be sent to its ranks."""
        numbers = table_to_tensors(table)
        shares = self.role.call(ServedCritic.divide, orders=torch.from_numpy(orders), **numbers)
        self._first = shares["first"]
        return sample_store.row_exchange(table, shares["every"])

    def begin_values(self, batch: StepBatch) -> Callable[[], torch.Tensor]:
        """Request values; the returned function waits for the `[t]` values of `batch.actor`."""
        asked_by = batch.division.first
        assert batch.for_critic is not None, "the step was divided without a critic"
        finish = self.role.begin(ServedCritic.values, tokens=batch.for_critic, asked_by=asked_by)
        return lambda: torch.from_numpy(finish()["values"].rows)

    def begin_update(self, batch: StepBatch) -> Callable[[], list[ValueUpdateStats]]:
        """Request updates on `batch.actor`'s returns; the returned function waits for the
        outcomes."""
        assert batch.actor.returns is not None and self._first is not None
        division = batch.division
        returns = batch.actor.returns.float().numpy()
        exchange = RowExchange(division.lengths, division.first, self._first, returns)
        finish = self.role.begin(ServedCritic.update, returns=exchange)

        def end_update() -> list[ValueUpdateStats]:
            answer = finish()
            self._metrics = answer["metrics"]
            return [
                ValueUpdateStats(ValueLossSums.from_stacked(row), UpdateResult(norm, skipped))
                for row, (norm, skipped) in zip(answer["sums"], answer["results"], strict=True)
            ]

        return end_update

    def metrics(self) -> Mapping[str, float]:
        """Return `critic/...` of the last updates."""
        return self._metrics

    def save(self, num_steps: int, checkpoints: Path) -> None:
        """Begin a Megatron checkpoint of it next to the actor's."""
        self.role.call(ServedCritic.save, num_steps=num_steps, folder=str(checkpoints))

    def has_saved(self, *, waits: bool) -> bool:
        """Return whether that checkpoint is complete; `waits` completes it."""
        return self.role.call(ServedCritic.has_saved, waits=waits)["is_complete"]
