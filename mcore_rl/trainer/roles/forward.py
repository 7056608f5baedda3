"""A model that only scores samples, in a layout of its own: a reward model, a teacher.

`ForwardModel` is the model on a rank. It divides samples in its own way and gets their tokens from
the ranks that have them, as a role (`mcore_rl.trainer.roles.remote`).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any, TextIO, TypedDict

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.assignment import Cuts, samples_of
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.batching.sample_exchange import RowExchange, Shares
from mcore_rl.batching.table import SampleTable, rows_to_tokens
from mcore_rl.batching.train_batches import build_train_batch
from mcore_rl.batching.types import TrainBatch
from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.config import RLConfig
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.hf_checkpoint import load_into_megatron
from mcore_rl.megatron.runner import ModelKeywords, ModelRunner
from mcore_rl.megatron.value_head import build_value_model, make_critic_provider
from mcore_rl.megatron.world import MegatronWorld, parsed_args
from mcore_rl.spec import TeacherSpec, ValueModelSpec
from mcore_rl.trainer.roles.samples import plan_epochs, tensors_to_table

logger = logging.getLogger(__name__)


class Divided(TypedDict):
    """Which rank gets which samples."""

    wanted: Shares


class ForwardModel:
    """The model on this rank's pipeline stage and TP shard, in its own layout. All methods are
    collective over the ranks of that layout, and called outside of its world."""

    def __init__(
        self,
        world: MegatronWorld,
        state: megatron_adapter.TrainState,
        batching: MicroBatching,
        keywords: ModelKeywords = lambda rows, samples: {},
    ) -> None:
        self.world, self._batching = world, batching
        # The samples to score; the last one is repeated if the number of rows must be divisible.
        self._num_samples = 0
        self._table = SampleTable.of_lengths(np.empty(0, np.int64), np.empty(0, np.int64))
        self._rows = np.empty(0, dtype=np.int64)  # the sample of each row of the table
        self._plan: list[Cuts] = []
        self._wanted = Shares((), ())
        with world:
            self.runner = ModelRunner(world.args, state, world.layout, batching, keywords)

    def divide(self, /, **numbers: torch.Tensor) -> Divided:
        """Return which rank gets which samples, at least one. `numbers` come from
        `table_to_tensors`."""
        table = tensors_to_table(numbers)
        self._num_samples, rows = len(table), np.arange(len(table))
        if not self._batching.packed:  # rows must be divisible; scores of the repeats are unused
            each = self.world.layout.dp_size * self._batching.micro_batch_size
            missing = -len(table) % (each * self._batching.count_multiple_of)
            rows = np.concatenate([rows, np.full(missing, len(table) - 1)])
        self._table, self._rows = table.take(rows), rows
        (self._plan,) = plan_epochs(
            self._table,
            num_mini_batches=1,
            dp_size=self.world.layout.dp_size,
            batching=self._batching,
        )
        wanted = tuple(np.unique(rows[samples_of(cuts)]) for cuts in self._plan)
        self._wanted = Shares(wanted, self.world.layout.dp_ranks())
        return {"wanted": self._wanted}

    def received(self, tokens: RowExchange) -> TrainBatch:
        """Return this rank's batch. A sample id from the number of samples on is a repeat's.

        `tokens` brings `[t, 5]`, the rows of `tokens_to_rows` for the samples that this rank gets.
        """
        rank = dist.get_rank()
        mine = self._wanted.of(rank)
        own_tokens = rows_to_tokens(tokens.rows, self._table.lengths[mine])
        of_sample = dict(zip(mine.tolist(), own_tokens, strict=True))
        cuts = self._plan[self.world.layout.dp_rank(rank)]
        tokens_of = {row: of_sample[self._rows[row]] for row in samples_of(cuts).tolist()}
        return build_train_batch(self._table, tokens_of, cuts)

    def answered(self, batch: TrainBatch, rows: np.ndarray, asked_by: Shares) -> RowExchange:
        """Return `rows` `[t, ...]`, of a `received` batch, as an exchange without the repeats."""
        samples = [samples_of(cuts) for cuts in self._plan]
        source = tuple(each[each < self._num_samples] for each in samples)
        kept = (batch.sample_ids < self._num_samples).repeat_interleave(batch.lengths).numpy()
        held = Shares(source, self.world.layout.dp_ranks())
        return RowExchange(self._table.lengths[: self._num_samples], held, asked_by, rows[kept])


def build_forward_parts(
    spec: ValueModelSpec | TeacherSpec,
    config: RLConfig,
    actor_args: argparse.Namespace,
    *,
    add_head: Callable[[Any], Any] = make_critic_provider,
    log: TextIO | None = None,
) -> tuple[MegatronWorld, megatron_adapter.TrainState, MicroBatching]:
    """Build a model through Megatron, without an optimizer, and fill it: the arguments of a
    `ForwardModel`. `add_head` is that of `build_value_model`. Collective."""
    assert spec.tokens is not None, "the model has a command line of its own"
    world, state, shards = build_value_model(
        spec.shape,
        spec.checkpoint,
        parsed_args(spec.tokens, spec.extra_args, actor_args, log=log),
        megatron_adapter.setup_without_optimizer,
        requested_class=config.trainer.model_class,
        add_head=add_head,
        log=log,
    )
    with world:
        num_bytes = agreed_in_world(lambda: load_into_megatron(spec.checkpoint, shards))
    logger.info("read %.1f MB of %s", num_bytes / 1e6, spec.checkpoint.folder)
    return world, state, config.micro_batching(spec.shape, world.layout, vars(world.args))
