"""What benchmarks/separate_engines.py computes from runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.separate_cases import WARM_UP, Run, run_of
from benchmarks.separate_simulation import Row, comparison

RUN = Run(
    samples_per_second=5.0,
    tokens_per_second=100.0,
    step_seconds=1.0,
    idle_trainers=0.5,
    idle_engines=0.2,
    staleness=1.0,
    staleness_max=2.0,
)


def line(rollout_seconds: float, train_seconds: float) -> dict[str, float]:
    """A step whose trainers wait for all of the sampling, and then train."""
    return {
        "time/rollout_seconds": rollout_seconds,
        "time/train_seconds": train_seconds,
        "time/step_seconds": rollout_seconds + train_seconds,
        "response_tokens/mean": 30.0,
    }


def test_idle_share_is_of_the_time_and_not_of_the_steps() -> None:
    lines = [line(9.0, 1.0)] * WARM_UP + [line(8.0, 2.0), line(0.0, 2.0)]
    # Between two samplings: 1 s of training and 8 s of waiting; 2 s of training.
    lines[WARM_UP]["idle/trainers"], lines[WARM_UP + 1]["idle/trainers"] = 8 / 9, 0.0
    found = run_of(lines, samples_per_step=4)
    assert found.idle_trainers == pytest.approx(8 / 11)
    assert found.step_seconds == 6.0 and found.tokens_per_second == pytest.approx(4 * 30 / 6)


def test_comparison_marks_what_misses_the_aim() -> None:
    near = replace(RUN, tokens_per_second=109.0, idle_engines=0.29, staleness=1.09)
    far = replace(RUN, tokens_per_second=111.0, idle_trainers=0.61, staleness=1.11)
    text = "\n".join(
        comparison([Row("even", "separate, K=1", RUN, found) for found in (near, far)])
    )
    assert "5 of 8 numbers" in text
    assert "| 100. / 109. | +9% | 50% / 50% | 20% / 29% | 1.00 / 1.09 | 0.0% |" in text
    assert "| **100. / 111.** | +11% | **50% / 61%** | 20% / 20% | **1.00 / 1.11** |" in text


def test_cases_with_tools_are_compared_in_samples() -> None:
    found = replace(RUN, tokens_per_second=500.0)
    assert Row("tools", "separate, K=1", RUN, found).errors[0] == 0.0
    small, large = (replace(RUN, staleness=staleness) for staleness in (0.1, 0.19))
    assert Row("tools", "partial", small, large).errors[3] == pytest.approx(0.09)
