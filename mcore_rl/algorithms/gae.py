"""Generalised advantage estimation (Schulman et al., arXiv 1506.02438, eq. 16), with a critic.

    delta_j = r_j + gamma V_{j+1} - V_j            V beyond the last token is 0: responses end
    A_j     = sum over k >= 0 of (gamma lambda)^k delta_{j+k}
    R_j     = A_j + V_j                            what the critic learns

The paper neither whitens nor fixes a divisor; whitening is from PPO's implementations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.algorithms.advantage_types import AdvantageInputs, AdvantageOutputs, Discount
from mcore_rl.algorithms.estimators import whiten
from mcore_rl.algorithms.registry import advantage_estimator
from mcore_rl.algorithms.segments import Segments, discounted_sums_to_go
from mcore_rl.common.parameters import param


@dataclass(frozen=True, slots=True)
class GAE(Discount):
    """What generalised advantage estimation is told."""

    gae_lambda: float = param(
        0.95,
        "of GAE: 0 trusts the critic, 1 the rewards alone",
        least=0,
        most=1,
        advice="later rewards count at most fully, so choose for example 1",
    )
    whiten_advantages: bool = param(True, "to mean 0 and deviation 1 over all tokens")


@advantage_estimator("gae", GAE(), needs_critic=True)
def gae(inputs: AdvantageInputs, config: GAE) -> AdvantageOutputs:
    """Advantages and returns per token, in float64 up to the end.

    `inputs.values` at position j is the critic's value before token j+1, the one that j scores.
    `config.whiten_advantages` whitens the advantages over the global batch, never the returns.

    RuntimeError: no values.
    """
    if inputs.values is None:
        raise RuntimeError("gae needs the critic's values, but there are none")
    tokens_left = Segments.of(inputs.lengths, inputs.loss_mask).tokens_left()
    rewards = inputs.token_rewards[inputs.loss_mask].double()
    values = inputs.values[inputs.loss_mask].double()
    following = torch.where(tokens_left > 0, values.roll(-1), torch.zeros_like(values))
    deltas = rewards + config.gamma * following - values
    advantages = discounted_sums_to_go(deltas, tokens_left, config.gamma * config.gae_lambda)
    per_token = _scattered(advantages, inputs)
    return AdvantageOutputs(
        advantages=whiten(per_token, inputs) if config.whiten_advantages else per_token.float(),
        returns=_scattered(advantages + values, inputs).float(),
    )


def _scattered(loss_tokens: torch.Tensor, inputs: AdvantageInputs) -> torch.Tensor:
    tokens = torch.zeros_like(inputs.token_rewards, dtype=torch.float64)
    tokens[inputs.loss_mask] = loss_tokens
    return tokens
