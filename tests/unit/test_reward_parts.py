"""Weighted sums of rewards, what a failed part costs, and the metrics of each part."""

from __future__ import annotations

import pytest

from mcore_rl.batching.table import SampleTable
from mcore_rl.rewards.parts import WaitLog, part_metrics, weighed
from mcore_rl.rewards.worker import Outcome
from tests.reward_server import rollouts

FAILED = Outcome(0.0, "timed out", "no value within 1 s")


def outcomes(*values: float | Outcome) -> list[Outcome]:
    return [value if isinstance(value, Outcome) else Outcome(value) for value in values]


def test_weighed_sums_parts_by_weight():
    samples = rollouts("", "", "")
    parts = {"a": outcomes(1.0, 0.0, 2.0), "b": outcomes(4.0, -2.0, 0.0)}
    scored = weighed(samples, parts, {"a": 1.0, "b": -0.25})
    assert [s.rollout for s in scored] == samples
    assert [s.reward for s in scored] == [0.0, 0.5, 2.0]
    assert [s.parts for s in scored] == [
        {"a": 1.0, "b": 4.0},
        {"a": 0.0, "b": -2.0},
        {"a": 2.0, "b": 0.0},
    ]
    assert all(s.failure is None for s in scored)


def test_weighed_gives_0_and_names_the_part_that_failed():
    parts = {"a": outcomes(1.0, 1.0), "b": outcomes(FAILED, 1.0), "c": outcomes(FAILED, 1.0)}
    failed, whole = weighed(rollouts("", ""), parts, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert (failed.reward, failed.parts) == (0.0, {"a": 1.0})
    assert failed.failure == "b: timed out: no value within 1 s"
    assert (whole.reward, whole.failure) == (3.0, None)


@pytest.mark.parametrize(
    ("outcome", "weight", "reward", "failure"),
    [
        (Outcome(0.1), 1.0, 0.1, None),
        (FAILED, 1.0, 0.0, "timed out: no value within 1 s"),  # without the name of the only part
        (Outcome(1e308), 100.0, 0.0, "the weighted sum of its rewards is inf"),
    ],
)
def test_weighed_single_reward(outcome, weight, reward, failure):
    (sample,) = weighed(rollouts(""), {"a": [outcome]}, {"a": weight})
    assert (sample.reward, sample.failure) == (reward, failure)


def test_part_metrics_exclude_failed_samples():
    parts = {"a": outcomes(1.0, 2.0, FAILED), "b:f": outcomes(FAILED, FAILED, FAILED)}
    scored = weighed(rollouts("", "", ""), parts, {"a": 5.0, "b:f": 1.0})
    assert part_metrics(SampleTable.of(scored), ["a", "b:f"]) == {
        "reward/a/mean": 1.5,
        "reward/a/failures": 1.0,
        "reward/b:f/failures": 3.0,
    }
    assert part_metrics(SampleTable.of(scored), ["a"]) == {
        "reward/a/mean": 1.5,
        "reward/a/failures": 1.0,
    }
    assert part_metrics(SampleTable.of([]), ["a"]) == {"reward/a/failures": 0.0}


@pytest.mark.parametrize("value", [1e308, -1e308])
def test_part_metrics_are_finite_for_huge_values(value):
    scored = weighed(rollouts(*[""] * 4), {"a": outcomes(*[value] * 4)}, {"a": 1.0})
    assert part_metrics(SampleTable.of(scored), ["a"])["reward/a/mean"] == value


def test_reward_waits_are_logged_when_they_grow():
    log = WaitLog(["gsm8k", "http"])
    waits = [(0.4, 1.0), (3.0, 100.0), (1.0, 5.0), (1.9, 5.0), (2.0, 5.0), (3.0, 5.0), (9.0, 12.0)]
    lines = [log.line(*wait) for wait in waits]
    assert [line is not None for line in lines] == [False, False, True, False, True, False, True]
    assert lines[2] is not None
    assert "1.0 of 5.0 s" in lines[2] and "--rl-reward-workers" in lines[2]
    assert WaitLog(["http", "model"]).line(3.0, 5.0) is None  # workers would not help
