"""The pure parts of benchmarks/way_accuracy.py: metrics of a run, noise, the section."""

from __future__ import annotations

import math

import pytest

from benchmarks.pages import markers
from benchmarks.separate_cases import COLOCATED
from benchmarks.way_accuracy import SECTION, Run, accuracy_at, noise_of, run_of, section_of

SEPARATE = "separate, K=1"


def made(accuracy: float, seconds: float = 8.0) -> Run:
    return Run([0.25, accuracy], [0.0, seconds], seconds / 8, 0.4, 2.0)


def test_run_is_read_from_metrics() -> None:
    lines = [
        {
            "time/step_seconds": seconds,
            "time/eval_seconds": 7.0 if evaluates else 0.0,
            "rollout/staleness_mean": 0.25,
            "rollout/staleness_max": 2.0,
            **({"eval/accuracy": 0.25} if evaluates else {}),
        }
        for seconds, evaluates in [(9.0, True), (1.0, False), (8.0, True), (1.0, False)]
    ]
    found = run_of([*lines, {"step": 4, "eval/accuracy": 0.75}])
    assert found == Run([0.25, 0.25, 0.75], [0.0, 3.0, 5.0], 4.5, 0.25, 2.0)
    assert accuracy_at(found, 4.0) == pytest.approx(0.5)


def test_noise_is_estimated_from_prompts_or_runs() -> None:
    # 256 prompts, a share of 0.5: a standard error of 1 / 32 each.
    one = {COLOCATED: [made(0.5)], SEPARATE: [made(0.5)]}
    assert noise_of(one) == pytest.approx(2 * math.sqrt(2) / 32)
    two = {COLOCATED: [made(0.3), made(0.7)], SEPARATE: [made(0.3), made(0.7)]}
    assert noise_of(two) == pytest.approx(2 * math.sqrt(0.08))


@pytest.mark.parametrize(
    ("accuracy", "seconds", "num_met"), [(0.86, 4.0, 2), (0.6, 4.0, 0), (0.86, 8.0, 1)]
)
def test_section_compares_steps_and_time(accuracy: float, seconds: float, num_met: int) -> None:
    runs = {COLOCATED: [made(0.8)], SEPARATE: [made(accuracy, seconds)]}
    page = section_of(runs, {"commit": "abc"}, 96)
    assert (page.splitlines()[0], page.splitlines()[-1]) == markers(SECTION)
    assert page.count("| yes |") == num_met
    assert page.count("| **no** |") == 2 - num_met
