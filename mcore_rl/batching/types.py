"""Data between the stages of a step: one frozen dataclass per stage.

Shape legend: n samples of the step, b samples of a rank, t tokens of these (prompt and response,
one sample after the other), p prompt tokens, r response tokens.

Alignment: per-token data in `TrainBatch` is aligned to the position that *scores* the token.
Position j of a sample describes its token j+1; its last position describes none and is masked.
Megatron's labels are aligned in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from mcore_rl.algorithms.registry import Drop
from mcore_rl.batching.sample_exchange import Division, RowExchange
from mcore_rl.moe.routing import Routes

UNFINISHED = "unfinished"  # finish_reason of a response that continues in a later step

Answer = str | list[Any] | dict[str, Any]  # from JSON


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokenised row of the prompts file.

    `index` is the row in the file, plus the rows of sources before, and stays the same across
    epochs, ranks and resumes.

    Example: `Prompt(index=3, text="1+1=", answer="2", token_ids=array([16, 10, 16, 28]))`.
    """

    index: int
    text: str
    answer: Answer
    token_ids: np.ndarray  # [p] int32
    row: str = "{}"  # all columns, as JSON; only on ranks that compute rewards
    source: str = ""  # `SourceSpec.key`
    max_response_tokens: int | None = None  # None: that of the run
    num_samples: int | None = None  # responses to sample; None: as for all prompts

    def limit(self, max_tokens: int) -> int:
        """Return the number of tokens that a response may have; `max_tokens` is the run's."""
        return min(max_tokens, self.max_response_tokens or max_tokens)

    @property
    def answer_text(self) -> str:
        """Answer as text: the first of a list of answers, the JSON of an object."""
        answer = self.answer
        if isinstance(answer, list) and answer and isinstance(answer[0], str):
            return answer[0]
        return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most probable tokens at positions of a response, for the engine that sampled it.

    Example: for one token of two candidates: `TopTokens(array([[17, 3]]), array([[-0.1, -2.4]]))`.
    """

    ids: np.ndarray  # [r, k] int32, most probable first; 0 for tokens that were not sampled
    log_probs: np.ndarray  # [r, k] float32, over the whole vocabulary; 0 for these tokens

    @classmethod
    def joined(cls, parts: Sequence[TopTokens | int]) -> TopTokens:
        """Concatenate parts, at least one of which is not a number of tokens that were not
        sampled."""
        (k, *others) = {each.ids.shape[1] for each in parts if isinstance(each, TopTokens)}
        assert not others, "parts have different numbers of candidates"
        filled = [
            each
            if isinstance(each, TopTokens)
            else TopTokens(np.zeros((each, k), np.int32), np.zeros((each, k), np.float32))
            for each in parts
        ]
        return cls(
            np.concatenate([each.ids for each in filled]),
            np.concatenate([each.log_probs for each in filled]),
        )


class TurnReward(NamedTuple):
    """Reward of an environment for a turn.

    Example: `TurnReward(end=12, reward=0.5)`.
    """

    end: int  # response tokens up to the end of the turn, which was generated
    reward: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """Sampled response, as the engine returned it, at once or in parts.

    Parts may come from weights of several versions. Between parts there may be tokens that were not
    sampled: the answers of an environment.

    Example: after "1+1=" the response "2" and an end-of-sequence token:

        Rollout(prompt, sample_index=0, text="2", response_token_ids=array([17, 2]),
                rollout_log_probs=array([-0.1, -0.01]), finish_reason="stop", weight_version=5)
    """

    prompt: Prompt
    sample_index: int  # 0 .. samples per prompt - 1
    text: str  # generated text
    response_token_ids: np.ndarray  # [r] int32, including the end-of-sequence token if sampled
    rollout_log_probs: np.ndarray  # [r] float32, under the distribution that was sampled from
    finish_reason: str  # "stop", "length", or UNFINISHED
    weight_version: int  # newest version that sampled it
    routes: Routes | None = None  # experts chosen in sampling; on all ranks of its engine
    failure: str | None = None  # why it cannot be trained on, apart from its reward
    is_generated: np.ndarray | None = None  # [r] bool; None: all tokens
    weight_versions: np.ndarray | None = None  # [r] int32, of each token; None: all the same
    turn_rewards: tuple[TurnReward, ...] = ()
    top_tokens: TopTokens | None = None  # [r, k]; None: not asked for

    @property
    def num_generated(self) -> int:
        """Number of response tokens that the model generated."""
        if self.is_generated is None:
            return len(self.response_token_ids)
        return int(self.is_generated.sum())

    @property
    def turn_tokens(self) -> list[int]:
        """Number of tokens of each turn that the model generated."""
        if self.is_generated is None:
            return [len(self.response_token_ids)]
        edges = np.flatnonzero(np.diff(self.is_generated, prepend=False, append=False))
        counts: list[int] = (edges[1::2] - edges[::2]).tolist()
        return counts

    @property
    def token_versions(self) -> np.ndarray:
        """`[r]` int32: version of the weights that sampled each token."""
        if self.weight_versions is not None:
            return self.weight_versions
        return np.full(len(self.response_token_ids), self.weight_version, dtype=np.int32)

    @property
    def oldest_version(self) -> int:
        """Oldest version of the weights that sampled a token of it."""
        if self.weight_versions is None or not len(self.weight_versions):
            return self.weight_version
        return int(self.weight_versions.min())


@dataclass(frozen=True, slots=True)
class Baseline:
    """Greedy response to a prompt, with which its samples are compared.

    Example: `Baseline(reward=0.5, num_tokens=80)`.
    """

    reward: float
    num_tokens: int  # in the response
    failure: str | None = None  # as in `ScoredRollout`
    is_cut: bool = False  # truncated at the maximum length


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """Rollout with its reward.

    Example: `ScoredRollout(rollout, reward=1.2, parts={"exact": 1.0, "format": 0.2})`.
    """

    rollout: Rollout
    reward: float
    failure: str | None = None  # why there is no reward; `reward` is then undefined
    parts: Mapping[str, float] = field(default_factory=dict)  # reward name -> unweighted value
    baseline: Baseline | None = None  # if the estimator requests it
    dropped: Drop | None = None  # what --rl-group-filter has decided on its group

    @property
    def is_valid(self) -> bool:
        """Whether it can be trained on: it has a reward, and a baseline if one is needed, and the
        group filter keeps it."""
        return self.why_not_valid is None

    @property
    def why_not_valid(self) -> str | None:
        """Failure of the sample, its reward or the greedy response's reward, or why its group is
        filtered; None if valid."""
        if self.rollout.failure is not None:
            return self.rollout.failure
        if self.failure is not None:
            return self.failure
        if self.baseline is not None and self.baseline.failure is not None:
            return self.baseline.failure
        return None if self.dropped is None else f"--rl-group-filter: {self.dropped.reason}"


def with_baselines(scored: Sequence[ScoredRollout], sizes: Sequence[int]) -> list[ScoredRollout]:
    """Set the greedy responses, one per group, as baselines of the samples before them.

    `sizes` are the numbers of samples of the groups. Samples and greedy responses are in the order
    of groups, and so is the result. Without greedy responses the samples are returned unchanged.
    """
    samples, greedy = list(scored[: sum(sizes)]), list(scored[sum(sizes) :])
    if not greedy:
        return samples
    baselines = [
        Baseline(
            each.reward,
            len(each.rollout.response_token_ids),
            each.why_not_valid,
            is_cut=each.rollout.finish_reason == "length",
        )
        for each in greedy
    ]
    of_samples = [each for each, size in zip(baselines, sizes, strict=True) for _ in range(size)]
    return [
        replace(sample, baseline=baseline)
        for sample, baseline in zip(samples, of_samples, strict=True)
    ] + greedy


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Samples of one data-parallel rank, one after the other, without padding.

    The batch is the same on all its TP, CP and PP ranks. All `[t]` tensors except `token_ids` and
    `routes` are in scoring alignment (see the module's docstring) and on the CPU. `cuts`, made by
    `mcore_rl.batching.assignment`, has one entry per mini-batch (optimizer step): the number of
    samples in each of its micro-batches, in order. The number of micro-batches in a mini-batch is
    the same on every data-parallel rank; a micro-batch may be empty.

    If each epoch shuffles the samples anew, `later` has this rank's batches of the later epochs,
    possibly with other samples, without the results of the stages before the update.

    Example: two samples, of 2 + 2 and 1 + 1 tokens, in two micro-batches of one mini-batch:

        token_ids   [5, 6, 7, 2,  8, 2]
        lengths     [4, 2]
        loss_mask   [F, T, T, F,  T, F]
        cuts        ((1, 1),)
    """

    token_ids: torch.Tensor  # [t] int64
    lengths: torch.Tensor  # [b] int64, tokens of each sample, prompt and response
    prompt_lengths: torch.Tensor  # [b] int64, tokens of the prompt; 0: no prompt
    sample_ids: torch.Tensor  # [b] int64, indices of the samples in the step
    loss_mask: torch.Tensor  # [t] bool, True where the next token of a valid sample is generated
    rollout_log_probs: torch.Tensor  # [t] float32, 0 where masked
    cuts: tuple[tuple[int, ...], ...]
    advantages: torch.Tensor | None = None  # [t] float32
    old_log_probs: torch.Tensor | None = None  # [t] float32, actor before the update
    ref_log_probs: torch.Tensor | None = None  # [t] float32, reference actor
    teacher_log_probs: torch.Tensor | None = None  # [t] float32
    # Log-probs of a teacher's k most probable next tokens, then their ids (m = 2k), or its hidden
    # states.
    teacher_outputs: torch.Tensor | None = None  # [t, m] float32
    # Whether the sample has a teacher; None: all of the step's samples have, or none of the run's.
    teacher_mask: torch.Tensor | None = None  # [t] bool
    values: torch.Tensor | None = None  # [t] float32, critic before the update
    returns: torch.Tensor | None = None  # [t] float32, targets of the critic
    weights: torch.Tensor | None = None  # [t] float32, correction of the train/engine mismatch
    selected: torch.Tensor | None = None  # [t] bool, tokens that the policy loss has selected
    # Experts for the token itself, in the MoE layers of this pipeline stage in ascending order;
    # uint8 or int16. None: the router chooses.
    routes: torch.Tensor | None = None  # [t, m, k]
    routes_known: torch.Tensor | None = None  # [t] bool; if False, the router chooses
    turn_rewards: torch.Tensor | None = None  # [t] float32, rewards of an environment
    # Log-probs of the engine's k most probable next tokens, then their ids (m = 2k); 0 where
    # masked.
    top_tokens: torch.Tensor | None = None  # [t, m] float32
    # Tokens of demonstrations that are learned beside the samples; these are not in `loss_mask`.
    demonstration_mask: torch.Tensor | None = None  # [t] bool
    later: tuple[TrainBatch, ...] = ()

    @property
    def num_samples(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's samples for this rank's part of the actor, and the critic's share of them.

    Example: `StepBatch(actor=batch, division=division, for_critic=None)`.
    """

    actor: TrainBatch
    division: Division  # of the step's samples among the actor's ranks
    for_critic: RowExchange | None  # the critic's tokens; None: no critic
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Metrics of a step: name -> value, with the names in the run directory's contract.

    Example: `StepStats(step=3, metrics={"reward/mean": 0.5})`.
    """

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
