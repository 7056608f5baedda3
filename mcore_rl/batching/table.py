"""Table of a step's samples on every rank: a few numbers per sample, without tokens.

With it all ranks compare rewards and divide the samples in the same way. Tokens stay on the ranks
that sampled them until the ranks that train on them are known (`mcore_rl.rollout.sample_store`).

Shape legend: n samples of the step; r rewards; t tokens of one sample, prompt and response.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.algorithms.registry import Drop
from mcore_rl.batching.types import ScoredRollout, TopTokens
from mcore_rl.moe.routing import Routes


@dataclass(frozen=True, slots=True)
class SampleTable:
    """A step's samples, the same on all ranks; responses to one prompt are adjacent.

    Arrays are `[n]` unless stated otherwise.

    Example: row i may be homes 4, numbers 0, draws 12, prompts 3, prompt_lengths 40, rewards 1.0.
    """

    homes: np.ndarray  # int64, first of the ranks that sampled and store it
    numbers: np.ndarray  # int64, its number in their `SampleStore`
    draws: np.ndarray  # int64, draw of its prompt; differs between adjacent groups
    prompts: np.ndarray  # int64, `Prompt.index`
    prompt_lengths: np.ndarray  # int64, tokens
    response_lengths: np.ndarray  # int64, tokens
    generated_lengths: np.ndarray  # int64, response tokens that the model generated
    is_cut: np.ndarray  # bool, truncated at the maximum length
    rewards: np.ndarray  # float64, undefined without a reward
    has_reward: np.ndarray  # bool
    has_failed: np.ndarray  # bool, the sample itself failed
    baselines: np.ndarray  # float64, reward of the greedy response; nan: not requested
    baseline_lengths: np.ndarray  # int64, tokens of the greedy response
    baseline_is_cut: np.ndarray  # bool, the greedy response is truncated
    has_baseline: np.ndarray  # bool, False if the greedy response has no reward
    oldest_versions: np.ndarray  # int64, version of the weights that sampled its oldest token
    why_not_valid: tuple[str | None, ...]  # `ScoredRollout.why_not_valid`
    dropped: tuple[Drop | None, ...]  # `ScoredRollout.dropped`
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)  # unweighted; nan: failed

    def __len__(self) -> int:
        return len(self.homes)

    @property
    def valid(self) -> np.ndarray:
        """`[n]` bool: whether the sample can be trained on."""
        return np.array([why is None for why in self.why_not_valid], dtype=np.bool_)

    @property
    def lengths(self) -> np.ndarray:
        """`[n]` int64: tokens of prompt and response."""
        total: np.ndarray = self.prompt_lengths + self.response_lengths
        return total

    @property
    def group_ids(self) -> np.ndarray:
        """`[n]` int64: the number of the sample's group, neighbours of one draw, from 0."""
        numbers: np.ndarray = np.cumsum(np.diff(self.draws, prepend=self.draws[:1]) != 0)
        return numbers

    @classmethod
    def of(
        cls,
        scored: Sequence[ScoredRollout],
        *,
        home: int = 0,
        numbers: Sequence[int] | None = None,
        draws: Sequence[int] | None = None,
    ) -> SampleTable:
        """Build the table of samples that `home` stores under `numbers` (default: 0, 1, ...)."""
        rollouts = [sample.rollout for sample in scored]
        count = range(len(scored))
        baselines = [sample.baseline for sample in scored]
        names = dict.fromkeys(name for sample in scored for name in sample.parts)

        def integers(values: Sequence[int] | range) -> np.ndarray:
            return np.array(values, dtype=np.int64)

        def truths(values: Sequence[bool]) -> np.ndarray:
            return np.array(values, dtype=np.bool_)

        def numbers_of(values: Sequence[float]) -> np.ndarray:
            return np.array(values, dtype=np.float64)

        indices = [rollout.prompt.index for rollout in rollouts]
        return cls(
            homes=integers([home] * len(scored)),
            numbers=integers(count if numbers is None else numbers),
            draws=integers(indices if draws is None else draws),
            prompts=integers(indices),
            prompt_lengths=integers([len(rollout.prompt.token_ids) for rollout in rollouts]),
            response_lengths=integers([len(rollout.response_token_ids) for rollout in rollouts]),
            generated_lengths=integers([rollout.num_generated for rollout in rollouts]),
            is_cut=truths([rollout.finish_reason == "length" for rollout in rollouts]),
            rewards=numbers_of([sample.reward for sample in scored]),
            has_reward=truths([sample.failure is None for sample in scored]),
            has_failed=truths([rollout.failure is not None for rollout in rollouts]),
            baselines=numbers_of([np.nan if b is None else b.reward for b in baselines]),
            baseline_lengths=integers([0 if b is None else b.num_tokens for b in baselines]),
            baseline_is_cut=truths([b is not None and b.is_cut for b in baselines]),
            has_baseline=truths([b is None or b.failure is None for b in baselines]),
            oldest_versions=integers([rollout.oldest_version for rollout in rollouts]),
            why_not_valid=tuple(sample.why_not_valid for sample in scored),
            dropped=tuple(sample.dropped for sample in scored),
            parts={
                name: numbers_of([sample.parts.get(name, np.nan) for sample in scored])
                for name in names
            },
        )

    @classmethod
    def of_lengths(
        cls,
        prompt_lengths: np.ndarray,
        response_lengths: np.ndarray,
        *,
        draws: np.ndarray | None = None,
        valid: np.ndarray | None = None,
    ) -> SampleTable:
        """Build a table from lengths alone; samples are valid by default."""
        count = len(prompt_lengths)
        nothing = np.zeros(count, dtype=np.int64)
        yes, no = np.ones(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
        valid = yes if valid is None else valid.astype(np.bool_)
        return cls(
            homes=nothing,
            numbers=np.arange(count),
            draws=np.arange(count) if draws is None else draws,
            prompts=nothing,
            prompt_lengths=prompt_lengths,
            response_lengths=response_lengths,
            generated_lengths=response_lengths,
            is_cut=no,
            rewards=np.zeros(count),
            has_reward=valid,
            has_failed=no,
            baselines=np.full(count, np.nan),
            baseline_lengths=nothing,
            baseline_is_cut=no,
            has_baseline=yes,
            oldest_versions=nothing,
            why_not_valid=tuple(None if each else "not trained on" for each in valid),
            dropped=(None,) * count,
        )

    def take(self, rows: Sequence[int] | np.ndarray) -> SampleTable:
        """Return these rows, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        columns: dict[str, object] = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, np.ndarray):
                columns[each.name] = value[rows]
            elif isinstance(value, tuple):
                columns[each.name] = tuple(value[row] for row in rows)
        columns["parts"] = {name: values[rows] for name, values in self.parts.items()}
        return SampleTable(**columns)  # type: ignore[arg-type]

    @classmethod
    def joined(cls, tables: Sequence[SampleTable]) -> SampleTable:
        """Concatenate at least one table."""
        columns: dict[str, object] = {}
        for each in dataclasses.fields(cls):
            if each.name == "parts":
                continue
            values = [getattr(table, each.name) for table in tables]
            if isinstance(values[0], tuple):
                columns[each.name] = tuple(itertools.chain(*values))
            else:
                columns[each.name] = np.concatenate(values)
        names = dict.fromkeys(name for table in tables for name in table.parts)
        columns["parts"] = {
            name: np.concatenate([t.parts.get(name, np.full(len(t), np.nan)) for t in tables])
            for name in names
        }
        return cls(**columns)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """Tokens of one sample, prompt and response, with their data.

    Example: `SampleTokens(array([5, 6, 7]), array([False, True, True]), array([0, -0.1, -0.2]))`.
    """

    token_ids: np.ndarray  # [t] int32
    is_generated: np.ndarray  # [t] bool; False for tokens of the prompt and of environments
    log_probs: np.ndarray  # [t] float32, as sampled; 0 for tokens that were not sampled
    routes: Routes | None = None  # of all tokens but the last
    turn_rewards: np.ndarray | None = None  # [t] float32, at the last token of a turn; else 0
    top_tokens: TopTokens | None = None  # of the response's tokens

    @classmethod
    def of(cls, sample: ScoredRollout) -> SampleTokens:
        """Return the tokens of `sample`.

        Raises RuntimeError if the prompt is empty (no position scores the first response token) or
        if response and log-probs differ in length."""
        rollout = sample.rollout
        num_prompt, num_response = len(rollout.prompt.token_ids), len(rollout.response_token_ids)
        name = f"prompt {rollout.prompt.index}, sample {rollout.sample_index}"
        if num_prompt == 0:
            raise RuntimeError(f"{name}: the prompt has no token")
        if len(rollout.rollout_log_probs) != num_response:
            raise RuntimeError(
                f"{name}: expected {num_response} rollout_log_probs, one per response token, "
                f"got {len(rollout.rollout_log_probs)}"
            )
        nothing = np.zeros(num_prompt, dtype=np.float32)
        is_generated = np.arange(num_prompt + num_response) >= num_prompt
        if rollout.is_generated is not None:
            is_generated[num_prompt:] = rollout.is_generated
        turn_rewards = np.zeros(num_prompt + num_response, dtype=np.float32)
        for turn in rollout.turn_rewards:
            turn_rewards[num_prompt + turn.end - 1] += turn.reward
        return cls(
            token_ids=np.concatenate(
                [rollout.prompt.token_ids, rollout.response_token_ids], dtype=np.int32
            ),
            is_generated=is_generated,
            log_probs=np.concatenate([nothing, rollout.rollout_log_probs], dtype=np.float32),
            routes=rollout.routes,
            turn_rewards=turn_rewards,
            top_tokens=rollout.top_tokens,
        )


def tokens_to_rows(samples: Sequence[SampleTokens]) -> np.ndarray:
    """Return `[t, 5]` uint8 of samples, one after the other: the token, and whether it was
    generated. For receivers that do not need log-probs."""
    ids = np.concatenate([np.empty(0, np.int32), *(each.token_ids for each in samples)])
    rows = np.empty((len(ids), 5), dtype=np.uint8)
    rows[:, :4] = ids.view(np.uint8).reshape(-1, 4)
    rows[:, 4] = np.concatenate([np.empty(0, np.bool_), *(each.is_generated for each in samples)])
    return rows


def rows_to_tokens(rows: np.ndarray, lengths: np.ndarray) -> list[SampleTokens]:
    """Convert the rows of `tokens_to_rows` to samples of these lengths, without log-probs."""
    ends = lengths.cumsum()[:-1]
    ids = np.split(np.ascontiguousarray(rows[:, :4]).view(np.int32)[:, 0], ends)
    generated = np.split(rows[:, 4] != 0, ends)
    return [
        SampleTokens(*each, np.zeros(len(each[0]), dtype=np.float32))
        for each in zip(ids[: len(lengths)], generated[: len(lengths)], strict=True)
    ]
