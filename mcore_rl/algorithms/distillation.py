"""On-policy distillation: the reverse KL to a teacher, on the student's own samples.

    A_t = A_t - coef * (log p_student(y_t) - log p_teacher(y_t))

The bracket is an unbiased estimate, at each token, of KL(student || teacher) (arXiv 2306.13649,
arXiv 2306.08543). It is added to the estimator's advantages, so that no normalisation changes its
scale. `top_k_reverse_kl` is a term of the loss instead, with a gradient through the student's
distribution. Shape legend: t tokens of a rank's samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.algorithms.aggregation import (
    Aggregation,
    Denominators,
    Segments,
    TokenSums,
    masked,
    token_weights,
)

# Least probability of all tokens outside the top-k: below, 1 minus a float32 sum is only rounding.
_LEAST_REST = 1e-6


@dataclass(frozen=True, slots=True)
class TeacherSums(TokenSums):
    """Sums over loss tokens, 0-dim float64."""

    num_tokens: torch.Tensor
    reverse_kl: torch.Tensor  # log p_student - log p_teacher
    log_prob: torch.Tensor  # log p_teacher

    def metrics(self) -> dict[str, float]:
        """Return the means over loss tokens; empty without any, since 0 would mean equality."""
        tokens = float(self.num_tokens)
        if not tokens:
            return {}
        return {
            "teacher/reverse_kl": float(self.reverse_kl) / tokens,
            "teacher/log_prob": float(self.log_prob) / tokens,
        }


def teacher_penalties(
    old_log_probs: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    loss_mask: torch.Tensor,
    coef: float,
) -> tuple[torch.Tensor, TeacherSums]:
    """Return `[t]` float32 to add to the advantages, 0 where masked, and the sums for metrics.

    old_log_probs, teacher_log_probs: `[t]` float32, of the same tokens, at the same temperature;
        anything where masked.
    loss_mask: `[t]` bool.
    """
    student = masked(loss_mask, old_log_probs)
    teacher = masked(loss_mask, teacher_log_probs)
    difference = student - teacher
    sums = TeacherSums(
        num_tokens=loss_mask.double().sum(),
        reverse_kl=difference.double().sum(),
        log_prob=teacher.double().sum(),
    )
    return -coef * difference, sums


def top_k_reverse_kl(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor) -> torch.Tensor:
    """Return `[t]`: the reverse KL between the distributions over the teacher's top-k tokens and
    "any other token":

        sum over k of p_k log(p_k / q_k) + p_rest log(p_rest / q_rest)

    It is a lower bound of the reverse KL over the vocabulary, at least 0, and 0 with a gradient of
    exactly 0 for equal log-probs.

    log_probs: `[t, k]` float32, the student's log p_k; gradients flow through these.
    teacher_log_probs: `[t, k]` float32, log q_k of the same tokens.
    """
    with torch.no_grad():
        # Alike in memory, or exp would take other kernels, which round differently.
        mine, theirs = log_probs.contiguous(), teacher_log_probs.contiguous()
        p, ratio = mine.exp(), mine - theirs
        rest = (1 - p.sum(dim=1)).clamp(min=_LEAST_REST)
        teacher_rest = (1 - theirs.exp().sum(dim=1)).clamp(min=_LEAST_REST)
        rest_ratio = rest.log() - teacher_rest.log()
        value = (p * ratio).sum(dim=1) + rest * rest_ratio
        slope = p * (ratio - rest_ratio[:, None])  # d value / d log p_k
    linear = (slope * log_probs).sum(dim=1)
    return value + linear - linear.detach()


def teacher_term(
    kl: torch.Tensor,
    loss_mask: torch.Tensor,
    lengths: torch.Tensor,
    *,
    denominators: Denominators,
    aggregation: Aggregation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this call's share of the global loss, aggregated as the policy's, and the sum over
    loss tokens, 0-dim float64 without gradient.

    kl: `[t]` float32, the reverse KL of each token; anything where masked. loss_mask: `[t]` bool.
    lengths: `[b]` int64, tokens per sample.
    """
    kept = masked(loss_mask, kl)
    segments = Segments.of(lengths, loss_mask)
    weights = token_weights(segments, denominators, aggregation, kl.dtype)
    return (weights * kept).sum(), kept.detach().double().sum()
