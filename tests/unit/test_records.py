"""What pages and figures show of measurements is drawn from the records in benchmarks/records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks import (
    learning,
    plan_time,
    real_size,
    records,
    report,
    rollout_report,
    rollout_trl,
    separate_engines,
    separate_simulation,
    small_updates,
    smollm2,
    smollm2_trl,
    soak,
    step_time_report,
    way_accuracy,
)
from benchmarks.pages import section
from benchmarks.records import RESULTS, Record

README = records.ROOT / "README.md"


def beside_trl(record: Record) -> str:
    return section(smollm2_trl.RECORD, smollm2_trl.page(records.read(smollm2.RECORD), record))


def of_study(name: str) -> list[tuple[Path, Callable[[Record], str]]]:
    study = learning.STUDIES[name]
    figures = [(study.figure, learning.replay_figure)] if study.figure is not None else []
    return [(study.page, partial(learning.part, name)), *figures]


PARTS: dict[str, list[tuple[Path, Callable[[Record], str]]]] = {
    "smollm2": [
        (RESULTS, lambda record: section("smollm2_seeds", smollm2.page(record))),
        (README, lambda record: section("answers", smollm2.answers_table(record))),
        (smollm2.FIGURE, smollm2.figure),
    ],
    "smollm2_trl": [(RESULTS, beside_trl)],
    "small_updates": [
        (RESULTS, lambda record: section("small_updates", small_updates.page(record)))
    ],
    **{name: of_study(name) for name in learning.STUDIES},
    "plan_time": [(plan_time.PAGE, plan_time.part_of)],
    "soak": [(soak.PAGE, soak.part_of)],
    real_size.SAVES: [(RESULTS, real_size.saves_part)],
    "reshard": [(RESULTS, report.part_of)],
    "rollout": [(RESULTS, rollout_report.part_of)],
    "rollout_trl": [(RESULTS, rollout_trl.part_of)],
    "way_accuracy": [(RESULTS, way_accuracy.part_of)],
    "separate_engines": [(RESULTS, separate_engines.part_of)],
    "separate_simulation": [(RESULTS, separate_simulation.part_of)],
    **{
        name: [(RESULTS, partial(step_time_report.part_of, name))]
        for name in (step_time_report.SECTION, step_time_report.SMOLLM2)
    },
}
# Shown by tests of their own.
OTHERS = {"first_command"}


@pytest.mark.parametrize("name", sorted(file.stem for file in records.FOLDER.glob("*.json")))
def test_page_is_drawn_from_its_record(name: str) -> None:
    if name in OTHERS:
        return
    record = records.read(name)
    assert {"command", "commit", "date", "machine", "versions"} <= record["facts"].keys()
    for page, part_of in PARTS[name]:
        assert part_of(record) in page.read_text(), page


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
    assert (found["first"], found["last"]) == pytest.approx((0.0, 0.7))
    assert (found["before"], found["after"]) == (0.5, 0.75)
    assert (found["long"], found["short"], found["minutes"]) == pytest.approx((20.0, 13.0, 1.0))
