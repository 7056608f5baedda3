"""Weights of tokens against the means that the modes are named after."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from mcore_rl.algorithms.aggregation import (
    Aggregation,
    AggregationMode,
    Denominators,
    Segments,
    token_weights,
)
from mcore_rl.common.errors import UsageError
from tests.unit.algorithms.losses_reference import aggregate, aggregation_of, per_sample
from tests.unit.algorithms.ragged import normal, ragged, random_ragged


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_weighted_sum_equals_named_mean(mode: str, seed: int) -> None:
    batch = random_ragged(seed, gaps=seed % 2 == 1)
    losses = normal(batch, seed)
    segments = Segments.of(batch.lengths, batch.loss_mask)
    denominators = Denominators.of(segments)
    weights = token_weights(segments, denominators, aggregation_of(mode), torch.float64)
    assert (weights[~batch.loss_mask] == 0).all()
    expected = aggregate(per_sample(batch, losses), mode, 13.0)
    torch.testing.assert_close((weights * losses).sum(), expected, rtol=1e-12, atol=1e-14)
    as_tensors = Denominators(
        torch.tensor(denominators.num_tokens), torch.tensor(denominators.num_samples)
    )
    again = token_weights(segments, as_tensors, aggregation_of(mode), torch.float64)
    torch.testing.assert_close(again, weights, rtol=1e-7, atol=0)


def test_weights_of_modes_equal_values_by_hand() -> None:
    batch = ragged([1, 3, 0], [1, 1, 2])
    segments = Segments.of(batch.lengths, batch.loss_mask)
    denominators = Denominators.of(segments)
    assert denominators == Denominators(4, 2)  # an empty response does not count as a sample

    def weights(mode: str) -> list[float]:
        every = token_weights(segments, denominators, aggregation_of(mode), torch.float64)
        return every[batch.loss_mask].tolist()

    assert weights("token_mean") == [1 / 4] * 4
    assert weights("seq_mean_token_mean") == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    assert weights("seq_mean_token_sum") == [1 / 2] * 4
    assert weights("constant") == pytest.approx([1 / 26] * 4)


@pytest.mark.parametrize("count", [0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["num_tokens", "num_samples"])
def test_denominator_not_positive_is_refused(name: str, count: float) -> None:
    counts = {"num_tokens": 5, "num_samples": 2, name: count}
    with pytest.raises(RuntimeError, match=f"{name} is .*, expected a positive count"):
        Denominators(**counts)


@pytest.mark.parametrize(
    "mode, constant, message",
    [
        ("constant", None, "--rl-loss-aggregation constant needs --rl-loss-constant"),
        ("token_mean", 5.0, "--rl-loss-constant 5.0 has no effect"),
    ],
)
def test_aggregation_out_of_range_is_a_usage_error(
    mode: str, constant: float | None, message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        Aggregation(mode, constant)
