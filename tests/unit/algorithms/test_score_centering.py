"""Expected scores against the whole vocabulary and autograd."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.algorithms.aggregation import Denominators
from mcore_rl.algorithms.mismatch import (
    TOKEN_CORRECTIONS,
    Band,
    Cap,
    MismatchConfig,
    mismatch_weights,
    ratio_weights,
)
from mcore_rl.algorithms.policy_losses import PolicyLossConfig
from mcore_rl.algorithms.score_centering import centering_sums, expected_scores
from mcore_rl.algorithms.total_loss import policy_loss_total
from mcore_rl.common.parameters import Parameters

VOCAB_SIZE, NUM_TOKENS = 24, 7
CONFIGS = {
    "none": MismatchConfig(),
    "token_tis": MismatchConfig("token_tis", Cap(1.1)),
    "token_tis_floor": MismatchConfig("token_tis", Cap(1.1, 0.7)),
    "icepop": MismatchConfig("icepop", Band(0.95, 1.05)),
}
assert {config.correction for config in CONFIGS.values()} == set(TOKEN_CORRECTIONS)
all_corrections = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def logits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of trainer and engine, `[t, v]` float64; the trainer's require a
    gradient."""
    generator = torch.Generator().manual_seed(seed)
    mine = torch.randn(NUM_TOKENS, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    noise = torch.randn(NUM_TOKENS, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    return mine.requires_grad_(), mine.detach() + 0.4 * noise


def gradient(value: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(value.sum(), of, retain_graph=True)
    return found


@all_corrections
@pytest.mark.parametrize("k", [1, 6, VOCAB_SIZE])
def test_gradient_equals_the_sum_over_the_vocabulary(config: MismatchConfig, k: int) -> None:
    """With the engine's tail written out: the trainer's, times a constant."""
    mine, theirs = logits(k)
    log_p, log_q = mine.log_softmax(-1), theirs.log_softmax(-1)
    ids = log_q.topk(k).indices
    found = expected_scores(log_p.gather(1, ids), log_q.gather(1, ids), config)
    p, q = log_p.exp().detach(), log_q.exp()
    if k < VOCAB_SIZE:
        in_head = torch.zeros_like(p, dtype=torch.bool).scatter_(1, ids, True)
        rho = q.masked_fill(in_head, 0).sum(1) / p.masked_fill(in_head, 0).sum(1)
        q = torch.where(in_head, q, rho[:, None] * p)
    torch.testing.assert_close(q.sum(1), torch.ones_like(q[:, 0]))
    weighed = q * ratio_weights(p / q, config)
    expected = gradient(weighed * log_p, mine)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(gradient(found[:, 0], mine), expected, rtol=1e-9, atol=1e-12)
    mass = q.gather(1, ids).sum(1), p.gather(1, ids).sum(1)
    torch.testing.assert_close(found[:, 1:3], torch.stack(mass, dim=1))


@all_corrections
def test_expectation_of_the_centered_score_is_zero(config: MismatchConfig) -> None:
    """Each token of the vocabulary is the sampled one, with its probability in the engine."""
    mine, theirs = logits(3)
    log_p, log_q = mine.log_softmax(-1), theirs.log_softmax(-1)
    value = expected_scores(log_p, log_q, config)[:, 0]
    total, uncentered = torch.zeros(2, *mine.shape, dtype=torch.float64)
    for token in range(VOCAB_SIZE):
        weight = ratio_weights((log_p - log_q)[:, token].detach().exp(), config)
        score = weight * log_p[:, token]
        chance = log_q[:, token].exp()[:, None]
        total += chance * gradient(score - value, mine)
        uncentered += chance * gradient(score, mine)
    assert uncentered.abs().max() > 0.01
    assert total.abs().max() < 1e-12


def test_two_tokens_and_an_equal_tail() -> None:
    p = torch.tensor([[0.4, 0.4]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.3]], dtype=torch.float64)
    log_p = p.log().requires_grad_()
    found = expected_scores(log_p, q.log(), MismatchConfig())
    torch.testing.assert_close(gradient(found[:, 0], log_p), torch.tensor([[0.1, -0.1]]).double())
    torch.testing.assert_close(found[0, 1:].detach(), torch.tensor([0.8, 0.8, 0.2]).double())


@all_corrections
def test_equal_distributions_give_exactly_nothing(config: MismatchConfig) -> None:
    # Column after column in memory, as a policy's log-probs of several targets are.
    whole = 3 * torch.randn(999, 99, generator=torch.Generator().manual_seed(9))
    columns = whole.log_softmax(-1).topk(8).values.t().contiguous().t().requires_grad_()
    found = expected_scores(columns, columns.detach().contiguous(), config)
    assert not gradient(found[:, 0], columns).any()
    assert not found[:, 0].any() and not found[:, 3].any()
    assert torch.equal(found[:, 1], found[:, 2]) and (found[:, 1] < 1).all()


def test_full_importance_weights_need_no_centering() -> None:
    """E of w = p / q times the score is that of the trainer's own tokens, 0."""
    mine, theirs = logits(5)
    ids = theirs.topk(6).indices
    log_p, log_q = (each.log_softmax(-1).gather(1, ids) for each in (mine, theirs))
    found = expected_scores(log_p, log_q, MismatchConfig("token_tis", Cap(1e6)))
    assert gradient(found[:, 0], log_p).abs().max() < 1e-12


@all_corrections
def test_masses_that_round_to_more_than_one_have_a_finite_result(config: MismatchConfig) -> None:
    for mine, theirs in ((1e-7, -1.0), (-1.0, 1e-7), (1e-7, 1e-7), (-1e-9, -9999.0)):
        log_p = torch.tensor([[mine, -30.0]], requires_grad=True)
        found = expected_scores(log_p, torch.tensor([[theirs, -30.0]]), config)
        assert torch.isfinite(found).all()
        assert torch.isfinite(gradient(found[:, 0], log_p)).all()


@all_corrections
def test_each_ratio_is_weighed_as_that_of_a_sampled_token(config: MismatchConfig) -> None:
    old = torch.linspace(-2, 2, 41) - 5
    rollout, mask = torch.full_like(old, -5.0), torch.ones(41, dtype=torch.bool)
    found = mismatch_weights(old, rollout, mask, torch.tensor([20, 21]), config)
    assert torch.equal(found.weights, ratio_weights((old - rollout).exp(), config))


def test_loss_adds_the_advantage_times_the_expected_score() -> None:
    log_probs = torch.tensor([-1.0, -2.0, math.nan], requires_grad=True)
    scores = torch.tensor([0.5, 0.25, math.nan], requires_grad=True)
    mask = torch.tensor([True, True, False])
    out = policy_loss_total(
        log_probs,
        torch.zeros(3),
        old_log_probs=log_probs.detach(),
        advantages=torch.tensor([2.0, -3.0, 1.0]),
        loss_mask=mask,
        lengths=torch.tensor([3]),
        weights=torch.tensor([1.0, 0.5, 1.0]),
        expected_score=scores,
        denominators=Denominators(4.0, 1.0),
        config=PolicyLossConfig("policy_gradient", Parameters()),
    )
    # -2 (-1 - 0.5) + 3 (-1 - 0.25): the correction is not weighed a second time
    assert out.loss.item() == pytest.approx((3.0 - 3.75) / 4)
    assert float(out.sums.policy_loss) == pytest.approx(3.0 - 3.75)
    for tensor, expected in ((log_probs, [-0.5, 0.375, 0.0]), (scores, [0.5, -0.75, 0.0])):
        assert gradient(out.loss, tensor).tolist() == pytest.approx(expected)


def test_metrics_are_means_over_loss_tokens() -> None:
    columns = torch.tensor([[0.9, 0.8, 0.2], [math.nan] * 3, [0.7, 0.6, 0.4]])
    sums = centering_sums(columns, torch.tensor([True, False, True]))
    assert sums.metrics(2.0) == {
        "centering/engine_mass": pytest.approx(0.8),
        "centering/actor_mass": pytest.approx(0.7),
        "centering/coefficients_l1": pytest.approx(0.3),
    }
