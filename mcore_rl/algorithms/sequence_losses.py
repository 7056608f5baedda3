"""Policy losses whose ratio is a whole response's: gspo and gmpo.

Their papers average over responses, J = mean over i of J_i: seq_mean_token_mean. Written as a loss
per token they are right under every aggregation: with J_i at each of its tokens, the other modes
weigh whole responses by their length (token_mean), or by length / constant, and nothing else.
"""

from __future__ import annotations

import torch

from mcore_rl.algorithms.kl import MAX_LOG_RATIO
from mcore_rl.algorithms.loss_types import (
    Clip,
    DualClip,
    PolicyLossInputs,
    TokenLosses,
    bounded_ratio,
)
from mcore_rl.algorithms.policy_losses import clipped_objective
from mcore_rl.algorithms.registry import policy_loss
from mcore_rl.algorithms.segments import Segments


@policy_loss("gspo", DualClip(clip_eps_lower=3e-4, clip_eps_upper=4e-4))
def gspo(inputs: PolicyLossInputs, config: DualClip) -> TokenLosses:
    """GSPO (arXiv 2507.18071, eq. 5 and 7): PPO's objective with one ratio per response.

        s = exp(mean over the response of log_prob - old_log_prob)

    In the form of GSPO-token (eq. 13 and 14), each token has the value s and the gradient of its
    own log-prob, s_j = stop_gradient(s) * p_j / stop_gradient(p_j). With one advantage for all
    tokens of a response the mean over them has value and gradient of -min(s A, clip(s) A); with one
    per token it is the paper's token variant. Clip ranges are far smaller than PPO's (the paper's
    are 3e-4 and 4e-4), since s is a mean. Responses are clipped whole.
    """
    segments = Segments.of(inputs.lengths, inputs.loss_mask)
    mean = segments.mean((inputs.log_probs - inputs.old_log_probs).detach())
    own_gradient = inputs.log_probs - inputs.log_probs.detach()
    ratio = bounded_ratio(segments.to_tokens(mean) + own_gradient)
    return clipped_objective(ratio, inputs.advantages, config)


@policy_loss("gmpo", Clip(clip_eps_lower=0.4, clip_eps_upper=0.4))
def gmpo(inputs: PolicyLossInputs, config: Clip) -> TokenLosses:
    """GMPO (arXiv 2507.20673, eq. 4): the geometric mean of ratios that are clipped token by token.

        -A exp(mean over the response of l)
        l = min(log_ratio, clip_eps_upper) for A > 0, max(log_ratio, -clip_eps_lower) for A < 0

    The bounds are on the log-ratio, as the paper's exp(-0.4) and exp(0.4). A clipped token has no
    gradient, and its ratio still counts in the mean of the others. With one advantage per token,
    which the paper does not have, the mean ratio multiplies each.
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
