"""Policy losses whose ratio is a token's own: ppo_clip, cispo, sapo, policy_gradient.

All are losses per token, unreduced; `total_loss` weighs and adds them up. r is the ratio
exp(log_probs - old_log_probs), A the advantage. Those whose ratio is a whole response's are in
`sequence_losses`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.algorithms.loss_types import (
    Clip,
    DualClip,
    PolicyLossInputs,
    TokenLosses,
    bounded_ratio,
)
from mcore_rl.algorithms.registry import policy_loss
from mcore_rl.common.parameters import Parameters, param

_STEEPNESS = "it is the steepness of a gate, so choose for example 1"


def clipped_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, config: DualClip
) -> TokenLosses:
    """-min(ratio A, clip(ratio, 1 - clip_eps_lower, 1 + clip_eps_upper) A), with dual clipping.

    The gradient is zero where a ratio has moved past its bound in the direction of its advantage.
    """
    low, high = 1.0 - config.clip_eps_lower, 1.0 + config.clip_eps_upper
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped_upper = (advantages > 0) & (ratio > high)
    if config.dual_clip is not None:
        bad = advantages < 0
        floor = config.dual_clip * advantages
        objective = torch.where(bad, torch.maximum(objective, floor), objective)
        # A bound below 1 + clip_eps_upper is fine: bad tokens have no other one above.
        clipped_upper = clipped_upper | (bad & (ratio > config.dual_clip))
    return TokenLosses(-objective, (advantages < 0) & (ratio < low), clipped_upper)


@policy_loss("ppo_clip", DualClip())
def ppo_clip(inputs: PolicyLossInputs, config: DualClip) -> TokenLosses:
    """PPO's pessimistic objective (arXiv 1707.06347, eq. 7), as in GRPO (arXiv 2402.03300, eq. 3).

    A `clip_eps_upper` above the lower one is DAPO's clip-higher (arXiv 2503.14476, eq. 10). With
    `dual_clip` c a token of negative advantage counts at most c A (arXiv 1912.09729, eq. 5): its
    gradient ends where the ratio exceeds c, which `clipped_upper` counts too. Papers combine this
    loss with token_mean (DAPO), seq_mean_token_mean (GRPO) and constant (Dr. GRPO).
    """
    ratio = bounded_ratio(inputs.log_probs - inputs.old_log_probs)
    return clipped_objective(ratio, inputs.advantages, config)


# The paper does not say its upper bound: 5 is that of ScaleRL, arXiv 2510.13786.
@policy_loss("cispo", Clip(clip_eps_lower=1.0, clip_eps_upper=4.0))
def cispo(inputs: PolicyLossInputs, config: Clip) -> TokenLosses:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): -stop_gradient(clip(r)) A log_prob.

    The weight is clipped and not the update, so every token keeps its gradient; those counted as
    clipped are the ones whose weight the bound lowered or raised. The paper leaves out the lower
    bound, which `clip_eps_lower` 1 does, and divides by all tokens: token_mean.
    """
    low, high = 1.0 - config.clip_eps_lower, 1.0 + config.clip_eps_upper
    ratio = bounded_ratio(inputs.log_probs - inputs.old_log_probs).detach()
    loss = -ratio.clamp(low, high) * inputs.advantages * inputs.log_probs
    return TokenLosses(loss, ratio < low, ratio > high)


@dataclass(frozen=True, slots=True)
class Gate(Parameters):
    """How steep SAPO's gate is."""

    sapo_temperature_positive: float = param(
        1.0, "of SAPO's gate, for good tokens", above=0, advice=_STEEPNESS
    )
    sapo_temperature_negative: float = param(1.05, "and for bad ones", above=0, advice=_STEEPNESS)


@policy_loss("sapo", Gate())
def sapo(inputs: PolicyLossInputs, config: Gate) -> TokenLosses:
    """Soft adaptive policy optimisation (arXiv 2511.20347): -gate(r) A.

        gate(r) = 4 / tau * sigmoid(tau (r - 1))

    The gate's slope is 1 at r = 1 and falls smoothly to either side, sooner with a larger
    temperature tau; tokens of positive advantage have their own. No token is clipped. The paper
    uses seq_mean_token_mean.
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
    """REINFORCE: -A log_prob.

    Right for one update per step. In later mini-batches the policy is no longer the one that drew
    the tokens, and nothing here corrects or bounds that.
    """
    none = torch.zeros_like(inputs.loss_mask)
    return TokenLosses(-inputs.advantages * inputs.log_probs, none, none)
