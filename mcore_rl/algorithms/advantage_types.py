"""What an advantage estimator is given, and what it returns.

Shape legend: see `mcore_rl.algorithms`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from mcore_rl.common.parameters import Parameters, param

P = TypeVar("P", bound=Parameters)  # an estimator's own


@dataclass(frozen=True, slots=True)
class Discount(Parameters):
    """Of estimators that look at when a reward came."""

    gamma: float = param(
        1.0,
        "what a reward one token later is worth",
        least=0,
        most=1,
        advice="later rewards count at most fully, so choose for example 1",
    )


def _of_this_rank_alone(sums: torch.Tensor) -> torch.Tensor:
    return sums


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What one data-parallel rank knows when advantages are formed.

    The `[n]` arrays are of the whole global step and the same on every rank; groups are complete in
    them, but for samples whose reward failed: these are left out (see `advantages_of_valid`), so
    that a group may be smaller than others. A prompt drawn twice into one step needs two group ids
    if it is to form two groups.

    A penalty such as the KL is part of both `scores` (summed over the response) and `token_rewards`
    (where it arose): estimators read one or the other. Masked positions of `[t]` tensors may hold
    anything, nan and inf included. A token that is no loss token is passed over: the next token
    after it is its sample's next loss token.
    """

    scores: np.ndarray  # [n] float64, outcome of each sample, penalties included
    group_ids: np.ndarray  # [n], equal where samples answer the same prompt
    response_lengths: np.ndarray  # [n] int64, generated tokens
    rows: np.ndarray  # [b] int64, which of the n samples lie on this rank, in order
    token_rewards: torch.Tensor  # [t] float32, penalties, and the outcome on the last loss token
    loss_mask: torch.Tensor  # [t] bool
    lengths: torch.Tensor  # [b] int64, tokens of each sample of this rank
    baselines: np.ndarray | None = None  # [n] float64, reward of the prompt's greedy response
    values: torch.Tensor | None = None  # [t] float32, critic before the token that j scores
    # Sums a float64 tensor over the data-parallel ranks. Collective: where an estimator whitens,
    # every rank calls it, also one without any token.
    global_sum: Callable[[torch.Tensor], torch.Tensor] = _of_this_rank_alone


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """What an estimator returns, for the samples of this data-parallel rank."""

    advantages: torch.Tensor  # [t] float32, 0 where masked
    returns: torch.Tensor | None = None  # [t] float32, what a critic learns; 0 where masked


def advantages_of_valid(
    estimator: Callable[[AdvantageInputs, P], AdvantageOutputs],
    inputs: AdvantageInputs,
    config: P,
    valid: np.ndarray,
) -> AdvantageOutputs:
    """What `estimator` says as if samples that are not `valid` `[n]` did not exist; theirs is 0.

    No mean, deviation, baseline or whitening has a sample whose reward failed, whatever the
    estimator. Their tokens must not be in `inputs.loss_mask`. Collective as the estimator is.
    """
    if valid.all():
        return estimator(inputs, config)
    number_among_valid = np.cumsum(valid) - 1
    here = valid[inputs.rows]
    samples = torch.from_numpy(here).to(inputs.lengths.device)
    tokens = samples.repeat_interleave(inputs.lengths)
    assert not inputs.loss_mask[~tokens].any(), "a sample without a reward is learnt from"
    found = estimator(
        dataclasses.replace(
            inputs,
            scores=inputs.scores[valid],
            group_ids=inputs.group_ids[valid],
            response_lengths=inputs.response_lengths[valid],
            rows=number_among_valid[inputs.rows[here]],
            token_rewards=inputs.token_rewards[tokens],
            loss_mask=inputs.loss_mask[tokens],
            lengths=inputs.lengths[samples],
            baselines=None if inputs.baselines is None else inputs.baselines[valid],
            values=None if inputs.values is None else inputs.values[tokens],
        ),
        config,
    )

    def in_place(values: torch.Tensor) -> torch.Tensor:
        everywhere = values.new_zeros(tokens.shape)
        everywhere[tokens] = values
        return everywhere

    return AdvantageOutputs(
        in_place(found.advantages), None if found.returns is None else in_place(found.returns)
    )
