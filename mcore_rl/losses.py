"""The policy loss per token, and the one place where it is normalised.

Shape legend: b samples, s positions. All `[b, s]` tensors are in scoring alignment: position t
speaks of token t+1 (see `mcore_rl.types`). Log-probs are float32 and in nats.

    loss = sum over tokens of [ surrogate + kl_coef * kl - entropy_coef * entropy ] / denominator

The denominator is the number of loss tokens of the *global* mini-batch, over all micro-batches and
data-parallel ranks. It is passed in and nothing else is averaged, so the losses (and gradients) of
any split into micro-batches and ranks add up to those of the whole.

This module is pure torch: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch

from mcore_rl.errors import UsageError

KLEstimator = Literal["k1", "k2", "k3"]

# exp(20) = 4.9e8: far beyond any ratio that a healthy step meets, and far enough below the largest
# float32 (exp(88.7)) for products with advantages and sums over a mini-batch to stay finite.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """What the policy loss is made of. UsageError on a value out of range."""

    clip_eps_lower: float = 0.2  # --rl-clip-eps-lower: ratios count down to 1 - this
    clip_eps_upper: float = 0.2  # --rl-clip-eps-upper: and up to 1 + this; larger is "clip-higher"
    kl_coef: float = 0.0  # --rl-kl-coef: weight of the KL to the reference policy
    kl_estimator: KLEstimator = "k3"  # --rl-kl-estimator: see `kl_estimate`
    entropy_coef: float = 0.0  # --rl-entropy-coef: weight of the entropy bonus

    def __post_init__(self) -> None:
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
        for flag, value in (
            ("--rl-kl-coef", self.kl_coef),
            ("--rl-entropy-coef", self.entropy_coef),
        ):
            if not 0.0 <= value < math.inf:
                raise UsageError(
                    f"{flag} {value} is not a number of 0 or more: choose 0 to leave the term out."
                )
        if self.kl_estimator not in get_args(KLEstimator):
            raise UsageError(
                f"--rl-kl-estimator {self.kl_estimator} is unknown: choose one of "
                f"{', '.join(get_args(KLEstimator))}."
            )


@dataclass(frozen=True, slots=True)
class PolicyLossSums:
    """Sums over loss tokens, each a detached 0-dim tensor of the loss's dtype.

    Add them up over micro-batches, then over data-parallel ranks (`stacked` makes that one
    collective), and divide by `num_tokens` once.
    """

    num_tokens: torch.Tensor
    policy_loss: torch.Tensor  # the surrogate alone, without KL and entropy terms
    kl: torch.Tensor  # to the reference policy, by the configured estimator; 0 without a reference
    entropy: torch.Tensor
    ratio: torch.Tensor  # exp(log_probs - old_log_probs)
    clipped_lower: torch.Tensor  # tokens without gradient because they became unlikely enough
    clipped_upper: torch.Tensor  # tokens without gradient because they became likely enough

    def stacked(self) -> torch.Tensor:
        """`[7]`, in the order of the fields; `from_stacked` is the inverse."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])

    @classmethod
    def from_stacked(cls, stacked: torch.Tensor) -> PolicyLossSums:
        return cls(*stacked.unbind())

    def __add__(self, other: PolicyLossSums) -> PolicyLossSums:
        return self.from_stacked(self.stacked() + other.stacked())


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    loss: torch.Tensor  # 0-dim, differentiable: this call's share of the global token mean
    sums: PolicyLossSums


def policy_loss(
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    *,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    ref_log_probs: torch.Tensor | None = None,
    denominator: float | torch.Tensor,
    config: PolicyLossConfig,
) -> PolicyLossOutput:
    """The GRPO loss of some samples: arXiv 2402.03300, eq. 3, with every token weighing the same.

    (The paper averages over a response first, which makes tokens of long responses weigh less; the
    mean over all tokens is that of DAPO, arXiv 2503.14476, eq. 8.)

    log_probs, entropy: `[b, s]` float32, of the policy as it is now; gradients flow through these.
    old_log_probs: `[b, s]` float32, of the policy before this batch's first update.
    advantages: `[b]` float32, one for all tokens of a sample.
    loss_mask: `[b, s]` bool. Masked positions may hold anything, nan and inf included: they add
        nothing to loss, gradient or sums.
    ref_log_probs: `[b, s]` float32, of the reference policy; required if `config.kl_coef` > 0.
        Without a coefficient it is only measured.
    denominator: loss tokens of the global mini-batch, > 0 (see the module's docstring).

    Log-ratios above MAX_LOG_RATIO count as that and give no gradient. This only ever touches tokens
    of negative advantage (those of positive advantage are clipped long before), where it bounds
    what one token, 5e8 times as likely as when it was sampled, can do to an update.

    RuntimeError: `kl_coef` > 0 without `ref_log_probs`, or a denominator that is not positive.
    """
    if ref_log_probs is None and config.kl_coef > 0:
        raise RuntimeError(f"kl_coef is {config.kl_coef} but there are no ref_log_probs")
    if not isinstance(denominator, torch.Tensor) and not denominator > 0:
        raise RuntimeError(f"the loss denominator is {denominator}, expected a positive count")
    assert advantages.shape == loss_mask.shape[:1], (
        f"advantages {tuple(advantages.shape)} do not fit loss_mask {tuple(loss_mask.shape)}"
    )
    # Garbage is replaced before any arithmetic, and not only after: the gradient of
    # where(mask, f(x), 0) at a nan x is 0 * nan.
    log_probs, entropy, old_log_probs = (
        _masked(loss_mask, values) for values in (log_probs, entropy, old_log_probs)
    )
    log_ratio = log_probs - old_log_probs
    advantages = advantages[:, None]
    surrogate = clipped_surrogate(log_ratio, advantages, config)
    per_token = surrogate
    kl = torch.zeros_like(log_ratio)
    if ref_log_probs is not None:
        ref_log_probs = _masked(loss_mask, ref_log_probs)
        kl = kl_estimate(log_probs, ref_log_probs, config.kl_estimator)
    # A term without a coefficient is left out and not multiplied by 0, so that its gradient, which
    # costs another pass over the vocabulary for the entropy, is not computed at all.
    if config.kl_coef > 0:
        per_token = per_token + config.kl_coef * kl
    if config.entropy_coef > 0:
        per_token = per_token - config.entropy_coef * entropy
    return PolicyLossOutput(
        loss=_masked(loss_mask, per_token).sum() / denominator,
        sums=_sums(loss_mask, surrogate, kl, entropy, log_ratio, advantages, config),
    )


def clipped_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, config: PolicyLossConfig
) -> torch.Tensor:
    """PPO's pessimistic objective as a loss per token (arXiv 1707.06347, eq. 7), unreduced.

        -min(ratio * A, clip(ratio, 1 - clip_eps_lower, 1 + clip_eps_upper) * A)

    log_ratio: `[b, s]`, log(policy / old policy); advantages: anything that broadcasts to it. The
    gradient is zero where a token has moved past its bound in the direction of its advantage.
    """
    ratio = _ratio(log_ratio)
    clipped_ratio = ratio.clamp(1.0 - config.clip_eps_lower, 1.0 + config.clip_eps_upper)
    return -torch.minimum(ratio * advantages, clipped_ratio * advantages)


def kl_estimate(
    log_probs: torch.Tensor, other_log_probs: torch.Tensor, estimator: KLEstimator
) -> torch.Tensor:
    """Estimates KL(p || q) token by token, from tokens that were sampled from p.

    `log_probs` is log p and `other_log_probs` log q of the sampled tokens, any equal shapes; the
    result has that shape. With r = log q - log p (Schulman, "Approximating KL Divergence",
    joschu.net/blog/kl-approx.html), and with the gradient that flows into log p when the estimate
    is used as a loss, as GRPO does:

        k1  -r              unbiased, may be negative     gradient 1: as a loss its expectation is
                                                          zero, so it adds noise and no pull
        k2  r^2 / 2         biased, low variance          gradient -r: in expectation that of
                                                          KL(p || q)
        k3  exp(r) - 1 - r  unbiased, never negative      gradient 1 - exp(r): in expectation that
                                                          of KL(q || p), equal to first order in r

    As a metric, `kl/rollout_actor` is the token mean of k3 with p the engine (it drew the tokens)
    and q the actor: `kl_estimate(rollout_log_probs, log_probs, "k3")` estimates
    KL(rollout || actor).

    k3 takes r above MAX_LOG_RATIO as that, without gradient.
    """
    log_ratio = other_log_probs - log_probs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
        # expm1: between equal policies r is about 1e-3, and exp(r) - 1 would lose half its digits.
        return torch.expm1(bounded) - bounded
    raise AssertionError(f"unknown KL estimator {estimator!r}")


@torch.no_grad()
def _sums(
    loss_mask: torch.Tensor,
    surrogate: torch.Tensor,
    kl: torch.Tensor,
    entropy: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    config: PolicyLossConfig,
) -> PolicyLossSums:
    ratio = _ratio(log_ratio)
    pushed_up, pushed_down = advantages > 0, advantages < 0
    below, above = ratio < 1.0 - config.clip_eps_lower, ratio > 1.0 + config.clip_eps_upper

    def total(values: torch.Tensor) -> torch.Tensor:
        return _masked(loss_mask, values.to(surrogate.dtype)).sum()

    return PolicyLossSums(
        num_tokens=total(loss_mask),
        policy_loss=total(surrogate),
        kl=total(kl),
        entropy=total(entropy),
        ratio=total(ratio),
        clipped_lower=total(below & pushed_down),
        clipped_upper=total(above & pushed_up),
    )


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _masked(loss_mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(loss_mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
