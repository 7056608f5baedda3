"""What every policy loss is given and gives. Shape legend: see `mcore_rl.algorithms`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mcore_rl.algorithms.aggregation import Aggregation
from mcore_rl.algorithms.kl import MAX_LOG_RATIO, KLEstimator
from mcore_rl.common.parameters import Parameters, param


@dataclass(frozen=True, slots=True)
class Clip(Parameters):
    """The range that ratios count in; each loss says its own defaults."""

    clip_eps_lower: float = param(
        0.2,
        "lower clip range of the probability ratio",
        above=0,
        most=1,
        advice="ratios are clipped below at 1 minus it, so choose for example 0.2",
    )
    clip_eps_upper: float = param(
        0.2,
        "upper clip range; a larger one is clip-higher",
        above=0,
        advice="ratios are clipped above at 1 plus it, so choose for example 0.2, or 0.28 for "
        "clip-higher",
    )


@dataclass(frozen=True, slots=True)
class DualClip(Clip):
    """`Clip`, and a bound where it has none."""

    dual_clip: float | None = param(
        None,
        "bound on ratios where the advantage is negative",
        above=1,
        advice="it bounds the probability ratios of tokens of negative advantage, so choose for "
        "example 3",
    )


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """What the policy's loss is made of: the surrogate, and the terms that join it."""

    policy_loss: str = "ppo_clip"  # a name in the registry
    parameters: Parameters = field(default_factory=DualClip)  # its own
    aggregation: Aggregation = field(default_factory=Aggregation)
    kl_coef: float = 0.0  # of the KL to the reference policy, in the loss
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0


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


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), with log-ratios above MAX_LOG_RATIO taken as that, without gradient.

    Where a loss clips, this only ever touches tokens of negative advantage (those of positive
    advantage are clipped long before). There it bounds what one token, 5e8 times as likely as when
    it was sampled, can do to an update.
    """
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()
