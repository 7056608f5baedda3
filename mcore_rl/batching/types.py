"""What each stage of a step hands to the next: one frozen dataclass a stage.

Shape legend: n samples of the step, b samples of a rank, t tokens of these (prompt and response,
one sample after the other), p prompt tokens, r response tokens.

Alignment: everything per token in `TrainBatch` is aligned to the position that *scores* it.
Position j of a sample speaks of its token j+1; its last position speaks of nothing and is masked.
Megatron's labels are aligned the same way.

This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from mcore_rl.batching.moves import Division, Parcel
from mcore_rl.moe.routing import Routes

UNFINISHED = "unfinished"  # of a response that goes on in a later step

Answer = str | list[Any] | dict[str, Any]  # of JSON


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the prompts file, tokenised.

    `index` is the row in the file and stays the same across epochs, ranks and resumes.
    """

    index: int
    text: str
    answer: Answer
    token_ids: np.ndarray  # [p] int32
    row: str = "{}"  # all columns, as JSON; only who gives rewards has it

    @property
    def answer_text(self) -> str:
        """A text that should be right: the first of a list of answers, the JSON of an object."""
        answer = self.answer
        if isinstance(answer, list) and answer and isinstance(answer[0], str):
            return answer[0]
        return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


class TurnReward(NamedTuple):
    """What an environment has paid for a turn."""

    end: int  # tokens of the response up to the end of the turn, which was generated
    reward: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response, as the engine returned it, at once or in parts.

    Parts may have been sampled by weights of several versions, and between them may stand tokens
    that nobody sampled: what an environment has answered.
    """

    prompt: Prompt
    sample_index: int  # 0 .. samples per prompt - 1
    text: str  # of what was generated
    response_token_ids: np.ndarray  # [r] int32, the end-of-sequence token included if it was drawn
    rollout_log_probs: np.ndarray  # [r] float32, of the distribution that was sampled from
    finish_reason: str  # "stop", "length", or UNFINISHED
    weight_version: int  # the newest that it was sampled with
    routes: Routes | None = None  # the experts it was sampled with; all ranks of its engine have it
    failure: str | None = None  # why nothing can be learned from it, whatever its reward
    is_generated: np.ndarray | None = None  # [r] bool; None: all of it
    weight_versions: np.ndarray | None = None  # [r] int32, of each token; None: all the same
    turn_rewards: tuple[TurnReward, ...] = ()

    @property
    def num_generated(self) -> int:
        """Tokens of the response that the model generated."""
        if self.is_generated is None:
            return len(self.response_token_ids)
        return int(self.is_generated.sum())

    @property
    def token_versions(self) -> np.ndarray:
        """`[r]` int32, of the weights that each token was sampled with."""
        if self.weight_versions is not None:
            return self.weight_versions
        return np.full(len(self.response_token_ids), self.weight_version, dtype=np.int32)

    @property
    def oldest_version(self) -> int:
        """The oldest weights that a token of it was sampled with."""
        if self.weight_versions is None or not len(self.weight_versions):
            return self.weight_version
        return int(self.weight_versions.min())


@dataclass(frozen=True, slots=True)
class Baseline:
    """The greedy response to a prompt, as its samples are compared with it."""

    reward: float
    num_tokens: int  # of the response
    failure: str | None = None  # as in `ScoredRollout`


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout and what its reward function made of it."""

    rollout: Rollout
    reward: float
    failure: str | None = None  # why the reward function gave no value; `reward` then means nothing
    parts: Mapping[str, float] = field(default_factory=dict)  # reward name -> unweighted value
    baseline: Baseline | None = None  # where the estimator asks for it

    @property
    def is_valid(self) -> bool:
        """Whether it can be learned from: it has a reward, and what that is compared with."""
        return self.why_not_valid is None

    @property
    def why_not_valid(self) -> str | None:
        """What failed: the sample, its reward, that of the greedy response; None if nothing did."""
        if self.rollout.failure is not None:
            return self.rollout.failure
        if self.failure is None and self.baseline is not None:
            return self.baseline.failure
        return self.failure


def with_baselines(scored: Sequence[ScoredRollout], num_samples: int) -> list[ScoredRollout]:
    """The first `num_samples` with the greedy responses that follow as their baselines, then these.

    Samples and greedy responses are in the same order of groups. Without greedy responses the
    samples are returned as they are.
    """
    samples, greedy = list(scored[:num_samples]), list(scored[num_samples:])
    if not greedy:
        return samples
    size = len(samples) // len(greedy)
    baselines = [
        Baseline(each.reward, len(each.rollout.response_token_ids), each.why_not_valid)
        for each in greedy
    ]
    return [
        replace(sample, baseline=baselines[index // size]) for index, sample in enumerate(samples)
    ] + greedy


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Samples of one data-parallel rank, one after the other, without padding; the same on all its
    TP, CP and PP ranks.

    All `[t]` tensors but `token_ids` and `routes` are in scoring alignment (see the module's
    docstring) and on the CPU. `cuts` says how the samples are divided: one entry per mini-batch
    (optimizer step), each with the number of samples in each of its micro-batches, in order. The
    number of micro-batches in a mini-batch is the same on every data-parallel rank; a micro-batch
    may be empty. `mcore_rl.batching.dealing` makes the cuts.

    Where mini-batches are divided anew for every epoch, `later` has this rank's samples of the
    epochs after the first, which may be others: without what the stages before the update bring.
    """

    token_ids: torch.Tensor  # [t] int64
    lengths: torch.Tensor  # [b] int64, tokens of each sample, prompt and response
    prompt_lengths: torch.Tensor  # [b] int64, of these the prompt's; 0: it is nobody's
    sample_ids: torch.Tensor  # [b] int64, which samples of the step these are
    loss_mask: torch.Tensor  # [t] bool, True where the next token of a valid sample is generated
    rollout_log_probs: torch.Tensor  # [t] float32, 0 where masked
    cuts: tuple[tuple[int, ...], ...]
    advantages: torch.Tensor | None = None  # [t] float32
    old_log_probs: torch.Tensor | None = None  # [t] float32, actor before the update
    ref_log_probs: torch.Tensor | None = None  # [t] float32, reference actor
    values: torch.Tensor | None = None  # [t] float32, critic before the update
    returns: torch.Tensor | None = None  # [t] float32, what the critic learns
    weights: torch.Tensor | None = None  # [t] float32, correction of the train/engine mismatch
    # Experts that training is to use for the token itself, of the layers on this pipeline stage
    # that have some, in ascending order; uint8 or int16. None: the router chooses.
    routes: torch.Tensor | None = None  # [t, m, k]
    routes_known: torch.Tensor | None = None  # [t] bool; where False, the router chooses
    turn_rewards: torch.Tensor | None = None  # [t] float32, what an environment has paid there
    later: tuple[TrainBatch, ...] = ()

    @property
    def num_samples(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's samples as this rank's part of the actor has them, and what a critic gets of
    them."""

    actor: TrainBatch
    division: Division  # of the step's samples among the actor's ranks
    for_critic: Parcel | None  # its tokens; None: no critic
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepStats:
    """What a step reports: metric name -> value, by the names in the run directory's contract."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
