"""Alarms on runs that are normal, that collapse, and that recover."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.observe.alarms import RULES, Alarm, Health
from mcore_rl.observe.options import AlarmOptions
from mcore_rl.trainer.recorder import HealthWatch

WINDOW = 5
MIB = 1 << 20
# field -> (normal values, abnormal values), as functions of the step
COURSES = {
    "alarm_reward_std": (lambda step: 0.4, lambda step: 0.0),
    "alarm_kl": (lambda step: 0.02 * step, lambda step: 5.0),
    "alarm_entropy": (lambda step: 2.0 - 0.02 * step, lambda step: 0.05),
    "alarm_response_tokens": (lambda step: 100 + step, lambda step: 900.0),
    "alarm_clip_fraction": (lambda step: 0.1, lambda step: 0.9),
    "alarm_mismatch": (lambda step: 1e-3, lambda step: 0.4),
    "alarm_grad_norm": (lambda step: 1.0 + 0.1 * (step % 3), lambda step: 50.0**step),
    "alarm_host_growth_mib": (
        lambda step: 1e9 + 1e5 * (step % 2),
        lambda step: 1e9 + 200 * MIB * step,
    ),
    "alarm_device_growth_mib": (lambda step: 8e9, lambda step: 8e9 + 100 * MIB * step),
    "alarm_expert_imbalance": (lambda step: 1.5, lambda step: 7.0),
    "alarm_unused_experts": (lambda step: 0.2, lambda step: 0.8),
    "alarm_tokens_per_second": (lambda step: 1000.0 - step, lambda step: 300.0),
}


def new_health(**changes: Any) -> Health:
    options = AlarmOptions(alarm_window=WINDOW, alarm_expert_imbalance=4.0)
    return Health(dataclasses.replace(options, **changes))


def alarms_of(health: Health, metric: str, values: list[float], start: int = 0) -> list[Alarm]:
    return [
        alarm
        for step, value in enumerate(values, start)
        for alarm in health.observe(step, {metric: value})
    ]


def test_thresholds_match_flags_and_rules() -> None:
    fields = {f.name for f in dataclasses.fields(AlarmOptions) if f.name.startswith("alarm_")}
    assert {rule.field for rule in RULES} == fields - {"alarm_window"} == COURSES.keys()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_rule_raises_one_alarm_after_normal_steps(rule) -> None:
    normal, abnormal = COURSES[rule.field]
    health = new_health()
    assert alarms_of(health, rule.metric, [normal(step) for step in range(40)]) == []
    alarms = alarms_of(
        health, rule.metric, [abnormal(step) for step in range(40, 40 + 3 * WINDOW)], 40
    )
    assert [alarm.rule for alarm in alarms] == [rule]
    assert 40 <= alarms[0].step < 40 + WINDOW
    assert rule.remedy in alarms[0].text and f"over {WINDOW} steps" in alarms[0].text
    assert "{" not in alarms[0].text
    assert list(health.active) == [rule.field]


def test_alarm_is_raised_again_only_after_recovery() -> None:
    health = new_health()
    abnormal, normal = [0.0] * WINDOW, [1.0] * WINDOW
    assert len(alarms_of(health, "reward/std", abnormal + abnormal)) == 1
    assert alarms_of(health, "reward/std", normal, 10) == [] and not health.active
    assert len(alarms_of(health, "reward/std", abnormal, 15)) == 1


def test_one_bad_step_raises_alarm_only_for_gradient() -> None:
    health = new_health()
    steps = [1.0] * 10 + [0.0] + [1.0] * 10
    assert alarms_of(health, "reward/std", steps) == []
    assert alarms_of(health, "grad_norm", [1.0] * 10 + [11.0] + [1.0] * 10)[0].step == 10


def test_steps_without_gradient_do_not_change_median() -> None:
    """All samples of such a step have equal rewards; the next step is not an outlier."""
    health = new_health()
    assert alarms_of(health, "grad_norm", [0.0, 0.3, 0.0] * 10) == []
    assert len(alarms_of(health, "grad_norm", [0.3, 0.3, 0.0, 0.3, 4.0], 30)) == 1


def test_resumed_run_keeps_window_except_of_machine_metrics() -> None:
    """On half as many ranks each has twice the memory; that is not growth."""
    speed = "throughput/rollout_tokens_per_second"
    before = {"memory/host_bytes": 2e10, speed: 1.0, "kl/ref": 9.0}
    earlier = dict.fromkeys(range(WINDOW - 1), before)
    watch = HealthWatch(AlarmOptions(alarm_window=WINDOW), earlier)
    metrics = {"memory/host_bytes": 4e10, speed: 0.3}
    watch.observe(WINDOW - 1, metrics)
    assert metrics["health/alarms"] == 0
    metrics["kl/ref"] = 9.0
    watch.observe(WINDOW, metrics)
    assert metrics["health/alarms"] == 1


def test_alarm_needs_full_window() -> None:
    health = new_health()
    assert alarms_of(health, "reward/std", [0.0] * (WINDOW - 1)) == []
    assert len(alarms_of(health, "reward/std", [0.0])) == 1


def test_threshold_of_0_disables_rule() -> None:
    for rule in RULES:
        health = new_health(**{rule.field: 0.0})
        abnormal = COURSES[rule.field][1]
        assert alarms_of(health, rule.metric, [abnormal(step) for step in range(20)]) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_missing_or_non_finite_values_raise_no_alarm(value) -> None:
    health = new_health()
    for step in range(20):
        metrics = {} if value is None else {rule.metric: value for rule in RULES}
        assert health.observe(step, metrics) == []


@given(seed=st.integers(0, 1000), noise=st.floats(0, 0.2))
def test_fluctuating_memory_raises_no_alarm(seed: int, noise: float) -> None:
    """Up and down by 20 MiB around a level, as allocators do."""
    rng = random.Random(seed)
    health = new_health(alarm_window=10)
    values = [2e9 + rng.uniform(-100, 100) * noise * MIB for _ in range(50)]
    assert alarms_of(health, "memory/host_bytes", values) == []
