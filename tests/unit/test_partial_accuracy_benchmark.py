"""The pure parts of benchmarks/partial_accuracy.py: metrics of a run, noise, the section."""

from __future__ import annotations

import dataclasses
import math

import pytest

from benchmarks.pages import markers
from benchmarks.partial_accuracy import PARTIAL, SECTION, WHOLE, Run, noise_of, run_of, section_of


def made(accuracy: float, seconds: float = 1.0) -> Run:
    return Run([0.25, accuracy], 0.5, seconds, seconds, 20.0, 0.4, 2.0)


def test_run_is_read_from_metrics() -> None:
    lines = [
        {
            "time/step_seconds": seconds,
            "time/rollout_seconds": 0.5,
            "response_tokens/mean": 20.0,
            "reward/mean": reward,
            "rollout/staleness_mean": 0.25,
            "rollout/staleness_max": 2.0,
            **({"eval/accuracy": 0.25} if number == 0 else {}),
        }
        for number, (seconds, reward) in enumerate([(9.0, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.8)])
    ]
    found = run_of([*lines, {"step": 4, "eval/accuracy": 0.75}])
    assert found == Run([0.25, 0.75], 0.8, 1.0, 0.5, 20.0, 0.25, 2.0)
    without = [
        {name: value for name, value in line.items() if "staleness" not in name} for line in lines
    ]
    assert run_of(without) == dataclasses.replace(
        found, accuracies=[0.25], staleness=0.0, staleness_max=0.0
    )


def test_noise_is_estimated_from_prompts_or_runs() -> None:
    # 256 prompts, a share of 0.5: a standard error of 1 / 32 each.
    one = {WHOLE: [made(0.5)], PARTIAL: [made(0.5)]}
    assert noise_of(one) == pytest.approx(2 * math.sqrt(2) / 32)
    two = {WHOLE: [made(0.3), made(0.7)], PARTIAL: [made(0.3), made(0.7)]}
    assert noise_of(two) == pytest.approx(2 * math.sqrt(0.08))


@pytest.mark.parametrize(("accuracy", "met"), [(0.86, True), (0.6, False)])
def test_section_states_whether_accuracies_differ(accuracy: float, met: bool) -> None:
    runs = {WHOLE: [made(0.8, 3.0)], PARTIAL: [made(accuracy, 2.0)]}
    page = section_of(runs, {"commit": "abc"}, 100)
    assert (page.splitlines()[0], page.splitlines()[-1]) == markers(SECTION)
    assert ("**no**" in page) is not met
    assert "Tokens a second in rollout: 1.50x those of whole ones." in page
    assert "| partial | 0.250, " in page
