"""What README.md and benchmarks/RESULTS.md show of SmolLM2 is drawn from its record."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import smollm2, smollm2_trl
from benchmarks.pages import section


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(smollm2.RECORD.read_text())
    return found


def test_pages_and_figure_are_those_of_the_record(record: dict[str, Any]) -> None:
    """`python benchmarks/smollm2.py` draws them again."""
    assert smollm2.FIGURE.read_text() == smollm2.figure(record)
    for file, name, lines in (
        ("benchmarks/RESULTS.md", "smollm2_seeds", smollm2.page(record)),
        ("README.md", "answers", smollm2.answers_table(record)),
    ):
        assert section(name, lines) in (smollm2.ROOT / file).read_text(), file


def test_minutes_until_the_accuracy_of_the_other() -> None:
    """Ours learns as much a step, and takes a third of the seconds."""
    rewards = [[0.1 + 0.02 * step + 0.01 * seed for step in range(10)] for seed in range(3)]
    steps = [
        [
            {"step": n, "reward": reward, "seconds": 20.0, "accuracy": 0.0}
            for n, reward in enumerate(run)
        ]
        for run in rewards
    ]
    ours = {"runs": [{"steps": run} for run in steps]}
    theirs = {"facts": {}, "runs": [{"rewards": r, "step_seconds": [60.0] * 10} for r in rewards]}
    text = "\n".join(smollm2_trl.page(ours, theirs))
    assert "| 256 | 0.120 ± 0.010 | 0.7 | 0.120 ± 0.010 | 2.0 |" in text
    assert "+0.000 with a standard error of 0.008 | yes" in text
    assert "0.280 after 3.3 and 10.0 min: 3.0x | yes" in text


def test_ends_of_a_run() -> None:
    steps = [
        {"step": n, "reward": n / 10, "tokens": 20.0 - n, "seconds": 6.0, "mismatch": 0.04}
        for n in range(10)
    ]
    steps[0]["accuracy"], steps[9]["accuracy"] = 0.5, 0.75
    found = smollm2.summary({"seed": 1, "steps": steps})
    assert (found["first"], found["last"]) == pytest.approx((0.2, 0.7))
    assert (found["before"], found["after"]) == (0.5, 0.75)
    assert (found["long"], found["short"], found["minutes"]) == pytest.approx((18.0, 13.0, 1.0))
