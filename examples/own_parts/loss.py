"""--rl-import examples/own_parts/loss.py --rl-policy-loss spo"""

import torch

from mcore_rl.algorithms.loss_types import (
    PolicyLossConfig,
    PolicyLossInputs,
    TokenLosses,
    bounded_ratio,
)
from mcore_rl.algorithms.registry import policy_loss


@policy_loss("spo", reads=("clip_eps_upper",))
def spo(inputs: PolicyLossInputs, config: PolicyLossConfig) -> TokenLosses:
    """-(r A - |A| (r - 1)^2 / (2 eps)): a pull back instead of a clip (arXiv 2401.16025)."""
    ratio, a = bounded_ratio(inputs.log_probs - inputs.old_log_probs), inputs.advantages
    pull = a.abs() * (ratio - 1).square() / (2 * config.clip_eps_upper)
    unclipped = torch.zeros_like(inputs.loss_mask)
    return TokenLosses(pull - ratio * a, clipped_lower=unclipped, clipped_upper=unclipped)
