"""Advantages of demonstrations and pairs, against losses that torch differentiates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mcore_rl.algorithms.aggregation import Denominators
from mcore_rl.algorithms.interfaces import AdvantageInputs
from mcore_rl.algorithms.recipes import resolve_algorithm
from mcore_rl.algorithms.registry import find_advantage_estimator
from mcore_rl.algorithms.supervised import Preference, preference_metrics
from mcore_rl.algorithms.total_loss import policy_loss_total

LENGTHS = torch.tensor([5, 4, 6, 3])
MASK = torch.tensor([0, 1, 1, 1, 0] + [0, 1, 1, 0] + [1, 1, 0, 1, 1, 0] + [0, 1, 0]).bool()


COUNTS = np.array([int(part.sum()) for part in torch.split(MASK, LENGTHS.tolist())])


def gradient_of(
    name: str,
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    num_samples: int,
    **options: Any,
) -> torch.Tensor:
    """The gradient of the log-probs in the update of an algorithm."""
    algorithm = resolve_algorithm(name, options)
    samples = torch.arange(4).repeat_interleave(LENGTHS)
    ratios = (log_probs.detach() - ref_log_probs) * MASK
    scores = -torch.zeros(4, dtype=torch.float64).index_add(0, samples, ratios.double())
    found = find_advantage_estimator(algorithm.advantage).function(
        AdvantageInputs(
            scores=scores.numpy(),
            group_ids=np.arange(4) // algorithm.num_samples_per_prompt,
            response_lengths=COUNTS,
            rows=np.arange(4),
            token_rewards=-ratios,
            loss_mask=MASK,
            lengths=LENGTHS,
        ),
        algorithm.advantage_config,
    )
    total = policy_loss_total(
        log_probs,
        torch.zeros_like(log_probs),
        old_log_probs=log_probs.detach(),
        advantages=found.advantages,
        loss_mask=MASK,
        lengths=LENGTHS,
        denominators=Denominators(float(MASK.sum()), float(num_samples)),
        config=algorithm.policy_loss_config(16),
    )
    return torch.autograd.grad(total.loss, log_probs)[0]


@pytest.fixture
def log_probs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (-3 * torch.rand(len(MASK), generator=generator)).requires_grad_()


@pytest.fixture
def ref_log_probs() -> torch.Tensor:
    return -3 * torch.rand(len(MASK), generator=torch.Generator().manual_seed(2))


def test_sft_has_the_gradient_of_the_cross_entropy(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor
) -> None:
    expected = torch.autograd.grad(-log_probs[MASK].mean(), log_probs)[0]
    assert torch.allclose(gradient_of("sft", log_probs, ref_log_probs, 4), expected, atol=1e-7)


def margins_of(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, *, is_normalized: bool
) -> torch.Tensor:
    """beta times the difference of log-ratios, or of their means as in TRL's sigmoid_norm."""
    parts = torch.split((log_probs - ref_log_probs) * MASK, LENGTHS.tolist())
    ratios = torch.stack([part.sum() for part in parts])
    if is_normalized:
        ratios = ratios / torch.from_numpy(COUNTS)
    return 0.1 * (ratios[0::2] - ratios[1::2])


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_has_the_gradient_of_its_formula(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, smoothing: float, is_normalized: bool
) -> None:
    margins = margins_of(log_probs, ref_log_probs, is_normalized=is_normalized)
    # As TRL writes it: a share of the labels is flipped.
    losses = -F.logsigmoid(margins) * (1 - smoothing) - F.logsigmoid(-margins) * smoothing
    loss = losses.mean()
    expected = torch.autograd.grad(loss, log_probs)[0]
    options = {"dpo_label_smoothing": smoothing, "dpo_length_normalized": is_normalized}
    found = gradient_of("dpo", log_probs, ref_log_probs, 4, **options)
    assert torch.allclose(found, expected, atol=1e-7) and found.abs().max() > 1e-3
    parts = torch.split(((log_probs - ref_log_probs) * MASK).detach(), LENGTHS.tolist())
    scores = -np.array([float(part.double().sum()) for part in parts])
    metrics = preference_metrics(scores, COUNTS, Preference(**options))
    assert metrics["loss/dpo"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert metrics["dpo/margin"] == pytest.approx(float(margins.detach().mean()), rel=1e-5)
    assert metrics["dpo/accuracy"] == float((margins > 0).float().mean())


def test_dpo_is_finite_at_extreme_margins() -> None:
    metrics = preference_metrics(np.array([1e5, 0.0, 0.0, 1e5]), COUNTS, Preference())
    assert metrics["loss/dpo"] == pytest.approx(5e3)
