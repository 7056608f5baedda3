"""Corrections against loops over tokens, and their metrics against plain means."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms.mismatch import (
    CORRECTIONS,
    Band,
    Cap,
    CapAndBand,
    MismatchConfig,
    MismatchSums,
    mismatch_weights,
)
from mcore_rl.common.errors import UsageError
from tests.unit.algorithms.ragged import Ragged, normal, ragged, random_ragged, spoilt

CONFIGS = {
    "none": MismatchConfig(),
    "token_tis": MismatchConfig("token_tis", Cap(1.2)),
    "sequence_tis": MismatchConfig("sequence_tis", Cap(1.5)),
    "icepop": MismatchConfig("icepop", Band(0.8, 1.3)),
    "geometric_rejection": MismatchConfig("geometric_rejection", Band(0.9, 1.1)),
    "product_rejection": MismatchConfig("product_rejection", Band(0.5, 1.5)),
    "token_tis_floor": MismatchConfig("token_tis", Cap(1.2, 0.8)),
    "token_tis_geometric": MismatchConfig(
        "token_tis_geometric", CapAndBand(mismatch_cap=1.2, mismatch_low=0.9, mismatch_high=1.1)
    ),
    "token_tis_product": MismatchConfig(
        "token_tis_product",
        CapAndBand(mismatch_cap=1.2, mismatch_floor=0.9, mismatch_low=0.5, mismatch_high=1.5),
    ),
    "token_tis_veto": MismatchConfig("token_tis", Cap(1.2, mismatch_veto=0.6)),
    "icepop_veto": MismatchConfig("icepop", Band(0.8, 1.3, mismatch_veto=0.6)),
}


def log_probs_of(batch: Ragged, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    old = -normal(batch, seed).abs()
    return old, old + 0.3 * normal(batch, seed + 1)


def reference(ratios: list[float], config: MismatchConfig) -> list[tuple[float, bool, bool]]:
    """(weight, rejected, truncated) of every token of one response."""
    product = math.prod(ratios)
    own, name = config.parameters, config.correction
    veto = getattr(own, "mismatch_veto", None) or 0.0
    rows = []
    for ratio in ratios:
        weight, rejected, truncated = 1.0, False, False
        if isinstance(own, Cap):
            raw = product if name == "sequence_tis" else ratio
            weight = max(own.mismatch_floor, min(raw, own.mismatch_cap))
            truncated = not own.mismatch_floor <= raw <= own.mismatch_cap
        if name == "icepop":
            weight = ratio
        if isinstance(own, Band):
            decides = ratio
            if "product" in name:
                decides = product
            if "geometric" in name:
                decides = product ** (1 / len(ratios))
            rejected = not own.mismatch_low <= decides <= own.mismatch_high
        rejected = rejected or any(each < veto for each in ratios)
        rows.append((0.0 if rejected else weight, rejected, truncated))
    return rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_weights_and_metrics_equal_loops(config: MismatchConfig, seed: int) -> None:
    batch = random_ragged(seed, gaps=seed == 2)
    old, rollout = log_probs_of(batch, seed)
    found = mismatch_weights(old.requires_grad_(), rollout, batch.loss_mask, batch.lengths, config)
    assert not found.weights.requires_grad
    expected, rows, kl, apart = torch.ones_like(old), [], [], []
    for tokens in batch.loss_tokens:
        ratios = [math.exp(old[j].item() - rollout[j].item()) for j in tokens]
        of_response = reference(ratios, config)
        rows += of_response
        kl += [ratio - 1 - math.log(ratio) for ratio in ratios]
        apart += [abs(math.log(ratio)) for ratio in ratios]
        for j, (weight, _, _) in zip(tokens, of_response, strict=True):
            expected[j] = weight
    torch.testing.assert_close(found.weights, expected.detach(), rtol=1e-12, atol=1e-14)
    weights = [row[0] for row in rows]
    if config.correction != "none":
        assert len(set(weights)) > 1, "every weight is the same"
    metrics = {
        "masked_share": np.mean([row[1] for row in rows]),
        "truncated_share": np.mean([row[2] for row in rows]),
        "mean_weight": np.mean(weights),
        "effective_sample_size": sum(weights) ** 2 / (len(rows) * sum(w * w for w in weights)),
        "kl": np.mean(kl),
        "mean_abs_difference": np.mean(apart),
    }
    assert found.sums.metrics() == pytest.approx(metrics, rel=1e-10)


@given(seed=st.integers(0, 1000), name=st.sampled_from(sorted(CONFIGS)), parts=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_weights_and_sums_do_not_depend_on_the_split(seed: int, name: str, parts: int) -> None:
    batch = random_ragged(seed)
    old, rollout = log_probs_of(batch, seed)
    whole = mismatch_weights(old, rollout, batch.loss_mask, batch.lengths, CONFIGS[name])
    order = np.random.default_rng(seed).permutation(len(batch.lengths))
    sums: list[MismatchSums] = []
    for rows in np.array_split(order, parts):
        part, index = batch.part(rows.tolist())
        found = mismatch_weights(
            old[index], rollout[index], part.loss_mask, part.lengths, CONFIGS[name]
        )
        assert torch.equal(found.weights, whole.weights[index])
        sums.append(found.sums)
    added = sums[0]
    for more in sums[1:]:
        added = added + more
    torch.testing.assert_close(added.stacked(), whole.sums.stacked(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_positions_do_not_matter(garbage: float, config: MismatchConfig) -> None:
    batch = random_ragged(3, gaps=True)
    old, rollout = log_probs_of(batch, 3)
    clean = mismatch_weights(old, rollout, batch.loss_mask, batch.lengths, config)
    spoilt_inputs = spoilt(batch, old, garbage), spoilt(batch, rollout, garbage)
    dirty = mismatch_weights(*spoilt_inputs, batch.loss_mask, batch.lengths, config)
    assert torch.equal(clean.weights, dirty.weights) and clean.weights.isfinite().all()
    assert torch.equal(clean.sums.stacked(), dirty.sums.stacked())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_nan_in_loss_token_is_visible(config: MismatchConfig) -> None:
    batch = ragged([3, 2], [1, 1])
    old, rollout = log_probs_of(batch, 0)
    rollout = rollout.clone()
    rollout[0] = math.nan
    found = mismatch_weights(old, rollout, batch.loss_mask, batch.lengths, config)
    assert found.sums.kl.isnan()
    if not isinstance(config.parameters, Band) and config.correction != "none":
        assert found.weights[0].isnan()
    elif config.correction != "none":
        assert found.weights[0] == 0


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_equal_log_probs_need_no_correction(correction: str) -> None:
    batch = random_ragged(0)
    old, _ = log_probs_of(batch, 0)
    config = MismatchConfig(correction, CORRECTIONS[correction])
    found = mismatch_weights(old, old.clone(), batch.loss_mask, batch.lengths, config)
    assert (found.weights == 1).all()
    ones = dict.fromkeys(["mean_weight", "effective_sample_size"], 1.0)
    zeros = ["masked_share", "truncated_share", "kl", "mean_abs_difference"]
    assert found.sums.metrics() == dict.fromkeys(zeros, 0.0) | ones


def test_product_of_long_response_is_finite() -> None:
    batch = ragged([3000], [1])
    old = torch.zeros(batch.num_tokens)
    found = mismatch_weights(
        old, old - 1.0, batch.loss_mask, batch.lengths, MismatchConfig("sequence_tis", Cap(1e12))
    )
    assert found.weights.isfinite().all() and found.sums.stacked().isfinite().all()


def test_metrics_of_no_tokens_are_zero() -> None:
    batch = ragged([0], [2])
    empty = torch.zeros(batch.num_tokens)
    found = mismatch_weights(empty, empty, batch.loss_mask, batch.lengths, MismatchConfig())
    assert set(found.sums.metrics().values()) == {0.0}


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Cap(0.0), "--rl-mismatch-cap 0.0"),
        (lambda: Cap(math.inf), "--rl-mismatch-cap inf"),
        (lambda: Cap(mismatch_floor=1.5), "--rl-mismatch-floor 1.5"),
        (lambda: Cap(0.5, 0.8), "--rl-mismatch-floor 0.8 is above --rl-mismatch-cap 0.5"),
        (lambda: CapAndBand(mismatch_cap=0.5, mismatch_floor=0.8), "--rl-mismatch-floor 0.8 is"),
        (lambda: Band(mismatch_veto=1.0), "--rl-mismatch-veto 1.0"),
        (lambda: CapAndBand(mismatch_low=3.0, mismatch_high=2.0), "--rl-mismatch-low 3.0 and"),
        (lambda: Band(2.0, 2.0), "--rl-mismatch-low 2.0 and"),
        (lambda: Band(-1.0), "--rl-mismatch-low -1.0 and"),
        (lambda: Band(mismatch_high=math.nan), "--rl-mismatch-low 0.5 and .*-high nan"),
    ],
)
def test_bounds_out_of_range_are_refused(build, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        build()
