"""timeline.jsonl: what each role did, written, read again, and drawn by the report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.timeline import (
    ENGINES,
    IDLE,
    SAMPLING,
    TRAINER,
    UPDATE,
    Activity,
    RoleStep,
    Timeline,
    TimeSpan,
    read_timeline,
)
from mcore_rl.tools.report.charts import charts_of
from mcore_rl.tools.report.panels import SECTIONS
from mcore_rl.tools.report.run_files import read_runs
from mcore_rl.tools.report.tables import facts_of
from tests import hostile
from tests.report_runs import SECONDS, STEP_SECONDS, write_run

[PANEL] = [panel for section in SECTIONS for panel in section.panels if panel.kind == "timeline"]
LINE = {"step": 3, "role": "trainer", "spans": [["train", 1.5, 2.5]]}


def written(path: Path, steps: range, *, role: str = TRAINER, begin: float = 0.0) -> None:
    """A run whose step n is one span from begin + n to begin + n + 1."""
    timeline = Timeline(path)
    for step in steps:
        timeline.add(role, step, "train", begin + step, begin + step + 1)
        timeline.write_step(step)
    timeline.close()


def test_line_per_step_and_role(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path)
    timeline.add(TRAINER, 0, "train", 2.0, 3.00004)
    timeline.add(ENGINES, 0, "sampling", 0.0, 3.0)
    timeline.add(TRAINER, 0, "rollout", 0.0, 2.0)
    timeline.add(ENGINES, 1, "sampling", 3.5, 4.0)
    assert not path.exists()
    timeline.write_step(0)
    timeline.add(ENGINES, 0, "idle", 3.0, 3.5)  # step 0 is written
    timeline.write_step(1)
    timeline.add(TRAINER, 2, "checkpoint", 5.0, 6.0)
    timeline.close()
    timeline.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0, "role": "engines", "spans": [["sampling", 0.0, 3.0]]},
        {"step": 0, "role": "trainer", "spans": [["rollout", 0.0, 2.0], ["train", 2.0, 3.0]]},
        {"step": 1, "role": "engines", "spans": [["idle", 3.0, 3.5], ["sampling", 3.5, 4.0]]},
        {"step": 2, "role": "trainer", "spans": [["checkpoint", 5.0, 6.0]]},
    ]
    assert read_timeline(path)[-1] == RoleStep(2, TRAINER, (TimeSpan("checkpoint", 5.0, 6.0),))


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def activity(*changes: tuple[float, str]) -> tuple[Activity, Clock]:
    """An activity that began something at these seconds."""
    clock = Clock()
    found = Activity(clock)
    for clock.now, what in changes:
        found.begin(what)
    return found, clock


def lasting(spans: Sequence[TimeSpan]) -> list[tuple[str, float, float]]:
    """The spans, from the begin of the first one."""
    return [(w, round(b - spans[0].start, 3), round(e - spans[0].start, 3)) for w, b, e in spans]


def test_activity_reports_spans_and_the_idle_share_since_the_last_call() -> None:
    found, clock = activity((1, SAMPLING), (3, SAMPLING), (5, IDLE), (7, UPDATE))
    clock.now = 10
    assert (found.seconds(SAMPLING), found.seconds(UPDATE)) == (4, 3)
    spans, idle_share = found.take()
    assert lasting(spans) == [(IDLE, 0, 1), (SAMPLING, 1, 5), (IDLE, 5, 7), (UPDATE, 7, 10)]
    assert idle_share == pytest.approx(3 / 10)
    clock.now = 12
    spans, idle_share = found.take()
    assert lasting(spans) == [(UPDATE, 0, 2)] and idle_share == 0
    assert found.seconds(SAMPLING) == 0


def test_activity_tells_what_it_did_before() -> None:
    found, _ = activity()
    assert (found.begin(SAMPLING), found.begin(SAMPLING), found.begin(UPDATE)) == (
        IDLE,
        SAMPLING,
        SAMPLING,
    )


def test_spans_of_an_activity_are_seconds_since_1970() -> None:
    before = time.time()
    [span], _ = Activity().take()
    assert before - 1 <= span.start <= span.end <= time.time() + 1


def test_many_spans_of_an_activity_keep_the_long_ones() -> None:
    """3,000 pauses of 1 ms, and three of 10 s: the share of idle time is exact."""
    changes, now, long_ones = [(0.0, SAMPLING)], 0.0, []
    for number in range(3000):
        pause = 0.001
        if number in (100, 1500, 2900):
            pause = 10.0
            long_ones.append((round(now + 1, 3), round(now + 11, 3)))
        changes += [(now + 1, IDLE), (now + 1 + pause, SAMPLING)]
        now += 1 + pause
    found, _ = activity(*changes)
    spans, idle_share = found.take()
    assert len(spans) <= 32
    assert idle_share == pytest.approx((3 * 10 + 2997 * 0.001) / now)
    assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
    assert spans[-1].end - spans[0].start == pytest.approx(now)
    idle = [(begin, end) for what, begin, end in lasting(spans) if what == IDLE and end - begin > 1]
    assert idle == long_ones


def test_line_keeps_the_longest_spans(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "lines")
    for number in range(300):
        timeline.add(ENGINES, 0, "sampling", 10 * number, 10 * number + number % 3)
    timeline.close()
    [line] = read_timeline(tmp_path / "lines")
    expected = [n for n in range(300) if n % 3 == 2] + [n for n in range(300) if n % 3 == 1]
    assert [span.start for span in line.spans] == [10 * n for n in sorted(expected)]


def test_timeline_without_path_does_nothing(tmp_path: Path) -> None:
    timeline = Timeline(None)
    timeline.add(TRAINER, 0, "train", 0.0, 1.0)
    timeline.write_step(0)
    timeline.close()


def test_resumed_run_replaces_its_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    for role in (TRAINER, ENGINES):  # after each other: no line of the second repeats one
        written(path, range(0, 5), role=role)
    written(path, range(2, 4), begin=100.0)
    assert [(line.role, line.step, line.spans[0].start) for line in read_timeline(path)] == [
        (TRAINER, 0, 0.0),
        (TRAINER, 1, 1.0),
        (ENGINES, 0, 0.0),
        (ENGINES, 1, 1.0),
        (TRAINER, 2, 102.0),
        (TRAINER, 3, 103.0),
    ]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    bad = [
        {"step": 4, "role": 7, "spans": []},
        {"step": 4, "role": "trainer", "spans": {}},
        {"step": 4, "role": "trainer", "spans": [["train", 2.0, 1.0]]},
        {"step": 4, "role": "trainer", "spans": [["train", 2.0]]},
        {"step": 4, "role": "trainer", "spans": [[1, 2.0, 3.0]]},
        {"step": 4, "role": "trainer", "spans": [["train", None, 3.0]]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [LINE, *bad]) + '{"step": 5, "ro')
    damaged: list[int] = []
    assert [line.step for line in read_timeline(path, damaged)] == [3]
    assert damaged == [2, 3, 4, 5, 6, 7]


@settings(hostile.BOUNDED, max_examples=100)
@given(st.lists(hostile.messages(LINE), max_size=4))
def test_any_lines_can_be_read(tmp_path_factory: pytest.TempPathFactory, lines) -> None:
    path = tmp_path_factory.mktemp("hostile") / "timeline.jsonl"
    path.write_bytes(b"\n".join([json.dumps(LINE).encode(), *lines]))
    for line in read_timeline(path):
        assert line.step >= 0 and all(span.start <= span.end for span in line.spans)


def test_stage_timers_report_begin_and_end_of_stages() -> None:
    timers, spans = StageTimers(), []
    timers.on_stage_end.append(lambda *span: spans.append(span))
    with timers("rollout"), timers("reward"):
        pass
    with pytest.raises(KeyError), timers("train"):
        raise KeyError
    with timers("rollout"):
        pass
    assert [span[0] for span in spans] == ["reward", "rollout", "rollout"]
    seconds = sum(end - start for stage, start, end in spans if stage == "rollout")
    assert seconds == pytest.approx(timers["rollout"], abs=1e-5)  # floats of today's seconds
    assert spans[1][1] <= spans[0][1] and spans[0][2] <= spans[1][2] <= spans[2][1]


# ----------------------------------------------------------------------------------- in the report


def drawn(folder: Path) -> list[tuple[str, str, int, float, float]]:
    """Row, label, step, begin and seconds of each bar, in the order of time."""
    [chart] = charts_of(PANEL, read_runs([folder]))
    bars = [
        bar
        for trace in chart.figure.data
        for bar in zip(
            *(trace.y, [trace.name] * len(trace.y), trace.customdata, trace.base, trace.x),
            strict=True,
        )
    ]
    return sorted(bars, key=lambda bar: (bar[0], bar[3]))


def test_chart_has_a_row_per_role(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=3, engines=True)
    bars = drawn(folder)
    engines = [bar for bar in bars if bar[0] == "engines"]
    expected = [("hand-over to rollout", 0.0, 0.3), ("rollout", 0.3, 2.4), ("idle", 2.7, 0.3)]
    assert [bar[1:3] for bar in engines] == [(e[0], n) for n in range(3) for e in expected]
    times = [[STEP_SECONDS * n + e[1], e[2]] for n in range(3) for e in expected]
    np.testing.assert_allclose([bar[3:] for bar in engines], times, atol=1e-3)
    trainers = [bar for bar in bars if bar[0] == "trainers"]
    stages = [
        "hand-over to rollout",
        "data",
        "rollout",
        "reward",
        "log-probs",
        "advantages",
        "train",
    ]
    assert len(engines) + len(trainers) == len(bars)
    assert [bar[1:3] for bar in trainers] == [(stage, n) for n in range(3) for stage in stages]
    shown = [seconds for seconds in SECONDS.values() if seconds]
    np.testing.assert_allclose([bar[4] for bar in trainers[1:7]], shown, atol=1e-3)
    [chart] = charts_of(PANEL, read_runs([folder]))
    assert chart.figure.layout.xaxis.ticktext == ("0", "1", "2")
    np.testing.assert_allclose(chart.figure.layout.xaxis.tickvals, [0, 3, 6], atol=1e-3)


def test_chart_of_a_colocated_run_has_one_row_of_the_last_steps(tmp_path: Path) -> None:
    bars = drawn(write_run(tmp_path / "run", num_steps=60))
    assert {bar[0] for bar in bars} == {"ranks"}
    assert {bar[2] for bar in bars} == set(range(40, 60))


def test_chart_begins_after_the_pause_of_a_resumed_run(tmp_path: Path) -> None:
    written(tmp_path / "timeline.jsonl", range(0, 6))
    written(tmp_path / "timeline.jsonl", range(3, 8), begin=3600.0)
    (tmp_path / "metrics.jsonl").touch()
    assert [bar[2:4] for bar in drawn(tmp_path)] == [(step, step - 3.0) for step in range(3, 8)]


def test_spans_too_short_to_see_are_not_drawn(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    for number in range(100):
        timeline.add(TRAINER, 0, "train", number, number + (1.0 if number % 2 else 0.01))
    timeline.close()
    (tmp_path / "metrics.jsonl").touch()
    assert len(drawn(tmp_path)) == 50


def test_page_of_two_runs_has_two_timelines(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, num_steps=2) for name in ("a", "b")]
    assert [chart.run for chart in charts_of(PANEL, read_runs(folders))] == ["a", "b"]


def test_idle_share_is_a_fact_where_it_is_known(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", num_steps=2, engines=True), write_run(tmp_path / "b")]
    rows = {row.name: row.cells for row in facts_of(read_runs(folders))}
    assert rows["idle share of engines"] == ("10.0 %", "–")
    assert "idle share of trainer" not in rows
