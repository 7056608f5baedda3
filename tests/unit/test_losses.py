"""The policy loss against loops over Python floats, and its independence of every split."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from mcore_rl.errors import UsageError
from mcore_rl.log_probs import vocab_parallel_log_probs
from mcore_rl.losses import (
    MAX_LOG_RATIO,
    PolicyLossConfig,
    PolicyLossSums,
    clipped_surrogate,
    kl_estimate,
    policy_loss,
)
from mcore_rl.packing import (
    build_train_batch,
    shard_for_data_parallel,
    split_micro_batches,
)
from mcore_rl.types import Prompt, Rollout, ScoredRollout, TrainBatch

CONFIGS = {
    "plain": PolicyLossConfig(),
    "clip_higher": PolicyLossConfig(clip_eps_lower=0.1, clip_eps_upper=0.4),
    "k1": PolicyLossConfig(kl_coef=0.3, kl_estimator="k1"),
    "k2": PolicyLossConfig(kl_coef=0.3, kl_estimator="k2"),
    "k3": PolicyLossConfig(kl_coef=0.3, kl_estimator="k3"),
    "entropy": PolicyLossConfig(entropy_coef=0.05),
    "all": PolicyLossConfig(0.2, 0.28, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01),
}


def reference_kl(p: float, q: float, estimator: str) -> float:
    return {"k1": p - q, "k2": (p - q) ** 2 / 2, "k3": math.exp(q - p) - 1 - (q - p)}[estimator]


def reference_token_loss(
    now: float, old: float, ref: float, entropy: float, advantage: float, config: PolicyLossConfig
) -> float:
    ratio = math.exp(now - old)
    bounded = min(max(ratio, 1 - config.clip_eps_lower), 1 + config.clip_eps_upper)
    loss = -min(ratio * advantage, bounded * advantage)
    loss += config.kl_coef * reference_kl(now, ref, config.kl_estimator)
    return loss - config.entropy_coef * entropy


def random_arguments(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (6, 10)
    log_probs = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    others = [0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    tensors = {
        "log_probs": log_probs,
        "entropy": torch.rand(shape, generator=generator, dtype=torch.float64),
        "old_log_probs": log_probs + others[0],
        "ref_log_probs": log_probs + others[1],
        "advantages": torch.randn(shape[0], generator=generator, dtype=torch.float64),
    }
    arguments = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    arguments["log_probs"].requires_grad_()
    arguments["entropy"].requires_grad_()
    arguments["loss_mask"] = torch.rand(shape, generator=generator) < 0.6
    return arguments


def loss_tokens(arguments: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    return [(b, s) for b, s in np.ndindex(6, 10) if arguments["loss_mask"][b, s]]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_gradient_and_sums_equal_reference(config: PolicyLossConfig, seed: int) -> None:
    arguments = random_arguments(torch.float64, seed)
    output = policy_loss(**arguments, denominator=17.0, config=config)
    output.loss.backward()
    names = ("log_probs", "old_log_probs", "ref_log_probs", "entropy")
    loss, sums = 0.0, dict.fromkeys([field.name for field in fields(PolicyLossSums)], 0.0)
    gradients = {name: torch.zeros(6, 10, dtype=torch.float64) for name in ("log_probs", "entropy")}
    for b, s in loss_tokens(arguments):
        now, old, ref, entropy = (arguments[name][b, s].item() for name in names)
        advantage = arguments["advantages"][b].item()
        loss += reference_token_loss(now, old, ref, entropy, advantage, config) / 17
        step = 1e-6
        for name, (d_now, d_entropy) in {"log_probs": (step, 0), "entropy": (0, step)}.items():
            above, below = (
                reference_token_loss(
                    now + sign * d_now, old, ref, entropy + sign * d_entropy, advantage, config
                )
                for sign in (1, -1)
            )
            gradients[name][b, s] = (above - below) / (2 * step) / 17
        ratio = math.exp(now - old)
        sums["num_tokens"] += 1
        sums["policy_loss"] += reference_token_loss(
            now,
            old,
            now,
            0.0,
            advantage,
            PolicyLossConfig(config.clip_eps_lower, config.clip_eps_upper),
        )
        sums["kl"] += reference_kl(now, ref, config.kl_estimator)
        sums["entropy"] += entropy
        sums["ratio"] += ratio
        sums["clipped_lower"] += ratio < 1 - config.clip_eps_lower and advantage < 0
        sums["clipped_upper"] += ratio > 1 + config.clip_eps_upper and advantage > 0
    assert output.loss.item() == pytest.approx(loss, rel=1e-12)
    for name, expected in sums.items():
        assert getattr(output.sums, name).item() == pytest.approx(expected, rel=1e-12), name
    for name, expected in gradients.items():
        actual = arguments[name].grad
        if actual is None:  # a term without a coefficient stays out of the graph
            assert name == "entropy" and config.entropy_coef == 0
            actual = torch.zeros(6, 10, dtype=torch.float64)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)  # of the differences


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_float32_equals_float64(config: PolicyLossConfig) -> None:
    results = []
    for dtype in (torch.float32, torch.float64):
        arguments = random_arguments(dtype)
        output = policy_loss(**arguments, denominator=17.0, config=config)
        assert output.loss.dtype == output.sums.kl.dtype == dtype
        (gradient,) = torch.autograd.grad(output.loss, [arguments["log_probs"]])
        results.append((output.loss.double(), gradient.double(), output.sums.stacked().double()))
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


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_clip_regions(region: tuple[float, float, float, float, str | None]) -> None:
    ratio, advantage, expected_loss, expected_gradient, expected_count = region
    log_ratio = {math.inf: 1000.0, 0.0: -1000.0}.get(ratio) or math.log(ratio)
    old_log_probs = torch.full((1, 1), -1500.0 if abs(log_ratio) == 1000 else -1.0)
    log_probs = (old_log_probs + log_ratio).requires_grad_()
    output = policy_loss(
        log_probs,
        torch.zeros(1, 1),
        old_log_probs=old_log_probs,
        advantages=torch.tensor([advantage]),
        loss_mask=torch.ones(1, 1, dtype=torch.bool),
        denominator=1,
        config=PolicyLossConfig(clip_eps_lower=0.2, clip_eps_upper=0.3),
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected_loss, rel=1e-6)
    assert log_probs.grad.item() == pytest.approx(expected_gradient, rel=1e-6)
    for name in ("clipped_lower", "clipped_upper"):
        assert getattr(output.sums, name).item() == (name == expected_count)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_in_masked_positions_changes_no_bit(
    garbage: float, config: PolicyLossConfig
) -> None:
    def outcome(spoilt: bool):
        arguments = random_arguments(torch.float32)
        if spoilt:
            for name in ("log_probs", "entropy", "old_log_probs", "ref_log_probs"):
                arguments[name].data[~arguments["loss_mask"]] = garbage
        output = policy_loss(**arguments, denominator=17.0, config=config)
        # Not even in between: detect_anomaly, by which users hunt nans, would stop at one.
        with torch.autograd.detect_anomaly(check_nan=True):
            output.loss.backward()
        gradient = arguments["log_probs"].grad
        assert (gradient[~arguments["loss_mask"]] == 0).all()
        if config.entropy_coef > 0:
            assert (arguments["entropy"].grad[~arguments["loss_mask"]] == 0).all()
        return output.loss.detach(), output.sums.stacked(), gradient

    for clean, spoilt in zip(outcome(False), outcome(True), strict=True):
        assert clean.isfinite().all() and torch.equal(clean, spoilt)


def test_sample_without_loss_tokens_gives_zero_loss_and_gradient() -> None:
    arguments = random_arguments(torch.float32)
    arguments["loss_mask"][:] = False
    output = policy_loss(**arguments, denominator=17.0, config=CONFIGS["all"])
    output.loss.backward()
    assert output.loss.item() == 0 and (arguments["log_probs"].grad == 0).all()
    assert (output.sums.stacked() == 0).all()


def test_nan_in_a_loss_token_is_not_hidden() -> None:
    arguments = random_arguments(torch.float32)
    arguments["log_probs"].data[loss_tokens(arguments)[0]] = math.nan
    assert policy_loss(**arguments, denominator=17.0, config=CONFIGS["plain"]).loss.isnan()


def random_train_batch(num_samples: int) -> TrainBatch:
    rng = np.random.default_rng(0)
    scored = []
    for index in range(num_samples):
        prompt_ids, response_ids = (rng.integers(0, 19, rng.integers(1, 9)) for _ in range(2))
        rollout = Rollout(
            prompt=Prompt(index=index, text="", answer="", token_ids=prompt_ids),
            sample_index=0,
            text="",
            response_token_ids=response_ids,
            rollout_log_probs=-3 * rng.random(len(response_ids), dtype=np.float32),
            finish_reason="stop",
            weight_version=0,
        )
        scored.append(ScoredRollout(rollout=rollout, reward=0.0))
    advantages = rng.standard_normal(num_samples)
    return build_train_batch(scored, advantages, pad_token_id=0, multiple_of=4)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_loss_and_gradient_are_identical_for_every_split(
    dp_size: int, micro_batch_size: int
) -> None:
    """A toy policy (an embedding and an output layer) from token ids to parameter gradients."""
    num_samples, vocab_size = 24, 19
    batch = random_train_batch(num_samples)
    denominator = batch.loss_mask.sum()

    def outcome(micro_batches: list[TrainBatch]):
        generator = torch.Generator().manual_seed(0)
        embedding = torch.randn(vocab_size, 8, generator=generator, requires_grad=True)
        weight = torch.randn(vocab_size, 8, generator=generator, requires_grad=True)
        losses, sums = [], None
        for micro_batch in micro_batches:
            token_ids = micro_batch.token_ids
            log_probs, entropy = vocab_parallel_log_probs(
                embedding[token_ids].flatten(0, 1),
                weight,
                token_ids.roll(-1, dims=1).flatten(),
                vocab_start=0,
                vocab_size=vocab_size,
                tp_group=None,
                chunk_tokens=7,
            )
            output = policy_loss(
                log_probs.view_as(token_ids),
                entropy.view_as(token_ids),
                old_log_probs=micro_batch.rollout_log_probs,
                ref_log_probs=micro_batch.rollout_log_probs,
                advantages=micro_batch.advantages,
                loss_mask=micro_batch.loss_mask,
                denominator=denominator,
                config=CONFIGS["all"],
            )
            output.loss.backward()
            losses.append(output.loss.detach())
            sums = output.sums if sums is None else sums + output.sums
        assert sums.num_tokens == denominator
        return torch.stack(losses).sum(), sums.stacked(), embedding.grad, weight.grad

    split = [
        micro_batch
        for dp_rank in range(dp_size)
        for micro_batch in split_micro_batches(
            shard_for_data_parallel(batch, dp_rank, dp_size), micro_batch_size
        )
    ]
    assert len(split) == num_samples // micro_batch_size
    for whole, parts in zip(outcome([batch]), outcome(split), strict=True):
        assert (whole != 0).any()
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("p, q", [(-1.0, -1.0), (-0.5, -2.0), (-2.0, -0.5), (-9.0, -0.1)])
def test_kl_estimate_value_and_gradient(estimator: str, p: float, q: float) -> None:
    log_p = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(log_p, torch.tensor(q, dtype=torch.float64), estimator)
    estimate.backward()
    assert estimate.item() == pytest.approx(reference_kl(p, q, estimator), rel=1e-12)
    gradient = {"k1": 1.0, "k2": p - q, "k3": 1 - math.exp(q - p)}[estimator]
    assert log_p.grad.item() == pytest.approx(gradient, rel=1e-12)


def test_kl_estimates_have_the_expectations_that_the_docstring_states() -> None:
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


def test_k3_keeps_its_digits_for_nearly_equal_policies() -> None:
    log_p = torch.tensor([-0.3, -2.0, -8.0])
    log_q = log_p + torch.tensor([1e-3, -2e-3, 5e-4])
    expected = [
        math.expm1(q - p) - (q - p) for p, q in zip(log_p.tolist(), log_q.tolist(), strict=True)
    ]
    actual = kl_estimate(log_p, log_q, "k3").tolist()
    assert actual == pytest.approx(expected, rel=1e-3)  # exp(r) - 1 - r is off by 1e-1 here


def test_k3_is_bounded_for_a_token_that_the_policy_gave_up() -> None:
    log_p = torch.tensor([-1000.0], requires_grad=True)
    estimate = kl_estimate(log_p, torch.tensor([-1.0]), "k3")
    estimate.backward()
    assert estimate.item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-6)
    assert log_p.grad.item() == 0


def test_clipped_surrogate_takes_an_advantage_per_token() -> None:
    log_ratio = torch.tensor([[1.5, 1.5, 0.5]]).log()
    loss = clipped_surrogate(log_ratio, torch.tensor([[2.0, -2.0, -2.0]]), PolicyLossConfig())
    torch.testing.assert_close(loss, torch.tensor([[-2.4, 3.0, 1.6]]))


def test_sums_are_detached_and_stack_both_ways() -> None:
    sums = policy_loss(
        **random_arguments(torch.float32), denominator=17.0, config=CONFIGS["all"]
    ).sums
    again = PolicyLossSums.from_stacked(sums.stacked())
    for field in fields(PolicyLossSums):
        value = getattr(sums, field.name)
        assert value.shape == () and not value.requires_grad
        assert getattr(again, field.name) == value
        assert getattr(sums + again, field.name) == 2 * value


def test_loss_without_coefficients_needs_no_reference_and_gives_entropy_no_gradient() -> None:
    arguments = random_arguments(torch.float32)
    del arguments["ref_log_probs"]
    output = policy_loss(**arguments, denominator=17.0, config=CONFIGS["plain"])
    output.loss.backward()
    assert output.sums.kl == 0 and arguments["entropy"].grad is None


def test_kl_coef_without_reference_is_refused() -> None:
    arguments = random_arguments(torch.float32)
    del arguments["ref_log_probs"]
    with pytest.raises(RuntimeError, match="kl_coef is 0.3 but there are no ref_log_probs"):
        policy_loss(**arguments, denominator=17.0, config=CONFIGS["k1"])


@pytest.mark.parametrize("denominator", [0, -1.0, math.nan])
def test_denominator_that_is_not_positive_is_refused(denominator: float) -> None:
    with pytest.raises(RuntimeError, match="denominator is .*, expected a positive count"):
        policy_loss(
            **random_arguments(torch.float32), denominator=denominator, config=CONFIGS["plain"]
        )


@pytest.mark.parametrize(
    "field, value, flag",
    [
        ("clip_eps_lower", 0.0, "--rl-clip-eps-lower 0.0"),
        ("clip_eps_lower", 1.5, "--rl-clip-eps-lower 1.5"),
        ("clip_eps_lower", math.nan, "--rl-clip-eps-lower nan"),
        ("clip_eps_upper", -0.2, "--rl-clip-eps-upper -0.2"),
        ("clip_eps_upper", math.inf, "--rl-clip-eps-upper inf"),
        ("kl_coef", -0.1, "--rl-kl-coef -0.1"),
        ("kl_coef", math.nan, "--rl-kl-coef nan"),
        ("kl_estimator", "k4", "--rl-kl-estimator k4"),
        ("entropy_coef", -1.0, "--rl-entropy-coef -1.0"),
    ],
)
def test_config_out_of_range_is_a_usage_error_that_names_the_flag(
    field: str, value: object, flag: str
) -> None:
    with pytest.raises(UsageError, match=f"^{flag} "):
        PolicyLossConfig(**{field: value})
