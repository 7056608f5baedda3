"""What estimators and policy losses are given, and what they give back.

Shape legend: n samples of the step, b samples of this rank, t tokens of this rank's rows.
This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


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
    anything, nan and inf included. Tokens outside the loss mask are skipped: the next token
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


@dataclass(frozen=True, slots=True)
class PolicyLossInputs:
    """Clean inputs: every `[t]` tensor is 0 where masked, so a loss may compute without a mask.

    Gradients flow through `log_probs` alone.
    """

    log_probs: torch.Tensor  # [t] float32, nats, of the policy as it is now
    old_log_probs: torch.Tensor  # [t] float32, nats, before this step's first update
    advantages: torch.Tensor  # [t] float32
    loss_mask: torch.Tensor  # [t] bool
    lengths: torch.Tensor  # [b] int64


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Masked positions may hold anything finite."""

    loss: torch.Tensor  # [t] float32, differentiable
    clipped_lower: torch.Tensor  # [t] bool, held back because they became unlikely enough
    clipped_upper: torch.Tensor  # [t] bool, held back because they became likely enough
