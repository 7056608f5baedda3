"""Inputs and outputs of estimators and policy losses.

Shape legend: n samples of the step, b samples of this rank, t tokens of this rank's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


def _sum_of_one_rank(sums: torch.Tensor) -> torch.Tensor:
    return sums


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Data on one data-parallel rank from which advantages are computed.

    The `[n]` arrays cover the complete global step and are the same on every rank. They contain
    complete groups, except for samples whose reward failed: these are omitted (see
    `advantages_of_valid`), so groups may differ in size. A prompt drawn twice in one step needs two
    group ids to form two groups.

    A penalty such as the KL is part of both `scores` (summed over the response) and `token_rewards`
    (at its token): estimators read one or the other. Masked positions of `[t]` tensors may hold
    anything, including nan and inf. Tokens outside the loss mask are skipped: the token after
    position j is its sample's next loss token.
    """

    scores: np.ndarray  # [n] float64, outcome of each sample, including penalties
    group_ids: np.ndarray  # [n], equal for samples of the same prompt
    response_lengths: np.ndarray  # [n] int64, generated tokens
    rows: np.ndarray  # [b] int64, indices of the samples on this rank, in order
    token_rewards: torch.Tensor  # [t] float32, penalties, and the outcome on the last loss token
    loss_mask: torch.Tensor  # [t] bool
    lengths: torch.Tensor  # [b] int64, tokens of each sample of this rank
    baselines: np.ndarray | None = None  # [n] float64, reward of the prompt's greedy response
    values: torch.Tensor | None = None  # [t] float32, critic before the token that j scores
    # Sums a float64 tensor over the data-parallel ranks. Collective: if an estimator whitens, every
    # rank calls it, even without tokens.
    global_sum: Callable[[torch.Tensor], torch.Tensor] = _sum_of_one_rank
    # The rewards one by one, without weights and penalties, and their weights, which differ between
    # sources of prompts. A reward that a source does not have is 0, and so is its weight.
    reward_parts: np.ndarray | None = None  # [n, r] float64
    reward_weights: np.ndarray | None = None  # [n, r] float64


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """Results of an estimator for the samples of this data-parallel rank."""

    advantages: torch.Tensor  # [t] float32, 0 where masked
    returns: torch.Tensor | None = None  # [t] float32, targets of a critic; 0 where masked


@dataclass(frozen=True, slots=True)
class PolicyLossInputs:
    """Clean inputs: every `[t]` tensor is 0 where masked, so a loss may compute without a mask.

    Gradients flow only through `log_probs`.
    """

    log_probs: torch.Tensor  # [t] float32, nats, of the current policy
    old_log_probs: torch.Tensor  # [t] float32, nats, before this step's first update
    advantages: torch.Tensor  # [t] float32
    loss_mask: torch.Tensor  # [t] bool
    lengths: torch.Tensor  # [b] int64
    selected: torch.Tensor | None = None  # [t] bool, by the loss's own `select`


@dataclass(frozen=True, slots=True)
class SelectionInputs:
    """Data on one data-parallel rank from which a policy loss selects tokens, before any update.

    Masked positions may hold anything.
    """

    old_log_probs: torch.Tensor  # [t] float32
    advantages: torch.Tensor  # [t] float32
    loss_mask: torch.Tensor  # [t] bool
    random: torch.Tensor  # [t] float32 in [0, 1), of each token, in whatever layout
    # Sums a float64 tensor over the data-parallel ranks. Collective.
    global_sum: Callable[[torch.Tensor], torch.Tensor] = _sum_of_one_rank


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Losses per token; masked positions may hold any finite value."""

    loss: torch.Tensor  # [t] float32, differentiable
    clipped_lower: torch.Tensor  # [t] bool, ratio below the lower bound
    clipped_upper: torch.Tensor  # [t] bool, ratio above the upper bound
