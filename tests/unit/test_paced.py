"""benchmarks/paced.py on a clock that only computations and sleeps move."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import paced

STEP_OF_TWO = paced.STEP + 2 * paced.PER_SEQUENCE


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(paced, "time", found)
    return found


def run_step(pace: paced.Pace, clock: Clock, seconds: float) -> float:
    """Run a step of two sequences that computes for `seconds`; return the time at its end."""
    pace.step(2, 1000, lambda: clock.sleep(seconds))
    return clock.now


def test_steps_end_in_time_and_make_up_for_a_long_one(clock: Clock, tmp_path: Path) -> None:
    pace = paced.Pace(tmp_path)
    assert run_step(pace, clock, 0.001) == pytest.approx(100 + STEP_OF_TWO)
    clock.sleep(0.01)  # a gap is part of the next step
    assert run_step(pace, clock, 0.001) == pytest.approx(100 + 2 * STEP_OF_TWO)
    run_step(pace, clock, 2 * STEP_OF_TWO)
    assert run_step(pace, clock, 0.001) > 100 + 4 * STEP_OF_TWO
    assert run_step(pace, clock, 0.001) == pytest.approx(100 + 5 * STEP_OF_TWO)
    pace.idle()
    clock.sleep(1.0)
    began = clock.now
    assert run_step(pace, clock, 0.001) == pytest.approx(began + STEP_OF_TWO)


def test_time_that_no_step_makes_up_for_is_counted(clock: Clock, tmp_path: Path) -> None:
    pace = paced.Pace(tmp_path)
    run_step(pace, clock, STEP_OF_TWO + paced.MOST_BEHIND + 2.0)
    pace.write()
    found = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert found["counts"] == {"step": 1, "step over": 1}
    assert found["seconds_over"] == {"step": pytest.approx(2.0)}


def test_prefill_is_divided_into_steps_as_by_the_engine(clock: Clock, tmp_path: Path) -> None:
    pace = paced.Pace(tmp_path)
    pace.submitted(1500)
    first = STEP_OF_TWO + 1000 * paced.PER_PREFILL_TOKEN
    assert run_step(pace, clock, 0.001) == pytest.approx(100 + first)
    second = STEP_OF_TWO + 500 * paced.PER_PREFILL_TOKEN
    assert run_step(pace, clock, 0.001) == pytest.approx(100 + first + second)


def test_events_are_held_until_their_time(clock: Clock) -> None:
    held, event = paced.HeldEvents(), SimpleNamespace(done=False)
    for ticket in range(4):
        held.asked(ticket, 1.0)
    clock.sleep(0.5)
    held.asked(2, 1.0)
    last = SimpleNamespace(done=True)
    assert held.released([(0, event), (1, event), (2, event), (3, last)]) == [(3, last)]
    held.ended([1])
    clock.sleep(0.5)
    assert held.released([]) == [(0, event)]
    clock.sleep(0.5)
    assert held.released([]) == [(2, event)]
