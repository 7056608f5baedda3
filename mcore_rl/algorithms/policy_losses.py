"""Policy losses with a ratio per token or per response (gspo, gmpo).

All losses are per token and unreduced; `total_loss` weights and sums them. r is the ratio
exp(log_probs - old_log_probs), A the advantage.

The papers of gspo and gmpo average over responses, J = mean over i of J_i: seq_mean_token_mean. As
losses per token, with J_i at each token, they are correct under every aggregation: the other modes
only weight responses by their length (token_mean), or by length / constant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mcore_rl.algorithms.aggregation import Aggregation, Segments
from mcore_rl.algorithms.interfaces import PolicyLossInputs, TokenLosses
from mcore_rl.algorithms.kl import MAX_LOG_RATIO, KLEstimator
from mcore_rl.algorithms.registry import policy_loss
from mcore_rl.common.parameters import Parameters, param


@dataclass(frozen=True, slots=True)
class Clip(Parameters):
    """Clip range of ratios; each loss has its own defaults."""

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
    """`Clip` with an additional bound for negative advantages."""

    dual_clip: float | None = param(
        None,
        "upper bound of ratios for negative advantages",
        above=1,
        advice="it bounds the probability ratios of tokens of negative advantage, so choose for "
        "example 3",
    )


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """Terms of the policy's loss: the surrogate, KL and entropy."""

    policy_loss: str = "ppo_clip"  # a name in the registry
    parameters: Parameters = field(default_factory=DualClip)  # of that policy loss
    aggregation: Aggregation = field(default_factory=Aggregation)
    kl_coef: float = 0.0  # weight of the KL to the reference policy in the loss
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    kl_clamp: float | None = None  # largest KL of a token, for k3
    off_policy_threshold: float | None = None  # see `total_loss.is_off_policy`


def bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio); log-ratios are clamped to at most MAX_LOG_RATIO, without gradient.

    In a loss that clips, this only affects tokens with a negative advantage (others are clipped
    long before). It bounds the effect of one token that has become 5e8 times as likely.
    """
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


_STEEPNESS = "it is the steepness of a gate, so choose for example 1"


def clipped_objective(ratio: torch.Tensor, advantages: torch.Tensor, config: Clip) -> TokenLosses:
    """Return -min(ratio A, clip(ratio, 1 - clip_eps_lower, 1 + clip_eps_upper) A), dual-clipped.

    The gradient is zero for a ratio that has passed its bound in the direction of its advantage.
    """
    low, high = 1.0 - config.clip_eps_lower, 1.0 + config.clip_eps_upper
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped_upper = (advantages > 0) & (ratio > high)
    if isinstance(config, DualClip) and config.dual_clip is not None:
        bad = advantages < 0
        floor = config.dual_clip * advantages
        objective = torch.where(bad, torch.maximum(objective, floor), objective)
        # A bound below 1 + clip_eps_upper is valid: bad tokens have no other upper bound.
        clipped_upper = clipped_upper | (bad & (ratio > config.dual_clip))
    return TokenLosses(-objective, (advantages < 0) & (ratio < low), clipped_upper)


@policy_loss("ppo_clip", DualClip())
def ppo_clip(inputs: PolicyLossInputs, config: DualClip) -> TokenLosses:
    """Return PPO's pessimistic loss (arXiv 1707.06347, eq. 7), also GRPO's (2402.03300, eq. 3).

    A `clip_eps_upper` above the lower one is DAPO's clip-higher (arXiv 2503.14476, eq. 10). With
    `dual_clip` c a token with a negative advantage counts at most c A (arXiv 1912.09729, eq. 5):
    its gradient is zero if the ratio exceeds c, which `clipped_upper` counts, too. Papers combine
    this loss with token_mean (DAPO), seq_mean_token_mean (GRPO) and constant (Dr. GRPO).
    """
    return ppo_clip_objective(inputs, config)


def ppo_clip_objective(inputs: PolicyLossInputs, config: Clip) -> TokenLosses:
    """Return `clipped_objective` of the ratio of each token."""
    ratio = bounded_ratio(inputs.log_probs - inputs.old_log_probs)
    return clipped_objective(ratio, inputs.advantages, config)


# The paper does not state its upper bound; 5 is from ScaleRL, arXiv 2510.13786.
@policy_loss("cispo", Clip(clip_eps_lower=1.0, clip_eps_upper=4.0))
def cispo(inputs: PolicyLossInputs, config: Clip) -> TokenLosses:
    """Return CISPO's loss: -stop_gradient(clip(r)) A log_prob (arXiv 2506.13585, eq. 4 and 5).

    It clips the weight instead of the update, so every token keeps its gradient. Tokens count as
    clipped if the bound lowered or raised their weight. The paper has no lower bound
    (`clip_eps_lower` 1), and divides by all tokens (token_mean).
    """
    low, high = 1.0 - config.clip_eps_lower, 1.0 + config.clip_eps_upper
    ratio = bounded_ratio(inputs.log_probs - inputs.old_log_probs).detach()
    loss = -ratio.clamp(low, high) * inputs.advantages * inputs.log_probs
    return TokenLosses(loss, ratio < low, ratio > high)


@dataclass(frozen=True, slots=True)
class Gate(Parameters):
    """Steepness of SAPO's gate."""

    sapo_temperature_positive: float = param(
        1.0, "steepness of SAPO's gate for positive advantages", above=0, advice=_STEEPNESS
    )
    sapo_temperature_negative: float = param(
        1.05, "steepness of SAPO's gate for negative advantages", above=0, advice=_STEEPNESS
    )


@policy_loss("sapo", Gate())
def sapo(inputs: PolicyLossInputs, config: Gate) -> TokenLosses:
    """Return the loss of soft adaptive policy optimisation (arXiv 2511.20347): -gate(r) A.

        gate(r) = 4 / tau * sigmoid(tau (r - 1))

    The gate's slope is 1 at r = 1 and falls smoothly on either side, faster with a larger
    temperature tau. Tokens with a positive advantage have a separate tau. No token is clipped. The
    paper uses seq_mean_token_mean.
    """
    ratio = bounded_ratio(inputs.log_probs - inputs.old_log_probs)
    tau = torch.full_like(ratio, config.sapo_temperature_negative).masked_fill(
        inputs.advantages > 0, config.sapo_temperature_positive
    )
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    none = torch.zeros_like(inputs.loss_mask)
    return TokenLosses(-gate * inputs.advantages, none, none)


@policy_loss("policy_gradient")
def policy_gradient(inputs: PolicyLossInputs, config: Parameters) -> TokenLosses:
    """Return REINFORCE's loss: -A log_prob.

    It is correct for one update per step. In later mini-batches the policy differs from the one
    that sampled the tokens, and this loss neither corrects nor bounds the difference.
    """
    none = torch.zeros_like(inputs.loss_mask)
    return TokenLosses(-inputs.advantages * inputs.log_probs, none, none)


@policy_loss("gspo", DualClip(clip_eps_lower=3e-4, clip_eps_upper=4e-4))
def gspo(inputs: PolicyLossInputs, config: DualClip) -> TokenLosses:
    """Return GSPO's loss (arXiv 2507.18071, eq. 5 and 7): PPO's with one ratio per response.

        s = exp(mean over the response of log_prob - old_log_prob)

    In the form of GSPO-token (eq. 13 and 14), each token has the value s and the gradient of its
    own log-prob, s_j = stop_gradient(s) * p_j / stop_gradient(p_j). With one advantage per response
    the mean over its tokens has the value and gradient of -min(s A, clip(s) A); with one per token
    it is the paper's token variant. Clip ranges are far smaller than PPO's (3e-4 and 4e-4 in the
    paper), since s is a mean. All tokens of a response are clipped together.
    """
    segments = Segments.of(inputs.lengths, inputs.loss_mask)
    mean = segments.mean((inputs.log_probs - inputs.old_log_probs).detach())
    own_gradient = inputs.log_probs - inputs.log_probs.detach()
    ratio = bounded_ratio(segments.to_tokens(mean) + own_gradient)
    return clipped_objective(ratio, inputs.advantages, config)


@policy_loss("gmpo", Clip(clip_eps_lower=0.4, clip_eps_upper=0.4))
def gmpo(inputs: PolicyLossInputs, config: Clip) -> TokenLosses:
    """Return GMPO's loss (arXiv 2507.20673): the geometric mean of token-clipped ratios.

        -A exp(mean over the response of l)
        l = min(log_ratio, clip_eps_upper) for A > 0, max(log_ratio, -clip_eps_lower) for A < 0

    The bounds apply to the log-ratio, as the paper's exp(-0.4) and exp(0.4). A clipped token has no
    gradient, but its ratio counts in the mean. With one advantage per token, which the paper does
    not cover, the mean ratio multiplies each advantage.
    """
    segments = Segments.of(inputs.lengths, inputs.loss_mask)
    log_ratio = inputs.log_probs - inputs.old_log_probs
    good, bad = inputs.advantages > 0, inputs.advantages < 0
    bounded = torch.where(
        bad,
        log_ratio.clamp(-config.clip_eps_lower, MAX_LOG_RATIO),
        log_ratio.clamp(max=config.clip_eps_upper),
    )
    ratio = segments.to_tokens(segments.mean(bounded).exp())
    return TokenLosses(
        -inputs.advantages * ratio,
        bad & (log_ratio < -config.clip_eps_lower),
        good & (log_ratio > config.clip_eps_upper),
    )
