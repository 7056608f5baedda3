"""--rl-import examples/own_parts/loss.py --rl-policy-loss spo --rl-spo-width 0.2"""

from dataclasses import dataclass

import torch

from mcore_rl.api import (
    Parameters,
    PolicyLossInputs,
    TokenLosses,
    bounded_ratio,
    param,
    policy_loss,
)


@dataclass(frozen=True)
class Width(Parameters):
    spo_width: float = param(0.2, "how far ratios are pulled back", above=0)


@policy_loss("spo", Width())
def spo(inputs: PolicyLossInputs, config: Width) -> TokenLosses:
    """-(r A - |A| (r - 1)^2 / (2 eps)): a pull back instead of a clip (arXiv 2401.16025)."""
    ratio, a = bounded_ratio(inputs.log_probs - inputs.old_log_probs), inputs.advantages
    pull = a.abs() * (ratio - 1).square() / (2 * config.spo_width)
    unclipped = torch.zeros_like(inputs.loss_mask)
    return TokenLosses(pull - ratio * a, clipped_lower=unclipped, clipped_upper=unclipped)
