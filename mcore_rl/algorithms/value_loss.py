"""Value loss of the critic, and the explained variance of the returns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from mcore_rl.algorithms.aggregation import (
    Aggregation,
    Denominators,
    Segments,
    TokenSums,
    masked,
    token_weights,
)


@dataclass(frozen=True, slots=True)
class ValueLossConfig:
    """Settings of the critic's loss."""

    clip_eps: float | None = 0.2  # clip range of values; None, inf: unlimited
    aggregation: Aggregation = field(default_factory=Aggregation)


@dataclass(frozen=True, slots=True)
class ValueLossSums(TokenSums):
    """Sums over loss tokens, each a detached 0-dim float64 tensor.

    float64, because `explained_variance` subtracts the square of a mean from a mean of squares. Add
    over micro-batches, then over data-parallel ranks (`stacked`: one collective).
    """

    num_tokens: torch.Tensor
    value_loss: torch.Tensor
    values: torch.Tensor
    returns: torch.Tensor
    returns_squared: torch.Tensor
    errors: torch.Tensor  # returns - values
    errors_squared: torch.Tensor
    clipped: torch.Tensor  # tokens with the loss of the clipped value: no gradient


@dataclass(frozen=True, slots=True)
class ValueLossOutput:
    loss: torch.Tensor  # 0-dim, differentiable: this call's share of the global loss
    sums: ValueLossSums


def value_loss(
    values: torch.Tensor,
    *,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    lengths: torch.Tensor,
    denominators: Denominators,
    config: ValueLossConfig,
) -> ValueLossOutput:
    """Aggregate 0.5 max((V - R)^2, (clip(V, V_old - clip_eps, V_old + clip_eps) - R)^2).

    This is the pessimistic form of PPO's published code (the paper, arXiv 1707.06347, does not clip
    values): a value that has moved by more than clip_eps towards R has no gradient.

    values, old_values, returns: `[t]` float32; gradients flow only through `values`. Masked
    positions may hold anything. Denominators and aggregation are the same as for the policy loss.
    """
    values, old_values, returns = (
        masked(loss_mask, tensor) for tensor in (values, old_values.detach(), returns.detach())
    )
    squared = (values - returns).square()
    chosen, clipped = squared, torch.zeros_like(loss_mask)
    if config.clip_eps is not None:
        held = values.clamp(old_values - config.clip_eps, old_values + config.clip_eps)
        held_squared = (held - returns).square()
        chosen, clipped = torch.maximum(squared, held_squared), held_squared > squared
    per_token = 0.5 * chosen
    weight = token_weights(
        Segments.of(lengths, loss_mask), denominators, config.aggregation, per_token.dtype
    )
    return ValueLossOutput(
        loss=(weight * masked(loss_mask, per_token)).sum(),
        sums=_sums(loss_mask, per_token, values, returns, clipped),
    )


def explained_variance(sums: ValueLossSums) -> float:
    """Return 1 - var(R - V) / var(R) over all loss tokens: 1 is perfect, 0 a constant, < 0 worse.

    The result is nan if the returns do not vary.
    """
    num_tokens = float(sums.num_tokens)
    if num_tokens == 0:
        return math.nan

    def variance(total: torch.Tensor, squares: torch.Tensor) -> float:
        return float(squares) / num_tokens - (float(total) / num_tokens) ** 2

    returns = variance(sums.returns, sums.returns_squared)
    # A variance of 0, up to float64 rounding.
    if returns <= 1e-12 * float(sums.returns_squared) / num_tokens:
        return math.nan
    return 1.0 - variance(sums.errors, sums.errors_squared) / returns


@torch.no_grad()
def _sums(
    loss_mask: torch.Tensor,
    per_token: torch.Tensor,
    values: torch.Tensor,
    returns: torch.Tensor,
    clipped: torch.Tensor,
) -> ValueLossSums:
    def total(tokens: torch.Tensor) -> torch.Tensor:
        return masked(loss_mask, tokens.double()).sum()

    errors = returns.double() - values.double()
    return ValueLossSums(
        num_tokens=total(loss_mask),
        value_loss=total(per_token),
        values=total(values),
        returns=total(returns),
        returns_squared=total(returns.double().square()),
        errors=total(errors),
        errors_squared=total(errors.square()),
        clipped=total(clipped),
    )
