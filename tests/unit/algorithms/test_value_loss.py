"""The value loss against a loop, its independence of every split, and the explained variance."""

from __future__ import annotations

import math
import statistics
from dataclasses import fields
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms.aggregation import AggregationMode
from mcore_rl.algorithms.value_loss import (
    ValueLossConfig,
    ValueLossSums,
    explained_variance,
    value_loss,
)
from tests.unit.algorithms.losses_reference import (
    aggregate,
    aggregation_of,
    denominators_of,
    per_sample,
)
from tests.unit.algorithms.ragged import Ragged, normal, ragged, random_ragged, spoilt


def config_of(mode: str, clip_eps: float | None) -> ValueLossConfig:
    return ValueLossConfig(clip_eps, aggregation_of(mode))


def arguments_of(batch: Ragged, seed: int) -> dict:
    return {
        "values": normal(batch, seed).requires_grad_(),
        "old_values": normal(batch, seed) + 0.3 * normal(batch, seed + 1),
        "returns": normal(batch, seed) + 0.5 * normal(batch, seed + 2),
        "loss_mask": batch.loss_mask,
        "lengths": batch.lengths,
        "denominators": denominators_of(batch),
    }


@pytest.mark.parametrize("clip_eps", [None, 0.2, math.inf])
@pytest.mark.parametrize("mode", get_args(AggregationMode))
@pytest.mark.parametrize("seed", range(3))
def test_loss_gradient_and_sums_equal_loops(seed: int, mode: str, clip_eps: float | None) -> None:
    batch = random_ragged(seed, gaps=seed == 1)
    arguments = arguments_of(batch, seed)
    output = value_loss(**arguments, config=config_of(mode, clip_eps))
    columns = (per_sample(batch, arguments[name]) for name in ("values", "old_values", "returns"))
    losses, clipped = [], 0
    for rows in zip(*columns, strict=True):
        losses.append([])
        for value, old, target in zip(*rows, strict=True):
            plain = (value - target) ** 2
            held = plain
            if clip_eps is not None:
                held = (value.clamp(old - clip_eps, old + clip_eps) - target) ** 2
            clipped += bool(held > plain)
            losses[-1].append(0.5 * max(plain, held))
    expected = aggregate(losses, mode, 13.0)
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=1e-14)
    actual, wanted = (
        torch.autograd.grad(loss, [arguments["values"]])[0] for loss in (output.loss, expected)
    )
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-14)
    values, returns = (arguments[name][batch.loss_mask].tolist() for name in ("values", "returns"))
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    sums = {
        "num_tokens": len(returns),
        "value_loss": sum(float(loss.detach()) for tokens in losses for loss in tokens),
        "values": sum(values),
        "returns": sum(returns),
        "returns_squared": sum(r * r for r in returns),
        "errors": sum(errors),
        "errors_squared": sum(e * e for e in errors),
        "clipped": clipped,
    }
    for name, value in sums.items():
        assert getattr(output.sums, name).item() == pytest.approx(value, rel=1e-10), name
    expected_variance = 1 - statistics.pvariance(errors) / statistics.pvariance(returns)
    assert explained_variance(output.sums) == pytest.approx(expected_variance, rel=1e-9)
    assert (clipped > 0) == (clip_eps == 0.2)


@given(
    seed=st.integers(0, 1000),
    mode=st.sampled_from(get_args(AggregationMode)),
    parts=st.integers(1, 8),
)
@settings(max_examples=30, deadline=None)
def test_loss_gradient_and_sums_add_up_over_every_split(seed: int, mode: str, parts: int) -> None:
    batch = random_ragged(seed)
    arguments = arguments_of(batch, seed)
    config = config_of(mode, 0.2)
    whole = value_loss(**arguments, config=config)
    order = np.random.default_rng(seed).permutation(len(batch.lengths))
    loss, stacked = 0.0, 0.0
    for rows in np.array_split(order, parts):
        part, index = batch.part(rows.tolist())
        sliced = {name: arguments[name][index] for name in ("values", "old_values", "returns")}
        output = value_loss(
            **sliced,
            loss_mask=part.loss_mask,
            lengths=part.lengths,
            denominators=arguments["denominators"],
            config=config,
        )
        loss, stacked = loss + output.loss, stacked + output.sums.stacked()
    torch.testing.assert_close(loss, whole.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(stacked, whole.sums.stacked(), rtol=1e-12, atol=1e-12)
    actual, expected = (
        torch.autograd.grad(total, [arguments["values"]])[0] for total in (loss, whole.loss)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_positions_do_not_matter(garbage: float) -> None:
    batch = random_ragged(6, gaps=True)

    def outcome(dirty: bool):
        arguments = arguments_of(batch, 6)
        if dirty:
            for name in ("values", "old_values", "returns"):
                arguments[name].data = spoilt(batch, arguments[name].data, garbage)
        output = value_loss(**arguments, config=config_of("seq_mean_token_mean", 0.2))
        with torch.autograd.detect_anomaly(check_nan=True):
            output.loss.backward()
        assert (arguments["values"].grad[~batch.loss_mask] == 0).all()
        return output.loss.detach(), output.sums.stacked(), arguments["values"].grad

    for clean, dirty in zip(outcome(False), outcome(True), strict=True):
        assert clean.isfinite().all() and torch.equal(clean, dirty)


def test_explained_variance_without_variance_is_nan() -> None:
    batch = ragged([3], [1])
    arguments = arguments_of(batch, 0) | {"returns": torch.full((4,), 0.1)}
    assert math.isnan(explained_variance(value_loss(**arguments, config=ValueLossConfig()).sums))
    nothing = ValueLossSums.from_stacked(torch.zeros(len(fields(ValueLossSums))))
    assert math.isnan(explained_variance(nothing))


def test_explained_variance_is_one_if_exact_and_zero_if_constant() -> None:
    batch = random_ragged(0)
    arguments = arguments_of(batch, 0)
    for values, expected in (
        (arguments["returns"], 1.0),
        (torch.ones(batch.num_tokens, dtype=torch.float64), 0.0),
    ):
        sums = value_loss(**arguments | {"values": values}, config=ValueLossConfig()).sums
        assert explained_variance(sums) == pytest.approx(expected, abs=1e-12)
