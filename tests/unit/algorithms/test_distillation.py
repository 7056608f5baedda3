"""The reverse KL to a teacher, against whole distributions and autograd."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.algorithms.aggregation import Aggregation, Denominators
from mcore_rl.algorithms.distillation import teacher_penalties, teacher_term, top_k_reverse_kl


def test_penalties_are_the_weighted_log_ratio_of_loss_tokens():
    student = torch.tensor([-1.0, -2.0, math.nan])
    teacher = torch.tensor([-3.0, -1.5, math.inf])
    mask = torch.tensor([True, True, False])
    penalties, sums = teacher_penalties(student, teacher, mask, coef=0.5)
    assert penalties.tolist() == [-1.0, 0.25, 0.0]
    assert sums.metrics() == {"teacher/reverse_kl": 0.75, "teacher/log_prob": -2.25}


def test_no_token_of_a_teacher_gives_no_metric():
    """A 0 would look like a student that equals its teacher."""
    nothing = torch.zeros(2)
    _, sums = teacher_penalties(nothing, nothing, torch.zeros(2, dtype=torch.bool), coef=0.5)
    assert sums.metrics() == {}


def top(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, ids)


@pytest.mark.parametrize("k", [1, 5, 32])
def test_top_k_kl_and_gradient_equal_autograd(k: int):
    """All other tokens are one outcome; with k of all tokens it is the KL of the vocabulary."""
    generator = torch.Generator().manual_seed(k)
    student, teacher = torch.randn(2, 6, 32, generator=generator).double()
    student.requires_grad_()
    ids = teacher.topk(k).indices
    found = top_k_reverse_kl(top(student, ids), top(teacher, ids))
    (gradient,) = torch.autograd.grad(found.sum(), student)
    p, q = top(student, ids).exp(), top(teacher, ids).exp()
    expected = (p * (p / q).log()).sum(1)
    if k < 32:
        rest, of_teacher = 1 - p.sum(1), 1 - q.sum(1)
        expected = expected + rest * (rest / of_teacher).log()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-9)
    whole = (student.softmax(-1) * (student.log_softmax(-1) - teacher.log_softmax(-1))).sum(1)
    assert (found >= 0).all() and (found <= whole + 1e-9).all()


def test_equal_distributions_have_exactly_no_kl_and_no_gradient():
    log_probs = torch.tensor([[-0.1, -3.0], [-1e-9, -21.0], [-0.7, -0.7]], requires_grad=True)
    found = top_k_reverse_kl(log_probs, log_probs.detach())
    (gradient,) = torch.autograd.grad(found.sum(), log_probs)
    assert not found.any() and not gradient.any()
    # Column after column in memory, as a policy's log-probs of several targets are.
    logits = 3 * torch.randn(999, 99, generator=torch.Generator().manual_seed(9))
    columns = logits.log_softmax(-1).topk(8).values.t().contiguous().t().requires_grad_()
    found = top_k_reverse_kl(columns, columns.detach().contiguous())
    (gradient,) = torch.autograd.grad(found.sum(), columns)
    assert not found.any() and not gradient.any()


def test_term_is_the_mean_over_loss_tokens_and_masks_before_arithmetic():
    kl = torch.tensor([1.0, math.nan, 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    loss, total = teacher_term(
        kl,
        mask,
        torch.tensor([2, 1]),
        denominators=Denominators(4.0, 2.0),
        aggregation=Aggregation("token_mean"),
    )
    assert loss.item() == 1.0 and total.item() == 4.0
    (gradient,) = torch.autograd.grad(loss, kl)
    assert gradient.tolist() == [0.25, 0.0, 0.25]
