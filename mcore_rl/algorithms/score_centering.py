"""Score centering (Marek and Ryabinin, arXiv 2609.20807): REINFORCE for tokens of another policy.

With q the engine's distribution of a token y, p the trainer's, w a weight of the ratio p / q (see
`mismatch.ratio_weights`) and sg the identity without gradient, the loss of the token is

    -A [ sg(w(p_y / q_y)) log p_y - sum over v of sg(q_v w(p_v / q_v)) log p_v ]

The expectation of the bracket's gradient over y ~ q is 0 for all p and q. That of REINFORCE's own
gradient, without the sum, is 0 only for p = q.

With H the engine's k most probable tokens, with their probabilities over the whole vocabulary, the
rest of q is taken to be p times a constant rho (eq. 7 to 12):

    rho = (1 - sum over H of q) / (1 - sum over H of p), alpha = rho w(1 / rho)
    sum over v = sum over v in H of sg(q_v w(p_v / q_v) - alpha p_v) log p_v

since the sum of p_v grad log p_v over the vocabulary is 0. It is exact if H is the vocabulary.
Shape legend: t tokens, k tokens of H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.algorithms.aggregation import TokenSums, masked
from mcore_rl.algorithms.mismatch import MismatchConfig, ratio_weights
from mcore_rl.algorithms.policy_losses import bounded_ratio

# Least probability outside H: below, 1 minus a float32 sum is only rounding.
_LEAST_REST = 1e-6


@dataclass(frozen=True, slots=True)
class CenteringSums(TokenSums):
    """Sums over loss tokens, 0-dim float64."""

    engine_mass: torch.Tensor  # probability of H for the engine
    actor_mass: torch.Tensor  # for the trainer
    coefficients: torch.Tensor  # sum over H of |coefficient|

    def metrics(self, num_tokens: float) -> dict[str, float]:
        """Return the means over `num_tokens` loss tokens."""
        return {
            "centering/engine_mass": float(self.engine_mass) / num_tokens,
            "centering/actor_mass": float(self.actor_mass) / num_tokens,
            "centering/coefficients_l1": float(self.coefficients) / num_tokens,
        }


def expected_scores(
    log_probs: torch.Tensor, engine_log_probs: torch.Tensor, config: MismatchConfig
) -> torch.Tensor:
    """Return `[t, 4]` float32: the sum over v of the module's docstring, then the columns of
    `CenteringSums`, of each token.

    The value of the sum has no meaning; its gradient is the expected score. For equal log-probs
    both are exactly 0. Gradients flow through `log_probs` alone, from the first column alone.

    log_probs: `[t, k]` float32, the trainer's, of the tokens of H.
    engine_log_probs: `[t, k]` float32, the engine's, of the same tokens; anything finite where the
        result is not used.
    config: a correction of `mismatch.TOKEN_CORRECTIONS`, without a veto.
    """
    with torch.no_grad():
        # Alike in memory, or exp would take other kernels, which round differently.
        mine, theirs = log_probs.contiguous(), engine_log_probs.contiguous()
        p, q = mine.exp(), theirs.exp()
        actor_mass, engine_mass = p.sum(dim=1), q.sum(dim=1)
        rest, engine_rest = ((1 - m).clamp(min=_LEAST_REST) for m in (actor_mass, engine_mass))
        alpha = engine_rest / rest * ratio_weights(rest / engine_rest, config)
        weights = ratio_weights(bounded_ratio(mine - theirs), config)
        coefficients = q * weights - alpha[:, None] * p
    columns = (
        (coefficients * log_probs).sum(dim=1),
        engine_mass,
        actor_mass,
        coefficients.abs().sum(dim=1),
    )
    return torch.stack(columns, dim=1)


def centering_sums(columns: torch.Tensor, loss_mask: torch.Tensor) -> CenteringSums:
    """Return the sums of `[t, 3]`, all columns of `expected_scores` but the first, over loss
    tokens."""
    kept = masked(loss_mask[:, None], columns.detach().double())
    return CenteringSums.from_stacked(kept.sum(dim=0))
