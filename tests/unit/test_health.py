"""Alarms: each rule on a run that is well, on one that collapses, and on one that recovers."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.observe.alarms import RULES, Alarm, Health
from mcore_rl.observe.options import AlarmOptions
from mcore_rl.trainer.recorder import HealthWatch

WINDOW = 5
MIB = 1 << 20
# field -> (what is well, what is not), as functions of the step
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


def thresholds(**changes: float) -> dict[str, float]:
    found = {rule.field: getattr(AlarmOptions(), rule.field) for rule in RULES}
    return found | {"alarm_expert_imbalance": 4.0} | changes


def heard(health: Health, metric: str, values: list[float], start: int = 0) -> list[Alarm]:
    return [
        alarm
        for step, value in enumerate(values, start)
        for alarm in health.observe(step, {metric: value})
    ]


def test_every_threshold_has_a_flag_and_every_flag_a_rule() -> None:
    fields = {f.name for f in dataclasses.fields(AlarmOptions) if f.name.startswith("alarm_")}
    assert {rule.field for rule in RULES} == fields - {"alarm_window"} == COURSES.keys()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_a_rule_is_quiet_while_all_is_well_and_speaks_once(rule) -> None:
    well, ill = COURSES[rule.field]
    health = Health(thresholds(), window=WINDOW)
    assert heard(health, rule.metric, [well(step) for step in range(40)]) == []
    alarms = heard(health, rule.metric, [ill(step) for step in range(40, 40 + 3 * WINDOW)], 40)
    assert [alarm.rule for alarm in alarms] == [rule]
    assert 40 <= alarms[0].step < 40 + WINDOW
    assert rule.remedy in alarms[0].text and f"over {WINDOW} steps" in alarms[0].text
    assert "{" not in alarms[0].text
    assert list(health.active) == [rule.field]


def test_an_alarm_is_raised_again_only_after_all_was_well() -> None:
    health = Health(thresholds(), window=WINDOW)
    ill, well = [0.0] * WINDOW, [1.0] * WINDOW
    assert len(heard(health, "reward/std", ill + ill)) == 1
    assert heard(health, "reward/std", well, 10) == [] and not health.active
    assert len(heard(health, "reward/std", ill, 15)) == 1


def test_one_bad_step_is_no_collapse_but_one_gradient_is() -> None:
    health = Health(thresholds(), window=WINDOW)
    steps = [1.0] * 10 + [0.0] + [1.0] * 10
    assert heard(health, "reward/std", steps) == []
    assert heard(health, "grad_norm", [1.0] * 10 + [11.0] + [1.0] * 10)[0].step == 10


def test_steps_without_a_gradient_make_no_median() -> None:
    """Their samples all earn the same, and the next ordinary step is none that breaks away."""
    health = Health(thresholds(), window=WINDOW)
    assert heard(health, "grad_norm", [0.0, 0.3, 0.0] * 10) == []
    assert len(heard(health, "grad_norm", [0.3, 0.3, 0.0, 0.3, 4.0], 30)) == 1


def test_a_run_that_goes_on_keeps_its_window_but_for_what_the_machine_decides() -> None:
    """On half the ranks each has twice the memory, which is no growth."""
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


def test_nothing_is_said_before_the_window_is_full() -> None:
    health = Health(thresholds(), window=WINDOW)
    assert heard(health, "reward/std", [0.0] * (WINDOW - 1)) == []
    assert len(heard(health, "reward/std", [0.0])) == 1


def test_a_threshold_of_0_switches_off() -> None:
    for rule in RULES:
        health = Health(thresholds(**{rule.field: 0.0}), window=WINDOW)
        ill = COURSES[rule.field][1]
        assert heard(health, rule.metric, [ill(step) for step in range(20)]) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_what_is_not_measured_is_not_heard(value) -> None:
    health = Health(thresholds(), window=WINDOW)
    for step in range(20):
        metrics = {} if value is None else {rule.metric: value for rule in RULES}
        assert health.observe(step, metrics) == []


def test_a_window_of_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 1"):
        Health(thresholds(), window=1)


@given(seed=st.integers(0, 1000), noise=st.floats(0, 0.2))
def test_memory_that_only_wavers_does_not_grow(seed: int, noise: float) -> None:
    """Up and down by 20 MiB around a level, as allocators do."""
    rng = random.Random(seed)
    health = Health(thresholds(), window=10)
    values = [2e9 + rng.uniform(-100, 100) * noise * MIB for _ in range(50)]
    assert heard(health, "memory/host_bytes", values) == []
