"""Demonstrations beside reinforcement learning: each update also lowers their cross-entropy.

    loss = loss of the algorithm + coef x sum of -log p over learned tokens / their number

The number is that of the global mini-batch, so the gradient is the same in every layout. The rows
are extra micro-batches of the update: no earlier stage of a step sees them.

Shape legend: t tokens and b samples of this rank's part of a mini-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.batching.assignment import samples_of
from mcore_rl.batching.train_batches import build_train_batch, split_mini_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.config import RLConfig
from mcore_rl.data.demonstrations import Demonstrations, load_demonstrations
from mcore_rl.data.prompts import prompt_indices
from mcore_rl.trainer.demonstration_store import DemonstrationStore
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.roles.samples import plan_epochs


def read_mixed(config: RLConfig, folder: Path, **how: Any) -> Demonstrations | None:
    """Return the rows of --rl-sft-demonstrations, None without them. `folder` is that of the
    tokenizer, `how` are keywords of `load_demonstrations`. Raises UsageError."""
    if config.supervised.demonstrations is None:
        return None
    return load_demonstrations(
        config.supervised.demonstrations,
        "--rl-sft-demonstrations",
        folder,
        config.data,
        config.supervised,
        max_response_tokens=config.rollout.max_response_tokens,
        **how,
    )


class MixedDemonstrations:
    """The rows that each step adds, by its number alone."""

    def __init__(self, job: Job, rows: Demonstrations) -> None:
        self._job, self._store = job, DemonstrationStore(job, rows)
        self.fingerprint = rows.fingerprint

    def mini_batches(self, step: int) -> list[TrainBatch]:
        """Return this data-parallel rank's part of the rows of each mini-batch. Local."""
        job, store = self._job, self._store
        count = job.config.supervised.rows_per_step
        layout = job.spec.train_layout
        rows = prompt_indices(len(store.rows), start=step * count, count=count, seed=job.args.seed)
        table = store.table_of(rows)
        (plan,) = plan_epochs(
            table,
            num_mini_batches=job.config.trainer.num_mini_batches,
            dp_size=layout.dp_size,
            batching=job.micro_batching(),
        )[:1]
        cuts = plan[layout.dp_rank(dist.get_rank())]
        tokens = store.tokens_of(table, samples_of(cuts).tolist())
        return split_mini_batches(build_train_batch(table, tokens, cuts))


def with_demonstrations(batch: TrainBatch, demonstrations: TrainBatch) -> TrainBatch:
    """Return a mini-batch with the micro-batches of `demonstrations` behind its own. Their tokens
    are only in `demonstration_mask`."""
    joined: dict[str, object] = {
        "cuts": ((*batch.cuts[0], *demonstrations.cuts[0]),),
        "demonstration_mask": torch.cat(
            [torch.zeros_like(batch.loss_mask), demonstrations.loss_mask]
        ),
    }
    given: Mapping[str, torch.Tensor] = {
        "token_ids": demonstrations.token_ids,
        "lengths": demonstrations.lengths,
        # They share no prompt, and no stage has results of them.
        "prompt_lengths": torch.zeros_like(demonstrations.lengths),
        "sample_ids": torch.full_like(demonstrations.lengths, -1),
    }
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            more = given.get(field.name)
            if more is None:
                more = value.new_zeros(demonstrations.num_tokens, *value.shape[1:])
            joined[field.name] = torch.cat([value, more])
    return TrainBatch(**joined)  # type: ignore[arg-type]
