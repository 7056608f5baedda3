"""Total policy loss: weighted sum of surrogate, KL and entropy, and the sums for metrics.

    loss = sum over tokens of weight * [ correction * surrogate + A * expected score
                                         + kl_coef * kl - entropy_coef * entropy ]

`aggregation` computes the weights from denominators of the *global* mini-batch, which are passed
in. Nothing else is averaged, so the losses (and gradients) of any split into micro-batches and
ranks sum to the mini-batch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.algorithms.aggregation import Denominators, Segments, TokenSums, masked, token_weights
from mcore_rl.algorithms.interfaces import PolicyLossInputs, TokenLosses
from mcore_rl.algorithms.kl import kl_estimate
from mcore_rl.algorithms.policy_losses import PolicyLossConfig, bounded_ratio
from mcore_rl.algorithms.registry import find_policy_loss


@dataclass(frozen=True, slots=True)
class PolicyLossSums(TokenSums):
    """Sums over loss tokens, each a detached 0-dim tensor of the loss's dtype.

    Add over micro-batches, then over data-parallel ranks (`stacked`: one collective), and divide by
    `num_tokens` once. They are token sums for every aggregation, but `aggregated`.
    """

    num_tokens: torch.Tensor
    # The corrected surrogate with the expected score, without KL and entropy terms.
    policy_loss: torch.Tensor
    kl: torch.Tensor  # to the reference policy, by the configured estimator; 0 without a reference
    entropy: torch.Tensor
    ratio: torch.Tensor  # exp(log_probs - old_log_probs)
    clipped_lower: torch.Tensor  # see TokenLosses
    clipped_upper: torch.Tensor
    off_policy: torch.Tensor  # tokens that `is_off_policy` drops
    aggregated: torch.Tensor  # share of the mini-batch's loss, without KL and entropy terms


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    loss: torch.Tensor  # 0-dim, differentiable: this call's share of the global loss
    sums: PolicyLossSums


def policy_loss_total(
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    *,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    lengths: torch.Tensor,
    ref_log_probs: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    rollout_log_probs: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    expected_score: torch.Tensor | None = None,
    denominators: Denominators,
    config: PolicyLossConfig,
) -> PolicyLossOutput:
    """Return the loss of complete samples, with the policy loss and aggregation of `config`.

    log_probs, entropy: `[t]` float32, of the current policy; gradients flow through these.
    old_log_probs: `[t]` float32, of the policy before this step's first update.
    advantages: `[t]` float32.
    loss_mask: `[t]` bool. Masked positions may hold anything, including nan and inf: they add
        nothing to loss, gradient or sums.
    lengths: `[b]` int64, tokens per sample.
    ref_log_probs: `[t]` float32, of the reference policy; required if `config.kl_coef` > 0.
        Without a coefficient the KL is only measured.
    weights: `[t]` float32, the correction of `mismatch`, detached; only multiplies the surrogate.
    rollout_log_probs: `[t]` float32, of the engine; only for `config.off_policy_threshold`.
    selected: `[t]` bool, tokens that the policy loss has selected, if it selects any.
    expected_score: `[t]` float32, differentiable, see `score_centering.expected_scores`.

    Raises RuntimeError for `kl_coef` > 0 without `ref_log_probs`, UsageError for an unknown loss.
    """
    if ref_log_probs is None and config.kl_coef > 0:
        raise RuntimeError(f"kl_coef is {config.kl_coef} but there are no ref_log_probs")
    # Mask before any arithmetic, not only after: the gradient of where(mask, f(x), 0) at a nan x is
    # 0 * nan.
    log_probs, entropy, old_log_probs, advantages = (
        masked(loss_mask, values) for values in (log_probs, entropy, old_log_probs, advantages)
    )
    inputs = PolicyLossInputs(log_probs, old_log_probs, advantages, loss_mask, lengths, selected)
    token_losses = find_policy_loss(config.policy_loss).function(inputs, config.parameters)
    surrogate = token_losses.loss
    if weights is not None:
        surrogate = surrogate * masked(loss_mask, weights.detach())
    if expected_score is not None:
        surrogate = surrogate + advantages * masked(loss_mask, expected_score)
    segments = Segments.of(lengths, loss_mask)
    off_policy = torch.zeros_like(loss_mask)
    if config.off_policy_threshold is not None:
        assert rollout_log_probs is not None, "the mask compares with the engine's log-probs"
        log_ratio = masked(loss_mask, rollout_log_probs) - log_probs.detach()
        off_policy = is_off_policy(log_ratio, advantages, segments, config.off_policy_threshold)
        surrogate = masked(~off_policy, surrogate)
    kl = torch.zeros_like(log_probs)
    if ref_log_probs is not None:
        ref = masked(loss_mask, ref_log_probs)
        kl = kl_estimate(log_probs, ref, config.kl_estimator, config.kl_clamp)
    per_token = surrogate
    # Omit a term without a coefficient instead of multiplying by 0, so that its gradient is not
    # computed; the entropy's costs another pass over the vocabulary.
    if config.kl_coef > 0:
        per_token = per_token + config.kl_coef * kl
    if config.entropy_coef > 0:
        per_token = per_token - config.entropy_coef * entropy
    weight = token_weights(segments, denominators, config.aggregation, per_token.dtype)
    return PolicyLossOutput(
        loss=(weight * masked(loss_mask, per_token)).sum(),
        sums=_sums(inputs, surrogate, kl, entropy, token_losses, off_policy, weight),
    )


def is_off_policy(
    log_ratio: torch.Tensor, advantages: torch.Tensor, segments: Segments, threshold: float
) -> torch.Tensor:
    """Return `[t]` bool: tokens that DeepSeek-V3.2 drops (arXiv 2512.02556, eq. 9).

    These have a negative advantage, and the mean of log_ratio = rollout_log_probs - log_probs over
    their response exceeds `threshold`. The mean covers both staleness and the difference between
    engine and trainer. Tokens with a positive advantage are never dropped. Weights of the loss
    still count dropped tokens.
    """
    return (advantages < 0) & (segments.to_tokens(segments.mean(log_ratio)) > threshold)


@torch.no_grad()
def _sums(
    inputs: PolicyLossInputs,
    surrogate: torch.Tensor,
    kl: torch.Tensor,
    entropy: torch.Tensor,
    token_losses: TokenLosses,
    off_policy: torch.Tensor,
    weight: torch.Tensor,
) -> PolicyLossSums:
    def total(values: torch.Tensor) -> torch.Tensor:
        return masked(inputs.loss_mask, values.to(surrogate.dtype)).sum()

    return PolicyLossSums(
        num_tokens=total(inputs.loss_mask),
        policy_loss=total(surrogate),
        kl=total(kl),
        entropy=total(entropy),
        ratio=total(bounded_ratio(inputs.log_probs - inputs.old_log_probs)),
        clipped_lower=total(token_losses.clipped_lower),
        clipped_upper=total(token_losses.clipped_upper),
        off_policy=total(off_policy),
        aggregated=total(weight * surrogate),
    )
