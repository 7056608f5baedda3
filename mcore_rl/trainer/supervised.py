"""Steps of supervised training: rows of a file take the place of samples, and nothing samples.

A run calls `SupervisedData` as it calls its engines. Every rank reads the tokens that it trains on
from the file's cache, so none travel.

Shape legend: n samples of a step, one of each demonstration, two of each pair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.algorithms.aggregation import AggregationMode
from mcore_rl.batching.assignment import samples_of
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.train_batches import build_train_batch
from mcore_rl.batching.types import TrainBatch
from mcore_rl.config import RLConfig
from mcore_rl.data.demonstrations import Demonstrations, load_supervised_files
from mcore_rl.data.prompts import prompt_indices
from mcore_rl.hybrid_engine.switch_report import Hook
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rollout.sampler import Collected
from mcore_rl.trainer.actor import Actor, UpdateStats
from mcore_rl.trainer.demonstration_store import DemonstrationStore
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.roles.samples import plan_epochs
from mcore_rl.trainer.rollouts import Rollouts
from mcore_rl.trainer.step_metrics import update_metrics


def read_supervised(
    config: RLConfig, folder: Path, **how: Any
) -> tuple[Demonstrations, Demonstrations | None]:
    """Return the rows of supervised training, and held-out ones. `folder` is that of the tokenizer,
    `how` are keywords of `load_demonstrations`. Raises UsageError."""
    return load_supervised_files(
        config.recipe.trains_on,
        folder,
        config.data,
        config.supervised,
        max_response_tokens=config.rollout.max_response_tokens,
        **how,
    )


class NoEngines:
    """Rollout mode of a run without engines: there is nobody to give weights to."""

    def __init__(self, weight_version: int) -> None:
        self.weight_version = weight_version
        self.on_reshard_start: list[Hook] = []
        self.on_reshard_end: list[Hook] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class SupervisedData(Rollouts):
    """The rows of a file, in an order that depends on seed and epoch alone."""

    sample_store: DemonstrationStore

    def __init__(
        self,
        job: Job,
        actor: Actor,
        sample_store: DemonstrationStore,
        held_out: Demonstrations | None,
        timers: StageTimers,
        *,
        position: int,
        weight_version: int,
    ) -> None:
        """`position` counts the rows of `sample_store` drawn before."""
        self._count, self._seed = job.config.trainer.num_prompts_per_step, job.args.seed
        self._timers, self._position = timers, position
        self.manager, self.sample_store = NoEngines(weight_version), sample_store
        self._held_out: HeldOutLoss | None = None
        if held_out is not None:
            self._held_out = HeldOutLoss(job, actor, held_out)
        self._is_due = False

    @property
    def position(self) -> int:
        return self._position

    def sample_eval(self, step: int, weight_version: int) -> None:
        self._is_due = True

    def evaluate(self) -> dict[str, float]:
        """Return the mean cross-entropy of held-out tokens if `sample_eval` was called since."""
        is_due, self._is_due = self._is_due, False
        if not is_due or self._held_out is None:
            return {}
        with self._timers("eval"):
            return {"eval/loss": self._held_out.measure()}

    def collect(self, weight_version: int) -> Collected:
        with self._timers("data"):
            rows = prompt_indices(
                len(self.sample_store.rows),
                start=self._position,
                count=self._count,
                seed=self._seed,
            )
            table = self.sample_store.table_of(rows, self._position)
            self._position += self._count
        return Collected(table, num_generated_tokens=0)

    def undo(self) -> None:
        self._position -= self._count

    def save(self, folder: Path) -> None:
        """Do nothing: the position is all there is."""

    def saved(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing: `close` does not wait."""

    def close(self) -> None:
        """Do nothing."""


class HeldOutLoss:
    """The cross-entropy of held-out demonstrations, the first `--rl-num-eval-prompts` of them."""

    def __init__(self, job: Job, actor: Actor, rows: Demonstrations) -> None:
        self._actor = actor
        count = min(job.config.evaluation.num_eval_prompts, len(rows))
        self._batch = held_out_batch(job, DemonstrationStore(job, rows), count)

    def measure(self) -> float:
        """Return nats per token. Collective."""
        mask = self._batch.loss_mask
        nats = -self._actor.log_probs(self._batch)[mask].double().sum()
        total = self._actor.runner.global_sum(torch.stack([nats, mask.sum().double()]))
        return float(total[0] / total[1])


def held_out_batch(job: Job, store: DemonstrationStore, count: int) -> TrainBatch:
    """Return this data-parallel rank's part of the first `count` rows, the last of which is
    repeated without loss where rows do not divide into micro-batches."""
    batching, layout, multiple = job.micro_batching(), job.spec.train_layout, 1
    if not batching.packed:
        multiple = layout.dp_size * batching.micro_batch_size * batching.count_multiple_of
    places = np.arange(-(-count // multiple) * multiple)
    table = dataclasses.replace(
        store.table_of(np.minimum(places, count - 1)),
        why_not_valid=tuple(None if place < count else "repeated" for place in places),
    )
    (plan,) = plan_epochs(table, num_mini_batches=1, dp_size=layout.dp_size, batching=batching)
    cuts = plan[layout.dp_rank(dist.get_rank())]
    return build_train_batch(table, store.tokens_of(table, samples_of(cuts).tolist()), cuts)


# What `update_metrics` measures of samples alone.
_OF_SAMPLES = ("loss/policy", "kl/", "clip_fraction", "ratio/", "mismatch/")


def supervised_metrics(
    table: SampleTable, updates: Sequence[UpdateStats], aggregation: AggregationMode
) -> dict[str, float]:
    """Return a step's metrics that need neither rewards nor engines: `update_metrics`, the loss of
    demonstrations by their `aggregation`, and numbers of tokens. The loss of pairs is measured
    before the update, by `preference_metrics`.

    The loss is the mean over all tokens to learn of the step, or, with another aggregation than
    token_mean, over its updates."""
    measured = update_metrics(updates)
    metrics = {name: value for name, value in measured.items() if not name.startswith(_OF_SAMPLES)}
    if len(np.unique(table.draws)) == len(table):  # one sample per row
        metrics["loss/sft"] = measured["loss/policy"]
        if aggregation != "token_mean":
            losses = [float(update.sums.aggregated) for update in updates]
            metrics["loss/sft"] = float(np.mean(losses))
    metrics["sft/trained_tokens"] = sum(float(update.sums.num_tokens) for update in updates)
    metrics["sft/sample_tokens_mean"] = float(table.lengths.mean())
    return metrics
