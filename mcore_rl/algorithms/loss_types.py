"""What every policy loss is given and gives. Shape legend: see `mcore_rl.algorithms`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import get_args

import torch

from mcore_rl.algorithms.aggregation import Aggregation
from mcore_rl.algorithms.kl import MAX_LOG_RATIO, KLEstimator
from mcore_rl.common.errors import UsageError


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """What the policy loss is made of. UsageError on a value out of range."""

    policy_loss: str = "ppo_clip"  # --rl-policy-loss: a name in the registry
    aggregation: Aggregation = field(default_factory=Aggregation)
    clip_eps_lower: float = 0.2  # --rl-clip-eps-lower: ratios count down to 1 - this
    clip_eps_upper: float = 0.2  # --rl-clip-eps-upper: and up to 1 + this; larger is "clip-higher"
    dual_clip: float | None = None  # --rl-dual-clip: bound of ratios of bad tokens, above 1
    sapo_temperature_positive: float = 1.0  # --rl-sapo-temperature-positive
    sapo_temperature_negative: float = 1.05  # --rl-sapo-temperature-negative
    kl_coef: float = 0.0  # --rl-kl-coef: weight of the KL to the reference policy
    kl_estimator: KLEstimator = "k3"  # --rl-kl-estimator: see `kl_estimate`
    entropy_coef: float = 0.0  # --rl-entropy-coef: weight of the entropy bonus

    def __post_init__(self) -> None:
        self._check_clipping()
        for flag, value in (
            ("--rl-kl-coef", self.kl_coef),
            ("--rl-entropy-coef", self.entropy_coef),
        ):
            if not 0.0 <= value < math.inf:
                raise UsageError(
                    f"{flag} {value} is not a number of 0 or more: choose 0 to leave the term out."
                )
        for flag, value in (
            ("--rl-sapo-temperature-positive", self.sapo_temperature_positive),
            ("--rl-sapo-temperature-negative", self.sapo_temperature_negative),
        ):
            if not 0.0 < value < math.inf:
                raise UsageError(
                    f"{flag} {value} is not a positive number: it is the steepness of a gate, so "
                    "choose for example 1."
                )
        if self.kl_estimator not in get_args(KLEstimator):
            raise UsageError(
                f"--rl-kl-estimator {self.kl_estimator} is unknown: choose one of "
                f"{', '.join(get_args(KLEstimator))}."
            )

    def _check_clipping(self) -> None:
        if not 0.0 < self.clip_eps_lower <= 1.0:
            raise UsageError(
                f"--rl-clip-eps-lower {self.clip_eps_lower} is not in (0, 1]: ratios are clipped "
                "below at 1 minus it, so choose for example 0.2."
            )
        if not 0.0 < self.clip_eps_upper < math.inf:
            raise UsageError(
                f"--rl-clip-eps-upper {self.clip_eps_upper} is not a positive number: ratios are "
                "clipped above at 1 plus it, so choose for example 0.2, or 0.28 for clip-higher."
            )
        if self.dual_clip is not None and not 1.0 < self.dual_clip < math.inf:
            raise UsageError(
                f"--rl-dual-clip {self.dual_clip} is not a number above 1: it bounds the "
                "probability ratios of tokens of negative advantage, so choose for example 3."
            )


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
