"""Teachers: other policies, whose log-probs of the samples are part of the actor's advantages.

`SwappedTeacher` has the actor's shape: like the reference, its weights replace the actor's while
the actor scores with them. `CalledTeacher` is a role (see `remote`): a `TeacherModel` of its own,
or a server (`teacher_server`). `StepTeachers` asks each of them for its samples of a step.

Shape legend: n samples of the step, t tokens of this rank's samples, in scoring alignment
(`mcore_rl.batching.types`).
"""

from __future__ import annotations

import abc
import argparse
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TextIO, TypedDict

import numpy as np
import torch

from mcore_rl.batching.rows import ModelRows
from mcore_rl.batching.sample_exchange import RowExchange, Shares
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import StepBatch, TrainBatch
from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.config import RLConfig
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.hf_checkpoint import (
    EMBEDDING,
    HFCheckpoint,
    load_into_megatron,
    read_boxes,
)
from mcore_rl.megatron.policy_head import make_policy_provider
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.config_json import ModelShape
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.spec import TeacherSpec
from mcore_rl.trainer.roles.forward import Divided, ForwardModel, build_forward_parts
from mcore_rl.trainer.roles.reference import BasePolicy, ReferencePolicy
from mcore_rl.trainer.roles.remote import Role
from mcore_rl.trainer.roles.samples import table_to_tensors

logger = logging.getLogger(__name__)

_HEAD = "lm_head.weight"
# Of a token that only the actor's padded vocabulary has: below those of tokens that are sampled.
_LACKED_LOG_PROB = -20.0

# A step's samples -> the number of each sample's teacher, `[n]` int64; -1: it has none.
TeacherOf = Callable[[SampleTable], np.ndarray]


class Scores(TypedDict):
    """What a teacher makes of every position."""

    scores: RowExchange  # [t, 1 + m] float32


class TeacherRole(abc.ABC):
    """What a role must offer to be a teacher; see `ForwardModel`."""

    @abc.abstractmethod
    def divide(self, /, **numbers: torch.Tensor) -> Divided:
        """Return which rank gets which samples, at least one."""

    @abc.abstractmethod
    def scores(self, *, tokens: RowExchange, asked_by: Shares) -> Scores:
        """Return the scores of these samples, for the ranks that asked: at each position the
        log-prob of the next token, then the log-probs and the ids of the k most probable ones, or
        the hidden state that the output layer gets. `tokens` brings `[t, 5]`, the rows of
        `tokens_to_rows`."""


class TeacherModel(ForwardModel, TeacherRole):
    """A teacher on this rank's pipeline stage and TP shard, in its own layout."""

    num_top_tokens = hidden_size = 0  # as in `teacher_columns`
    vocab_size = 0

    def scores(self, *, tokens: RowExchange, asked_by: Shares) -> Scores:
        batch, is_lacked = known_to(self.vocab_size, self.received(tokens))
        with self.world:
            columns = teacher_columns(
                self.runner.evaluate, batch, self.num_top_tokens, self.hidden_size
            )
        columns[:-1, 0][is_lacked[1:]] = _LACKED_LOG_PROB
        return {"scores": self.answered(batch, columns.numpy(), asked_by)}


def known_to(vocab_size: int, batch: TrainBatch) -> tuple[TrainBatch, torch.Tensor]:
    """Return the batch with token 0 for tokens that a model with `vocab_size` lacks, and which
    these are, `[t]` bool: an actor may sample a row that pads its vocabulary."""
    is_lacked = batch.token_ids >= vocab_size
    ids = batch.token_ids.masked_fill(is_lacked, 0)
    return dataclasses.replace(batch, token_ids=ids), is_lacked


def teacher_columns(
    evaluate: Callable[..., torch.Tensor],
    batch: TrainBatch,
    num_top_tokens: int,
    hidden_size: int,
) -> torch.Tensor:
    """Return the columns of `TeacherRole.scores`, `[t, 1 + m]` float32 on the CPU.

    `evaluate` is a policy's, see `ModelRunner`; `hidden_size` is 0 if hidden states are not needed.
    """
    k = num_top_tokens
    columns = evaluate(
        batch,
        2 + 2 * k + hidden_size,
        with_entropy=False,
        top_k=k,
        with_hidden=hidden_size > 0,
    )
    return torch.cat([columns[:, :1], columns[:, 2:]], dim=1)


def build_teacher_model(
    spec: TeacherSpec,
    config: RLConfig,
    actor_args: argparse.Namespace,
    *,
    log: TextIO | None = None,
) -> TeacherModel:
    """Build the model through Megatron, without an optimizer, and fill it. Collective."""
    add_head = functools.partial(
        make_policy_provider,
        real_vocab_size=spec.shape.vocab_size,
        chunk_tokens=config.trainer.log_prob_chunk_tokens,
        in_float32=config.trainer.fp32_lm_head,
    )
    parts = build_forward_parts(spec, config, actor_args, add_head=add_head, log=log)

    def keywords(rows: ModelRows, samples: TrainBatch) -> dict[str, object]:
        return {
            "target_ids": rows.target_ids,
            "scored": rows.scored,
            "temperature": config.rollout.temperature,
        }

    model = TeacherModel(*parts, keywords)
    model.num_top_tokens, model.vocab_size = config.teacher.num_top_tokens, spec.shape.vocab_size
    model.hidden_size = spec.shape.hidden_size if config.teacher.with_hidden else 0
    return model


def read_teacher_head(
    checkpoint: HFCheckpoint, shape: ModelShape, state: megatron_adapter.TrainState
) -> torch.Tensor | None:
    """Return `[v/tp, g]`, the rows of a teacher's output layer for the tokens of this TP rank's in
    the actor, whose `state` this is; padding is 0. None on other stages than the last."""
    model: Any = state.chunks[-1]  # with the attributes of Megatron's class
    if not model.post_process:
        return None
    own = model.output_layer.weight
    if model.share_embeddings_and_output_weights:
        own = model.shared_embedding_or_output_weight()
    start = model.pg_collection.tp.rank() * own.shape[0]
    stop = min(start + own.shape[0], shape.vocab_size)
    weight = torch.zeros(own.shape[0], shape.hidden_size, dtype=own.dtype, device=own.device)
    name = EMBEDDING if shape.tied_embeddings else _HEAD
    if start < stop:
        (rows,) = read_boxes(checkpoint, name, [((start, stop), (0, shape.hidden_size))])
        weight[: stop - start] = rows
    return weight


class Teacher(abc.ABC):
    """A teacher as the actor's ranks call it. All methods are collective over these ranks."""

    @abc.abstractmethod
    def divide(self, sample_store: SampleStore, table: SampleTable, samples: np.ndarray) -> None:
        """Begin a step; `samples` are the rows of `table` to score, at least one."""

    @abc.abstractmethod
    def begin(self, batch: StepBatch) -> Callable[[], torch.Tensor]:
        """Request scores; the returned function waits for those of all tokens here, `[t, 1 + m]`,
        which are undefined for samples that `divide` has not named."""


class SwappedTeacher(Teacher):
    """A teacher of the actor's shape, whose weights the actor scores with."""

    def __init__(
        self,
        scores: Callable[[TrainBatch], torch.Tensor],
        weights: ReferencePolicy,
        base: BasePolicy,
    ) -> None:
        """`scores` are of the actor's model, by the weights that it has at the time; within `base`
        it has no adapters."""
        self._scores, self._weights, self._base = scores, weights, base

    def divide(self, sample_store: SampleStore, table: SampleTable, samples: np.ndarray) -> None:
        """Do nothing: the samples are where the actor scores them."""

    def begin(self, batch: StepBatch) -> Callable[[], torch.Tensor]:
        # Another model, which chooses its experts itself.
        unrouted = dataclasses.replace(batch.actor, routes=None, routes_known=None)

        def finish() -> torch.Tensor:
            with self._base, self._weights:
                return self._scores(unrouted)

        return finish


def build_swapped_teacher(
    scores: Callable[[TrainBatch], torch.Tensor],
    state: megatron_adapter.TrainState,
    checkpoint: HFCheckpoint,
    shards: ModelShards,
) -> SwappedTeacher:
    """Read a teacher of the actor's shape into host memory; all arguments but `checkpoint` are the
    actor's, whose weights are the same before and after. Collective."""
    weights = ReferencePolicy(state)
    agreed_in_world(lambda: load_into_megatron(checkpoint, shards))
    weights.swap()
    return SwappedTeacher(scores, weights, BasePolicy(state))


class CalledTeacher(Teacher):
    """A teacher behind a role."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._samples = np.empty(0, np.int64)
        self._tokens: RowExchange | None = None

    def divide(self, sample_store: SampleStore, table: SampleTable, samples: np.ndarray) -> None:
        numbers = table_to_tensors(table.take(samples))
        wanted = self._role.call(TeacherRole.divide, **numbers)["wanted"]
        # The role numbers only the samples that it scores.
        in_table = Shares(tuple(samples[each] for each in wanted.samples), wanted.ranks)
        whole = sample_store.row_exchange(table, in_table)
        self._samples, self._tokens = samples, whole

    def begin(self, batch: StepBatch) -> Callable[[], torch.Tensor]:
        assert self._tokens is not None, "begin before divide"
        number = np.full(len(batch.division.lengths), -1)
        number[self._samples] = np.arange(len(self._samples))
        asking = batch.division.first
        places = [number[samples] for samples in asking.samples]
        asked_by = Shares(tuple(each[each >= 0] for each in places), asking.ranks)
        finish = self._role.begin(TeacherRole.scores, tokens=self._tokens, asked_by=asked_by)
        self._tokens = None

        def placed() -> torch.Tensor:
            samples = batch.actor
            here = torch.from_numpy(number[samples.sample_ids.numpy()] >= 0)
            rows = torch.from_numpy(finish()["scores"].rows)
            scores = torch.zeros(samples.num_tokens, rows.shape[1])
            scores[here.repeat_interleave(samples.lengths)] = rows
            return scores

        return placed


def only_teacher(table: SampleTable) -> np.ndarray:
    """Return the numbers of the samples' teachers if there is one teacher."""
    return np.zeros(len(table), dtype=np.int64)


class StepTeachers:
    """The teachers of a run. All methods are collective over the actor's ranks."""

    def __init__(self, teachers: Sequence[Teacher], teacher_of: TeacherOf = only_teacher) -> None:
        """`teacher_of` assigns a step's samples; it returns the same on all ranks."""
        self._teachers, self.teacher_of = teachers, teacher_of
        self._numbers = np.empty(0, np.int64)

    def divide(self, sample_store: SampleStore, table: SampleTable) -> None:
        """Begin a step: give each teacher its samples of `sample_store`."""
        self._numbers = self.teacher_of(table)
        for number, teacher in enumerate(self._teachers):
            if len(samples := np.flatnonzero(self._numbers == number)):
                teacher.divide(sample_store, table, samples)

    def mask(self, batch: TrainBatch) -> torch.Tensor | None:
        """Return `[t]` bool: whether the token's sample has a teacher; None if all samples of the
        step have one."""
        if (self._numbers >= 0).all():
            return None
        is_learned = torch.from_numpy(self._numbers[batch.sample_ids.numpy()] >= 0)
        return is_learned.repeat_interleave(batch.lengths)

    def begin(self, batch: StepBatch) -> Callable[[], torch.Tensor]:
        """Request scores; the returned function waits for the `[t, 1 + m]` of `batch.actor`, 0 for
        samples without a teacher; `[t, 1]` if no sample of the step has one."""
        asked = [number for number in range(len(self._teachers)) if number in self._numbers]
        waits = [(number, self._teachers[number].begin(batch)) for number in asked]
        samples = batch.actor
        of_samples = torch.from_numpy(self._numbers[samples.sample_ids.numpy()])

        def finish() -> torch.Tensor:
            of_tokens = of_samples.repeat_interleave(samples.lengths)[:, None]
            answers = [(number, wait()) for number, wait in waits]
            scores = torch.zeros(samples.num_tokens, 1)
            if answers:
                scores = torch.zeros_like(answers[0][1])
            for number, of_teacher in answers:
                scores = torch.where(of_tokens == number, of_teacher, scores)
            return scores

        return finish
