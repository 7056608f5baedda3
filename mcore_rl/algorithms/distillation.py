"""On-policy distillation: the reverse KL to a teacher, on the student's own samples.

    A_t = A_t - coef * (log p_student(y_t) - log p_teacher(y_t))

The bracket is an unbiased estimate, at each token, of KL(student || teacher) (arXiv 2306.13649,
arXiv 2306.08543). It is added to the estimator's advantages, so that no normalisation changes its
scale. Shape legend: t tokens of a rank's samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.algorithms.aggregation import TokenSums, masked


@dataclass(frozen=True, slots=True)
class TeacherSums(TokenSums):
    """Sums over loss tokens, 0-dim float64."""

    num_tokens: torch.Tensor
    reverse_kl: torch.Tensor  # log p_student - log p_teacher
    log_prob: torch.Tensor  # log p_teacher

    def metrics(self) -> dict[str, float]:
        """Return the means over loss tokens."""
        tokens = max(float(self.num_tokens), 1.0)
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
