"""What README.md and getting_started.md show of the first command is what its record holds."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "using" / "getting_started.md").read_text()


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    text = (ROOT / "benchmarks" / "records" / "first_command.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def values(record: dict[str, Any], name: str) -> list[float]:
    return [step[name] for step in record["steps"] if name in step]


@pytest.mark.parametrize(
    "metric", ["reward/mean", "eval/accuracy", "kl/rollout_actor", "entropy", "grad_norm"]
)
def test_table_of_what_was_learned(record: dict[str, Any], metric: str) -> None:
    (row,) = re.findall(rf"│ {metric} +│ +(\S+) │ +(\S+) │ +(\S+) │", PAGE)
    of_run = values(record, metric)
    best = {"kl/rollout_actor": min, "reward/mean": max, "eval/accuracy": max}.get(metric)
    expected = [of_run[0], of_run[-1], *([best(of_run)] if best else [])]
    shown = [float(each) for each in row if each != "–"]
    assert shown == pytest.approx(expected, abs=6e-5)


def test_seconds_bytes_and_mismatch_of_the_text(record: dict[str, Any]) -> None:
    text = " ".join(PAGE.split())
    seconds = record["seconds"]
    minutes, rest = divmod(seconds["all"], 60)
    set_up, start, steps, end = (seconds[name] for name in list(seconds)[1:])
    assert f"took {minutes} min {rest} s on 2 cores: {set_up} s of set-up" in text
    assert f"{start} s until the first step had ended, {steps} s of other steps with" in text
    assert f"and {end} s until all processes had ended" in text
    assert set_up + start + steps + end == seconds["all"]
    of_steps = values(record, "time/step_seconds")
    assert sum(of_steps[1:]) == pytest.approx(steps, abs=2.5)
    (received,) = {*values(record, "reshard/received_bytes_max")}
    assert f"received {received:,.0f} bytes per hand-over" in text
    mismatch = values(record, "kl/rollout_actor")
    median, worst = statistics.median(mismatch), max(mismatch)
    assert f"{median:.5f} in the median and {worst:.5f} in the worst step" in text
    assert record["run"] in PAGE


def test_accuracy_of_the_readme(record: dict[str, Any]) -> None:
    first, *_, last = (round(100 * each) for each in values(record, "eval/accuracy"))
    assert f"held-out accuracy rises from {first} to {last} %" in (ROOT / "README.md").read_text()
