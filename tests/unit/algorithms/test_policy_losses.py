"""Every policy loss against its paper's formula, in value and gradient, and in every split."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms.aggregation import AggregationMode, Denominators, Segments
from mcore_rl.algorithms.estimators import GAE, Discount
from mcore_rl.algorithms.kl import MAX_LOG_RATIO, KLParameters
from mcore_rl.algorithms.policy_losses import Clip, DualClip, Gate, PolicyLossConfig
from mcore_rl.algorithms.recipes import Recipe
from mcore_rl.algorithms.total_loss import PolicyLossSums, policy_loss_total
from mcore_rl.common.errors import UsageError
from tests.unit.algorithms.losses_reference import (
    REFERENCES,
    aggregate,
    aggregation_of,
    denominators_of,
    loss_config,
    per_sample,
    reference_kl,
)
from tests.unit.algorithms.ragged import Ragged, normal, ragged, random_ragged, spoilt

CONFIGS = {
    "ppo_clip": loss_config(),
    "clip_higher": loss_config(clip_eps_lower=0.1, clip_eps_upper=0.4),
    "dual_clip": loss_config(dual_clip=1.1),
    "gspo": loss_config("gspo", clip_eps_lower=0.05, clip_eps_upper=0.04),
    "gspo_dual_clip": loss_config("gspo", clip_eps_lower=0.05, dual_clip=1.02),
    "cispo": loss_config("cispo", clip_eps_lower=1.0, clip_eps_upper=0.2),
    "cispo_both": loss_config("cispo", clip_eps_lower=0.1, clip_eps_upper=0.2),
    "gmpo": loss_config("gmpo", clip_eps_lower=0.2, clip_eps_upper=0.1),
    "sapo": loss_config("sapo"),
    "sapo_steep": loss_config("sapo", sapo_temperature_positive=0.5, sapo_temperature_negative=3.0),
    "policy_gradient": loss_config("policy_gradient"),
}
TERMS = {
    "surrogate": {},
    "k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "k3": {"kl_coef": 0.3, "kl_estimator": "k3"},
    "entropy": {"entropy_coef": 0.05},
    "all": {"kl_coef": 0.1, "kl_estimator": "k3", "entropy_coef": 0.01},
}


def arguments_of(
    batch: Ragged,
    seed: int,
    dtype: torch.dtype = torch.float64,
    denominators: Denominators | None = None,
) -> dict:
    """One advantage per response; log-probs that move by about 0.3."""
    log_probs = -normal(batch, seed).abs() - 0.1
    per_response = np.random.default_rng(seed).standard_normal(len(batch.lengths))
    advantages = torch.from_numpy(per_response).repeat_interleave(batch.lengths)
    tensors = {
        "log_probs": log_probs,
        "entropy": normal(batch, seed + 1).abs(),
        "old_log_probs": log_probs + 0.3 * normal(batch, seed + 2),
        "ref_log_probs": log_probs + 0.3 * normal(batch, seed + 3),
        "advantages": advantages,
        "weights": normal(batch, seed + 4).exp(),
    }
    arguments = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    arguments["log_probs"].requires_grad_()
    arguments["entropy"].requires_grad_()
    return arguments | {
        "loss_mask": batch.loss_mask,
        "lengths": batch.lengths,
        "denominators": denominators or denominators_of(batch),
    }


def reference(arguments: dict, batch: Ragged, config: PolicyLossConfig) -> torch.Tensor:
    columns = ("log_probs", "old_log_probs", "advantages", "ref_log_probs", "entropy", "weights")
    samples = zip(*(per_sample(batch, arguments[name]) for name in columns), strict=True)
    losses = []
    for now, old, a, ref, entropy, weights in samples:
        objectives = REFERENCES[config.policy_loss](now, old, a, config.parameters) if now else []
        losses.append(
            [
                -weight * objective
                + config.kl_coef * reference_kl(n, r, config.kl_estimator)
                - config.entropy_coef * h
                for weight, objective, n, r, h in zip(
                    weights, objectives, now, ref, entropy, strict=True
                )
            ]
        )
    return aggregate(losses, config.aggregation.mode, config.aggregation.constant)


def gradients(loss: torch.Tensor, arguments: dict) -> list[torch.Tensor]:
    leaves = [arguments["log_probs"], arguments["entropy"]]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, found, strict=True)
    ]


def assert_equals_reference(batch: Ragged, seed: int, config: PolicyLossConfig) -> None:
    arguments = arguments_of(batch, seed)
    if config.policy_loss in ("gspo", "gmpo"):  # a weight per response keeps J one number
        segments = Segments.of(batch.lengths, batch.loss_mask)
        arguments["weights"] = segments.to_tokens(segments.mean(arguments["weights"]))
    output = policy_loss_total(**arguments, config=config)
    expected = reference(arguments, batch, config)
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=1e-12)
    for actual, wanted in zip(
        gradients(output.loss, arguments), gradients(expected, arguments), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", get_args(AggregationMode))
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_loss_and_gradient_equal_formula(config: PolicyLossConfig, mode: str, seed: int) -> None:
    batch = random_ragged(seed, gaps=seed == 2)
    assert_equals_reference(batch, seed, replace(config, aggregation=aggregation_of(mode)))


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_kl_and_entropy_are_aggregated_like_surrogate(mode: str, terms: dict) -> None:
    config = loss_config(aggregation=aggregation_of(mode), **terms)
    assert_equals_reference(random_ragged(7), 7, config)


def test_gspo_with_advantage_per_token_equals_token_variant() -> None:
    batch = random_ragged(2)
    arguments = arguments_of(batch, 2) | {"advantages": normal(batch, 9), "weights": None}
    config = loss_config(
        "gspo", aggregation_of("seq_mean_token_mean"), clip_eps_lower=0.05, clip_eps_upper=0.05
    )
    output = policy_loss_total(**arguments, config=config)
    objectives = []
    for tokens in batch.loss_tokens:
        now, old = arguments["log_probs"][tokens], arguments["old_log_probs"][tokens]
        sequence = (now - old).mean().exp().detach() if tokens else None
        row = []
        for k, j in enumerate(tokens):
            ratio = sequence * now[k].exp() / now[k].exp().detach()
            a = arguments["advantages"][j]
            row.append(-min(ratio * a, ratio.clamp(0.95, 1.05) * a))
        objectives.append(row)
    expected = aggregate(objectives, "seq_mean_token_mean", None)
    torch.testing.assert_close(output.loss, expected)
    for actual, wanted in zip(
        gradients(output.loss, arguments), gradients(expected, arguments), strict=True
    ):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_sums_equal_loops(config: PolicyLossConfig) -> None:
    config = replace(config, kl_coef=0.1, aggregation=aggregation_of("seq_mean_token_mean"))
    batch = random_ragged(4)
    arguments = arguments_of(batch, 4)
    sums = policy_loss_total(**arguments, config=config).sums
    expected = dict.fromkeys([field.name for field in fields(PolicyLossSums)], 0.0)
    columns = ("log_probs", "old_log_probs", "advantages")
    samples = zip(*(per_sample(batch, arguments[name]) for name in columns), strict=True)
    own = config.parameters
    low = 1 - getattr(own, "clip_eps_lower", 1)
    high = 1 + getattr(own, "clip_eps_upper", math.inf)
    for tokens, (now, old, a) in zip(batch.loss_tokens, samples, strict=True):
        objectives = REFERENCES[config.policy_loss](now, old, a, config.parameters) if now else []
        logs = [(n - o).item() for n, o in zip(now, old, strict=True)]
        for k, j in enumerate(tokens):
            ratio, adv = math.exp(logs[k]), float(a[k])
            ref = arguments["ref_log_probs"][j]
            expected["num_tokens"] += 1
            expected["policy_loss"] -= (objectives[k] * arguments["weights"][j]).item()
            expected["kl"] += reference_kl(now[k], ref, "k3").item()
            expected["entropy"] += arguments["entropy"][j].item()
            expected["ratio"] += ratio
            counted = math.exp(sum(logs) / len(logs)) if config.policy_loss == "gspo" else ratio
            lower, upper = adv < 0 and counted < low, adv > 0 and counted > high
            if getattr(own, "dual_clip", None) is not None:
                upper = upper or (adv < 0 and counted > own.dual_clip)
            if config.policy_loss == "gmpo":
                lower = adv < 0 and logs[k] < -own.clip_eps_lower
                upper = adv > 0 and logs[k] > own.clip_eps_upper
            if config.policy_loss == "cispo":
                lower, upper = ratio < low, ratio > high
            if config.policy_loss in ("sapo", "policy_gradient"):
                lower = upper = False
            expected["clipped_lower"] += lower
            expected["clipped_upper"] += upper
    without = replace(config, kl_coef=0.0, entropy_coef=0.0)
    expected["aggregated"] = reference(arguments, batch, without).item()
    for name, value in expected.items():
        assert getattr(sums, name).item() == pytest.approx(value, rel=1e-12), name


@given(
    seed=st.integers(0, 1000),
    config=st.sampled_from(sorted(CONFIGS)),
    mode=st.sampled_from(get_args(AggregationMode)),
    num_parts=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_loss_gradient_and_sums_add_up_over_every_split(
    seed: int, config: str, mode: str, num_parts: int
) -> None:
    batch = random_ragged(seed)
    chosen = replace(
        CONFIGS[config], aggregation=aggregation_of(mode), kl_coef=0.1, entropy_coef=0.01
    )
    arguments = arguments_of(batch, seed)
    whole = policy_loss_total(**arguments, config=chosen)
    expected = gradients(whole.loss, arguments)
    order = np.random.default_rng(seed).permutation(len(batch.lengths))
    loss, sums = 0.0, []
    actual = [torch.zeros_like(gradient) for gradient in expected]
    for rows in np.array_split(order, num_parts):
        part, index = batch.part(rows.tolist())
        names = (
            "log_probs", "entropy", "old_log_probs", "ref_log_probs", "advantages", "weights",
        )  # fmt: skip
        sliced = {name: arguments[name][index] for name in names}
        output = policy_loss_total(
            **sliced,
            loss_mask=part.loss_mask,
            lengths=part.lengths,
            denominators=arguments["denominators"],
            config=chosen,
        )
        loss += output.loss
        sums.append(output.sums)
    for total, gradient in zip(actual, gradients(loss, arguments), strict=True):
        total += gradient
    torch.testing.assert_close(loss, whole.loss, rtol=1e-12, atol=1e-14)
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    added = sums[0]
    for more in sums[1:]:
        added = added + more
    torch.testing.assert_close(added.stacked(), whole.sums.stacked(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_float32_equals_float64(config: PolicyLossConfig) -> None:
    batch = random_ragged(1)
    results = []
    for dtype in (torch.float32, torch.float64):
        arguments = arguments_of(batch, 1, dtype)
        output = policy_loss_total(**arguments, config=replace(config, **TERMS["all"]))
        assert output.loss.dtype == output.sums.kl.dtype == dtype
        stacked = output.sums.stacked().double()
        results.append(
            (output.loss.double(), gradients(output.loss, arguments)[0].double(), stacked)
        )
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single, double, rtol=1e-5, atol=1e-6)


# Ratio and advantage against hand-made loss and d loss / d log_prob; clip to [0.8, 1.3].
REGIONS = {
    "inside, good": (1.1, 2.0, -2.2, -2.2, None),
    "inside, bad": (0.9, -2.0, 1.8, 1.8, None),
    "above, good: clipped": (1.5, 2.0, -2.6, 0.0, "clipped_upper"),
    "above, bad: pulled back": (1.5, -2.0, 3.0, 3.0, None),
    "below, good: pulled back": (0.5, 2.0, -1.0, -1.0, None),
    "below, bad: clipped": (0.5, -2.0, 1.6, 0.0, "clipped_lower"),
    "untouched policy": (1.0, 2.0, -2.0, -2.0, None),
    "above, no advantage": (1.5, 0.0, 0.0, 0.0, None),
    "overflow, good: clipped": (math.inf, 2.0, -2.6, 0.0, "clipped_upper"),
    "overflow, bad: bounded": (math.inf, -2.0, 2 * math.exp(MAX_LOG_RATIO), 0.0, None),
    "underflow, good: no pull left": (0.0, 2.0, 0.0, 0.0, None),
    "underflow, bad: clipped": (0.0, -2.0, 1.6, 0.0, "clipped_lower"),
}
DUAL_CLIP_REGIONS = {  # with dual_clip 2
    "below the bound, bad": (1.5, -2.0, 3.0, 3.0, None),
    "above the bound, bad: clipped": (2.5, -2.0, 4.0, 0.0, "clipped_upper"),
    "overflow, bad: clipped": (math.inf, -2.0, 4.0, 0.0, "clipped_upper"),
    "above the bound, good: clipped before": (2.5, 2.0, -2.6, 0.0, "clipped_upper"),
    "below, bad: clipped": (0.5, -2.0, 1.6, 0.0, "clipped_lower"),
}


@pytest.mark.parametrize(
    "region, dual_clip, name",
    [
        *((region, None, name) for region in REGIONS.values() for name in ("ppo_clip", "gspo")),
        *((region, 2.0, "ppo_clip") for region in DUAL_CLIP_REGIONS.values()),
    ],
)
def test_loss_and_gradient_equal_values_by_hand_in_each_clip_region(
    region: tuple, dual_clip: float | None, name: str
) -> None:
    ratio, advantage, expected_loss, expected_gradient, expected_count = region
    log_ratio = {math.inf: 1000.0, 0.0: -1000.0}.get(ratio) or math.log(ratio)
    batch = ragged([1], [1])
    old_log_probs = torch.full((2,), -1500.0 if abs(log_ratio) == 1000 else -1.0)
    log_probs = (old_log_probs + log_ratio).requires_grad_()
    output = policy_loss_total(
        log_probs,
        torch.zeros(2),
        old_log_probs=old_log_probs,
        advantages=torch.full((2,), advantage),
        loss_mask=batch.loss_mask,
        lengths=batch.lengths,
        denominators=Denominators(1, 1),
        config=loss_config(name, clip_eps_lower=0.2, clip_eps_upper=0.3, dual_clip=dual_clip),
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected_loss, rel=1e-6)
    assert log_probs.grad.tolist() == [pytest.approx(expected_gradient, rel=1e-6), 0.0]
    for count in ("clipped_lower", "clipped_upper"):
        assert getattr(output.sums, count).item() == (count == expected_count)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo", "cispo", "sapo"])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_loss_and_gradient_are_finite_for_distant_policies(
    name: str, advantage: float, log_ratio: float
) -> None:
    batch = ragged([2], [1])
    log_probs = torch.full((3,), -1500.0).requires_grad_()
    output = policy_loss_total(
        log_probs,
        torch.zeros(3),
        old_log_probs=log_probs.detach() - torch.tensor([log_ratio, 0.0, 0.0]),
        advantages=torch.full((3,), advantage),
        loss_mask=batch.loss_mask,
        lengths=batch.lengths,
        denominators=denominators_of(batch),
        config=loss_config(name),
    )
    output.loss.backward()
    assert output.loss.isfinite() and log_probs.grad.isfinite().all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_positions_do_not_matter(garbage: float, config: PolicyLossConfig) -> None:
    batch = random_ragged(6, gaps=True)

    def outcome(dirty: bool):
        arguments = arguments_of(batch, 6, torch.float32)
        if dirty:
            for value in arguments.values():
                if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                    value.data = spoilt(batch, value.data, garbage)
        output = policy_loss_total(**arguments, config=replace(config, **TERMS["all"]))
        # Not even in between: detect_anomaly, by which users hunt nans, would stop at one.
        with torch.autograd.detect_anomaly(check_nan=True):
            output.loss.backward()
        found = [arguments[name].grad for name in ("log_probs", "entropy")]
        assert all((gradient[~batch.loss_mask] == 0).all() for gradient in found)
        return output.loss.detach(), output.sums.stacked(), *found

    for clean, dirty in zip(outcome(False), outcome(True), strict=True):
        assert clean.isfinite().all() and torch.equal(clean, dirty)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_loss_and_gradient_are_zero_without_loss_tokens(config: PolicyLossConfig) -> None:
    batch = ragged([0, 0], [2, 3])
    arguments = arguments_of(batch, 0, torch.float32, Denominators(17.0, 5.0))
    output = policy_loss_total(**arguments, config=replace(config, **TERMS["all"]))
    output.loss.backward()
    assert output.loss.item() == 0 and (arguments["log_probs"].grad == 0).all()
    assert (output.sums.stacked() == 0).all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_nan_in_loss_token_is_visible(config: PolicyLossConfig) -> None:
    batch = random_ragged(1)
    arguments = arguments_of(batch, 1)
    arguments["log_probs"].data[max(batch.loss_tokens, key=len)[0]] = math.nan
    output = policy_loss_total(**arguments, config=config)
    assert output.loss.isnan()


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo", "cispo", "sapo", "policy_gradient"])
def test_first_update_has_gradient_of_reinforce(name: str) -> None:
    batch = random_ragged(3)
    arguments = arguments_of(batch, 3) | {"weights": None}
    arguments["old_log_probs"] = arguments["log_probs"].detach()
    aggregation = aggregation_of("seq_mean_token_mean")
    found = []
    for loss in (name, "policy_gradient"):
        config = loss_config(loss, aggregation)
        output = policy_loss_total(**arguments, config=config)
        found.append(gradients(output.loss, arguments)[0])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_weights_multiply_only_surrogate_and_are_detached() -> None:
    batch = random_ragged(3)
    arguments = arguments_of(batch, 3)
    weights = arguments.pop("weights").requires_grad_()
    config = loss_config(**TERMS["all"])
    outputs = [
        policy_loss_total(**arguments, weights=given, config=config)
        for given in (weights, torch.zeros_like(weights), None)
    ]
    assert torch.autograd.grad(outputs[0].loss, [weights], allow_unused=True) == (None,)
    rest = (0.1 * outputs[1].sums.kl - 0.01 * outputs[1].sums.entropy) / outputs[1].sums.num_tokens
    torch.testing.assert_close(outputs[1].loss.detach(), rest)
    assert outputs[1].sums.policy_loss == 0
    ones = policy_loss_total(**arguments, weights=torch.ones_like(weights), config=config)
    assert torch.equal(outputs[2].loss, ones.loss)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_off_policy_sequences_of_negative_advantage_have_no_gradient(name: str) -> None:
    """The mask M of DeepSeek-V3.2, by loops: 0 where A < 0 and the mean of log(pi_old / pi) is
    above delta; pi_old is what the engine sampled from."""
    batch, threshold = random_ragged(5, num_samples=24), 0.1
    arguments = arguments_of(batch, 5)
    rollout = arguments["log_probs"].detach() + 0.3 * normal(batch, 6)
    for tokens, shift in zip(batch.loss_tokens, np.linspace(-0.4, 0.4, 24), strict=True):
        rollout[tokens] += shift
    keep, dropped = torch.ones(batch.num_tokens, dtype=torch.float64), 0
    for tokens in batch.loss_tokens:
        ratios = [(rollout[j] - arguments["log_probs"][j]).item() for j in tokens]
        if tokens and arguments["advantages"][tokens[0]] < 0 and np.mean(ratios) > threshold:
            keep[tokens], dropped = 0.0, dropped + len(tokens)
    assert 0 < dropped < int(batch.loss_mask.sum()) / 2
    config = loss_config(name, kl_coef=0.3)
    masked = policy_loss_total(
        **arguments,
        rollout_log_probs=spoilt(batch, rollout, math.nan),
        config=replace(config, off_policy_threshold=threshold),
    )
    arguments["weights"] = arguments["weights"] * keep
    expected = policy_loss_total(**arguments, config=config)
    assert torch.equal(masked.loss, expected.loss) and masked.sums.off_policy == dropped
    for found, wanted in zip(
        gradients(masked.loss, arguments), gradients(expected.loss, arguments), strict=True
    ):
        assert torch.equal(found, wanted)


def test_sums_are_detached_and_stack_both_ways() -> None:
    batch = random_ragged(0)
    sums = policy_loss_total(**arguments_of(batch, 0), config=loss_config()).sums
    again = PolicyLossSums.from_stacked(sums.stacked())
    for field in fields(PolicyLossSums):
        value = getattr(sums, field.name)
        assert value.shape == () and not value.requires_grad
        assert getattr(again, field.name) == value
        assert getattr(sums + again, field.name) == 2 * value


def test_loss_without_coefficients_needs_no_reference() -> None:
    batch = random_ragged(0)
    arguments = arguments_of(batch, 0)
    del arguments["ref_log_probs"]
    output = policy_loss_total(**arguments, config=loss_config())
    output.loss.backward()
    assert output.sums.kl == 0 and arguments["entropy"].grad is None


def test_kl_coef_without_reference_is_refused() -> None:
    batch = random_ragged(0)
    arguments = arguments_of(batch, 0)
    del arguments["ref_log_probs"]
    with pytest.raises(RuntimeError, match="kl_coef is 0.3 but there are no ref_log_probs"):
        policy_loss_total(**arguments, config=loss_config(kl_coef=0.3))


@pytest.mark.parametrize(
    "declaration, field, value, flag",
    [
        (Clip, "clip_eps_lower", 0.0, "--rl-clip-eps-lower 0.0"),
        (Clip, "clip_eps_lower", 1.5, "--rl-clip-eps-lower 1.5"),
        (DualClip, "clip_eps_lower", math.nan, "--rl-clip-eps-lower nan"),
        (Clip, "clip_eps_upper", -0.2, "--rl-clip-eps-upper -0.2"),
        (DualClip, "clip_eps_upper", math.inf, "--rl-clip-eps-upper inf"),
        (DualClip, "dual_clip", 1.0, "--rl-dual-clip 1.0"),
        (DualClip, "dual_clip", math.nan, "--rl-dual-clip nan"),
        (Gate, "sapo_temperature_positive", 0.0, "--rl-sapo-temperature-positive 0.0"),
        (Gate, "sapo_temperature_negative", math.inf, "--rl-sapo-temperature-negative inf"),
        (KLParameters, "kl_coef", -0.1, "--rl-kl-coef -0.1"),
        (KLParameters, "kl_coef", math.nan, "--rl-kl-coef nan"),
        (KLParameters, "kl_estimator", "k4", "--rl-kl-estimator k4"),
        (KLParameters, "kl_clamp", 0.0, "--rl-kl-clamp 0.0"),
        (Recipe, "off_policy_threshold", 0.0, "--rl-off-policy-threshold 0.0"),
        (Recipe, "reward_clip", 0.0, "--rl-reward-clip 0.0"),
        (Recipe, "missing_eos_penalty", -1.0, "--rl-missing-eos-penalty -1.0"),
        (Recipe, "old_log_probs", "engine", "--rl-old-log-probs engine"),
        (Recipe, "entropy_coef", -1.0, "--rl-entropy-coef -1.0"),
        (Recipe, "loss_aggregation", "token_sum", "--rl-loss-aggregation token_sum"),
        (Recipe, "loss_constant", 0.0, "--rl-loss-constant 0.0"),
        (Recipe, "loss_constant", math.nan, "--rl-loss-constant nan"),
        (Recipe, "value_clip_eps", 0.0, "--rl-value-clip-eps 0.0"),
        (Recipe, "value_clip_eps", -1.0, "--rl-value-clip-eps -1.0"),
        (Recipe, "value_clip_eps", math.nan, "--rl-value-clip-eps nan"),
        (Discount, "gamma", 1.1, "--rl-gamma 1.1"),
        (GAE, "gamma", math.nan, "--rl-gamma nan"),
        (GAE, "gae_lambda", -0.1, "--rl-gae-lambda -0.1"),
    ],
)
def test_value_out_of_range_is_refused_with_flag(
    declaration: type, field: str, value: object, flag: str
) -> None:
    with pytest.raises(UsageError) as refused:
        declaration(**{field: value})
    assert refused.value.flag == flag and refused.value.remedy
    assert Recipe(value_clip_eps=math.inf).value_clip_eps == math.inf
