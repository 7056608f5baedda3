"""Segment operations against loops over samples."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.algorithms.aggregation import Segments, discounted_sums_to_go, masked
from tests.unit.algorithms.ragged import normal, ragged, random_ragged, spoilt


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gaps", [False, True])
def test_sums_means_and_broadcast_equal_loops(seed: int, gaps: bool) -> None:
    batch = random_ragged(seed, gaps=gaps)
    values = normal(batch, seed)
    segments = Segments.of(batch.lengths, batch.loss_mask)
    garbage = spoilt(batch, values, math.nan)
    sums = [math.fsum(values[tokens].tolist()) for tokens in batch.loss_tokens]
    counts = [len(tokens) for tokens in batch.loss_tokens]
    assert segments.counts.tolist() == counts
    assert segments.sum(garbage).tolist() == pytest.approx(sums, abs=1e-14)
    means = [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]
    assert segments.mean(garbage).tolist() == pytest.approx(means, abs=1e-14)
    owners = [row for row, length in enumerate(batch.lengths.tolist()) for _ in range(length)]
    rows = torch.arange(len(counts))
    assert segments.to_tokens(rows).tolist() == owners
    left = [len(tokens) - 1 - k for tokens in batch.loss_tokens for k in range(len(tokens))]
    assert segments.tokens_left().tolist() == left


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("longest", [1, 2, 3, 4, 5, 63, 64, 65, 200])
def test_discounted_sums_to_go_equal_the_recursion(discount: float, longest: int) -> None:
    batch = ragged([longest, 1, 0, 3, longest], [1, 2, 3, 1, 1])
    values = normal(batch, longest)[batch.loss_mask]
    tokens_left = Segments.of(batch.lengths, batch.loss_mask).tokens_left()
    expected, running = [], 0.0
    for value, left in zip(values.tolist()[::-1], tokens_left.tolist()[::-1], strict=True):
        running = value + (discount * running if left else 0.0)
        expected.append(running)
    actual = discounted_sums_to_go(values, tokens_left, discount)
    torch.testing.assert_close(actual, torch.tensor(expected[::-1], dtype=torch.float64))


def test_discounted_sums_to_go_let_nothing_in_from_the_next_sample() -> None:
    batch = ragged([3, 2], [1, 1])
    tokens_left = Segments.of(batch.lengths, batch.loss_mask).tokens_left()
    values = torch.tensor([1.0, 2.0, 3.0, math.nan, math.inf])
    assert discounted_sums_to_go(values, tokens_left, 1.0)[:3].tolist() == [6.0, 5.0, 3.0]


def test_no_tokens_and_no_samples() -> None:
    for batch in (ragged([], []), ragged([0, 0], [1, 2])):
        segments = Segments.of(batch.lengths, batch.loss_mask)
        values = torch.ones(batch.num_tokens)
        assert segments.sum(values).tolist() == [0.0] * len(batch.lengths)
        left = segments.tokens_left()
        assert discounted_sums_to_go(values[batch.loss_mask], left, 1.0).shape == (0,)


def test_masked_gives_no_gradient_through_garbage() -> None:
    values = torch.tensor([1.0, math.nan], requires_grad=True)
    masked(torch.tensor([True, False]), values).exp().sum().backward()
    assert values.grad.tolist() == [pytest.approx(math.e), 0.0]
