"""KL to the reference policy: estimators, and control of its coefficient in the reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from mcore_rl.algorithms.aggregation import masked
from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters, param

KLEstimator = Literal["k1", "k2", "k3"]

# exp(20) = 4.9e8 is far above any ratio of a healthy step, and far enough below the largest float32
# (exp(88.7)) that products with advantages and sums over a mini-batch stay finite.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class KLParameters(Parameters):
    """User's settings of the KL to the reference policy; None takes the recipe's value."""

    kl_coef: float | None = param(
        None,
        "weight of the KL to the reference policy in the loss",
        least=0,
        advice="choose 0 to leave the term out",
    )
    kl_in_reward: bool | None = param(None, "subtract the KL from the reward of each token")
    kl_reward_coef: float | None = param(
        None, "weight of the KL in the reward", least=0, advice="choose 0 to leave the KL out"
    )
    kl_target: float | None = param(
        None,
        "KL in nats per token that the weight in the reward is adapted to (arXiv 1909.08593)",
        above=0,
        advice="choose for example 0.01",
    )
    kl_horizon: float = param(
        10_000.0,
        "samples over which the weight is adapted",
        above=0,
        advice="choose for example 10000",
    )
    kl_estimator: KLEstimator | None = param(None, "estimator of the KL")
    kl_clamp: float | None = param(
        None,
        "largest KL of a token that estimator k3 gives, in nats",
        above=0,
        advice="a token above it has no gradient, so choose for example 10",
    )


def kl_estimate(
    log_probs: torch.Tensor,
    other_log_probs: torch.Tensor,
    estimator: KLEstimator,
    clamp: float | None = None,
) -> torch.Tensor:
    """Estimate KL(p || q) per token, from tokens sampled from p.

    `log_probs` is log p and `other_log_probs` log q of the sampled tokens, with any equal shapes;
    the result has the same shape. r is log q - log p (Schulman, "Approximating KL Divergence",
    joschu.net/blog/kl-approx.html). Gradients are with respect to log p, for a loss as in GRPO:

        k1  -r              unbiased, may be negative     gradient 1: as a loss its expectation is
                                                          zero, so it only adds noise
        k2  r^2 / 2         biased, low variance          gradient -r: in expectation the gradient
                                                          of KL(p || q)
        k3  exp(r) - 1 - r  unbiased, never negative      gradient 1 - exp(r): in expectation that
                                                          of KL(q || p), equal to first order in r

    The metric `kl/rollout_actor` is the token mean of k3, with p the engine, which sampled, and q
    the actor: `kl_estimate(rollout_log_probs, log_probs, "k3")` estimates KL(rollout || actor).

    k3 clamps r to at most MAX_LOG_RATIO, without gradient, and its value to at most `clamp`, as
    verl's code does with 10.
    """
    log_ratio = other_log_probs - log_probs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
        # expm1, as r is about 1e-3 for equal policies: exp(r) - 1 would lose half its digits.
        return (torch.expm1(bounded) - bounded).clamp(max=math.inf if clamp is None else clamp)
    raise AssertionError(f"unknown KL estimator {estimator!r}")


@torch.no_grad()
def kl_of_loss_tokens(
    old_log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    loss_mask: torch.Tensor,
    estimator: KLEstimator = "k1",
    clamp: float | None = None,
) -> torch.Tensor:
    """Return `[t]` float32: KL(old || ref) at every loss token, 0 where masked.

    The penalty in the reward is minus this, times a coefficient. A reward is not differentiated, so
    the unbiased k1 is effective here (Ziegler et al., arXiv 1909.08593, eq. 2). Masked positions
    may hold anything.
    """
    old, ref = masked(loss_mask, old_log_probs), masked(loss_mask, ref_log_probs)
    return masked(loss_mask, kl_estimate(old, ref, estimator, clamp)).float()


_MAX_ERROR = 0.2


@dataclass(slots=True)
class KLController:
    """Controller of the coefficient of the KL in the reward.

    Without a target the coefficient is constant and has no state: after a resume it is the flag's,
    too. With a target it keeps the KL near it (arXiv 1909.08593, section 2.2):

        coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * min(num_samples / horizon, 1)

    The paper has a constant 0.1 in place of num_samples / horizon; its code has the latter, which
    makes the speed independent of the number of samples per step. Without the bound of 1, a step of
    more than five horizons could make the coefficient negative. A non-finite KL has no effect.
    `target` is per token, like the KL; the paper's is per response. A `coef` of 0 with a target
    raises UsageError.
    """

    coef: float  # of the next step
    target: float | None = None  # nats per token
    horizon: float = 10_000.0  # samples after which a constant error has its full effect

    def __post_init__(self) -> None:
        if self.target is not None and self.coef == 0.0:
            raise UsageError(
                "cannot be adapted, because every multiple of it is 0",
                flag=f"--rl-kl-reward-coef {self.coef}",
                remedy="start above 0, or drop --rl-kl-target",
            )

    def update(self, kl: float, num_samples: int) -> None:
        """Update after a step with its KL per token (mean over all loss tokens) and its samples."""
        if self.target is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1.0, -_MAX_ERROR), _MAX_ERROR)
        self.coef *= 1.0 + error * min(num_samples / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        return {} if self.target is None else {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the coefficient, if it is adapted now and was adapted then."""
        if self.target is not None:
            self.coef = float(state.get("coef", self.coef))
