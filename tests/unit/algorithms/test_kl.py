"""KL estimates against their formulas and expectations; penalties and controllers."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.algorithms.kl import (
    MAX_LOG_RATIO,
    KLController,
    KLParameters,
    kl_estimate,
    kl_of_loss_tokens,
)
from mcore_rl.common.errors import UsageError
from tests.unit.algorithms.losses_reference import reference_kl
from tests.unit.algorithms.ragged import normal, random_ragged, spoilt


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("p, q", [(-1.0, -1.0), (-0.5, -2.0), (-2.0, -0.5), (-9.0, -0.1)])
def test_kl_estimate_equals_formula(estimator: str, p: float, q: float) -> None:
    log_p = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor(q, dtype=torch.float64)
    estimate = kl_estimate(log_p, log_q, estimator)
    estimate.backward()
    expected = reference_kl(log_p.detach(), log_q, estimator)
    assert estimate.item() == pytest.approx(expected.item(), rel=1e-12)
    gradient = {"k1": 1.0, "k2": p - q, "k3": 1 - math.exp(q - p)}[estimator]
    assert log_p.grad.item() == pytest.approx(gradient, rel=1e-12)


def test_kl_estimates_have_stated_expectations() -> None:
    """Exact sums over a small vocabulary in place of samples."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 5, generator=generator, dtype=torch.float64).unbind()
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(0), other.log_softmax(0)
    p, q = log_p.exp(), log_q.exp()
    kl_pq, kl_qp = (p * (log_p - log_q)).sum(), (q * (log_q - log_p)).sum()

    def expectation(estimator: str) -> tuple[torch.Tensor, torch.Tensor]:
        estimate = kl_estimate(log_p, log_q, estimator)
        loss = (p.detach() * estimate).sum()  # sampling gives no gradient, only the estimate does
        return loss.detach(), torch.autograd.grad(loss, [logits], retain_graph=True)[0]

    gradient_pq, gradient_qp = (
        torch.autograd.grad(kl, [logits], retain_graph=True)[0] for kl in (kl_pq, kl_qp)
    )
    for estimator, gradient in {
        "k1": torch.zeros_like(gradient_pq),
        "k2": gradient_pq,
        "k3": gradient_qp,
    }.items():
        value, actual = expectation(estimator)
        torch.testing.assert_close(actual, gradient)
        assert torch.isclose(value, kl_pq) == (estimator != "k2")


def test_k3_is_accurate_for_nearly_equal_policies() -> None:
    log_p = torch.tensor([-0.3, -2.0, -8.0])
    log_q = log_p + torch.tensor([1e-3, -2e-3, 5e-4])
    expected = [
        math.expm1(q - p) - (q - p) for p, q in zip(log_p.tolist(), log_q.tolist(), strict=True)
    ]
    actual = kl_estimate(log_p, log_q, "k3").tolist()
    assert actual == pytest.approx(expected, rel=1e-3)  # exp(r) - 1 - r is off by 1e-1 here


def test_k3_is_bounded_for_improbable_token() -> None:
    log_p = torch.tensor([-1000.0], requires_grad=True)
    estimate = kl_estimate(log_p, torch.tensor([-1.0]), "k3")
    estimate.backward()
    assert estimate.item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-6)
    assert log_p.grad.item() == 0


def test_k3_is_clamped_in_value_and_gradient() -> None:
    """As `kl_penalty_forward` of verl's core_algos.py: clamp(exp(r) - 1 - r, -10, 10)."""
    log_p = torch.tensor([-1.0, -3.0, -4.0, -20.0], dtype=torch.float64, requires_grad=True)
    log_q = torch.full((4,), -1.0, dtype=torch.float64)
    expected = [min(math.exp(r) - 1 - r, 10.0) for r in (log_q - log_p).tolist()]
    estimate = kl_estimate(log_p, log_q, "k3", clamp=10.0)
    assert estimate.tolist() == pytest.approx(expected) and expected[2:] == [10.0, 10.0]
    estimate.sum().backward()
    assert log_p.grad.tolist() == pytest.approx([0.0, 1 - math.exp(2), 0.0, 0.0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_kl_of_loss_tokens_equals_formula(estimator: str, garbage: float) -> None:
    batch = random_ragged(0, gaps=True)
    old, ref = (normal(batch, seed, torch.float32) for seed in (1, 2))
    kl = kl_of_loss_tokens(
        spoilt(batch, old, garbage).requires_grad_(),
        spoilt(batch, ref, garbage),
        batch.loss_mask,
        estimator,
    )
    assert kl.dtype == torch.float32 and not kl.requires_grad
    expected = reference_kl(old.double(), ref.double(), estimator) * batch.loss_mask
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-7)  # float32


def test_adaptive_kl_follows_the_formula_and_reaches_its_target() -> None:
    controller = KLController(0.2, target=0.05, horizon=1000)
    controller.update(0.055, num_samples=64)  # 10 percent above
    assert controller.coef == pytest.approx(0.2 * (1 + 0.1 * 64 / 1000))
    controller = KLController(0.2, target=0.05, horizon=1000)
    controller.update(5.0, num_samples=64)  # the error is clipped
    assert controller.coef == pytest.approx(0.2 * (1 + 0.2 * 64 / 1000))
    for _ in range(2000):  # a policy whose KL is inverse to the coefficient
        controller.update(0.01 / controller.coef, num_samples=64)
    assert 0.01 / controller.coef == pytest.approx(0.05, rel=1e-3)


def test_adaptive_kl_stays_positive_and_ignores_non_finite() -> None:
    controller = KLController(0.2, target=1.0, horizon=10)
    controller.update(0.0, num_samples=10**6)
    assert controller.coef == pytest.approx(0.2 * 0.8)
    for kl in (math.nan, math.inf):
        controller.update(kl, num_samples=1)
    assert controller.coef == pytest.approx(0.2 * 0.8)


def test_controllers_resume_from_checkpoint() -> None:
    first = KLController(0.2, target=0.1)
    first.update(0.5, num_samples=100)
    second = KLController(0.2, target=0.1)
    second.load_state_dict(first.state_dict())
    assert second.coef == first.coef != 0.2
    fixed = KLController(0.3)
    fixed.update(5.0, num_samples=100)
    fixed.load_state_dict(first.state_dict())  # the flag decides
    assert fixed.coef == 0.3 and fixed.state_dict() == {}
    second.load_state_dict(fixed.state_dict())
    assert second.coef == first.coef


@pytest.mark.parametrize(
    "build, flag",
    [
        (lambda: KLParameters(kl_reward_coef=-0.1), "--rl-kl-reward-coef -0.1"),
        (lambda: KLParameters(kl_reward_coef=math.nan), "--rl-kl-reward-coef nan"),
        (lambda: KLParameters(kl_target=0.0), "--rl-kl-target 0.0"),
        (lambda: KLParameters(kl_horizon=-1.0), "--rl-kl-horizon -1.0"),
        (lambda: KLController(0.0, target=1.0), "--rl-kl-reward-coef 0.0"),
    ],
)
def test_kl_parameters_out_of_range_are_refused(build, flag: str) -> None:
    with pytest.raises(UsageError) as refused:
        build()
    assert refused.value.flag == flag and refused.value.remedy
