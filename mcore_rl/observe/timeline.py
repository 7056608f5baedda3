"""What each role of a run did, and when: `timeline.jsonl`, one line per step and role.

    {"step": 3, "role": "trainer", "spans": [["rollout", 1790000000.25, 1790000004.5], ...]}

Begin and end are seconds since 1970. The trainer's spans are the stages of `StageTimers` and the
hand-overs, as the first rank's clock measures them. Engines on ranks of their own have spans, too:
those of the first engine, by its clock, from the end of one step's sampling to the end of the next.
As in metrics.jsonl, the checkpoint of a step counts as part of the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mcore_rl.common.readers import finite_number
from mcore_rl.observe.run_directory import PatientFile, step_lines

TRAINER, ENGINES = "trainer", "engines"
IDLE = "idle"  # a span in which a role only waits for another
SAMPLING, UPDATE, EVALUATION = "sampling", "update", "eval"  # of engines
_MAX_SPANS = 200  # in a line
_MOST_TAKEN, _MOST_HELD = 32, 256  # spans of an Activity


class TimeSpan(NamedTuple):
    """Example: `TimeSpan("train", 1790000004.5, 1790000006.0)`, in seconds since 1970."""

    what: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RoleStep:
    """What a role did in a step, in the order of time.

    Example: `RoleStep(3, "trainer", (TimeSpan("train", 1790000004.5, 1790000006.0),))`
    """

    step: int
    role: str
    spans: tuple[TimeSpan, ...]


class Activity:
    """What this process does, one thing at a time: `begin` ends what it did before. Local.

    Example: `begin(SAMPLING)`, two seconds, `begin(IDLE)`, a second: `take` returns a span of each,
    and 1/3.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._what, self._begins = IDLE, clock()
        self._spans: list[TimeSpan] = []  # in seconds of the clock
        self._seconds = {IDLE: 0.0}

    def begin(self, what: str) -> str:
        """Do `what` from now on; return what this process did before."""
        before = self._what
        if what != before:
            self._end()
            self._what = what
        return before

    def take(self) -> tuple[tuple[TimeSpan, ...], float]:
        """Return the spans since the last call, the shortest of more than 32 as part of others, and
        the share of the time that was idle."""
        self._end()
        spans = _merged(self._spans, _MOST_TAKEN)
        shift = time.time() - self._clock()
        share = self._seconds[IDLE] / max(sum(self._seconds.values()), 1e-9)
        self._spans, self._seconds = [], {IDLE: 0.0}
        return tuple(TimeSpan(what, b + shift, e + shift) for what, b, e in spans), share

    def seconds(self, what: str) -> float:
        """Return the seconds spent on `what` since the last `take`."""
        running = self._clock() - self._begins if what == self._what else 0.0
        return self._seconds.get(what, 0.0) + running

    def _end(self) -> None:
        now = self._clock()
        self._spans.append(TimeSpan(self._what, self._begins, now))
        before = self._seconds.get(self._what, 0.0)
        self._seconds[self._what] = before + now - self._begins
        self._begins = now
        if len(self._spans) > _MOST_HELD:
            self._spans = _merged(self._spans, _MOST_TAKEN)


def _merged(spans: Sequence[TimeSpan], most: int) -> list[TimeSpan]:
    """Return at most `most` spans, each of which begins where another one ends: the shortest become
    part of the one before."""
    left = list(spans)
    while len(left) > most:
        at = min(range(1, len(left)), key=lambda i: left[i].end - left[i].start)
        # What was interrupted continues.
        goes_on = at + 1 < len(left) and left[at + 1].what == left[at - 1].what
        last = at + goes_on
        left[at - 1 : last + 1] = [left[at - 1]._replace(end=left[last].end)]
    return left


class Timeline:
    """Writer of a timeline. Local to the rank; without a path, as on all ranks but the first, it
    does nothing. A resumed run appends, and `read_timeline` drops the steps that it repeats."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else PatientFile(path)
        self._spans: dict[tuple[int, str], list[TimeSpan]] = {}
        self._first_unwritten = 0

    def add(self, role: str, step: int, what: str, start: float, end: float) -> None:
        """Note what `role` did from `start` to `end`, in seconds of time.time(). A span of a step
        that is written already goes to the line of the next step."""
        if self._file is not None:
            line = (max(step, self._first_unwritten), role)
            span = TimeSpan(what, round(start, 4), round(end, 4))
            self._spans.setdefault(line, []).append(span)

    def write_step(self, step: int) -> None:
        """Write the lines of the steps up to `step`, each with its 200 longest spans at most.
        Errors of the disk are not raised."""
        due = sorted(line for line in self._spans if line[0] <= step)
        self._first_unwritten = max(self._first_unwritten, step + 1)
        if self._file is not None and due:
            self._file.write("".join(self._line(*line) for line in due))

    def close(self) -> None:
        """Write the rest, and close the file. Idempotent."""
        self.write_step(max((step for step, _ in self._spans), default=0))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _line(self, step: int, role: str) -> str:
        spans = sorted(self._spans.pop((step, role)), key=lambda span: span.end - span.start)
        spans = sorted(spans[-_MAX_SPANS:], key=lambda span: span.start)
        return json.dumps({"step": step, "role": role, "spans": spans}) + "\n"


def read_timeline(path: Path, damaged: list[int] | None = None) -> tuple[RoleStep, ...]:
    """Return what each role did, in the order of the file.

    A line that repeats a step of its role is from a resumed run: lines before it, of that step and
    of later ones, are left out. The numbers (from 1) of lines that are not a role's step are
    appended to `damaged`.
    """
    role_steps: list[RoleStep] = []
    last: dict[str, int] = {}  # role -> step
    for line_number, step, fields in step_lines(path, damaged):
        role, spans = fields.get("role"), list(_spans_in(fields.get("spans")))
        if not isinstance(role, str) or None in spans:
            if damaged is not None:
                damaged.append(line_number)
            continue
        if last.get(role, -1) >= step:
            role_steps = [line for line in role_steps if line.step < step]
            last = {line.role: line.step for line in role_steps}
        last[role] = step
        role_steps.append(RoleStep(step, role, tuple(span for span in spans if span is not None)))
    return tuple(role_steps)


def _spans_in(spans: Any) -> Iterator[TimeSpan | None]:
    """Yield the spans of a line, None for one that is damaged."""
    if not isinstance(spans, list):
        yield None
        return
    for span in spans:
        time_span = None
        if isinstance(span, list) and len(span) == 3 and isinstance(span[0], str):
            start, end = map(finite_number, span[1:])
            if start is not None and end is not None and start <= end:
                time_span = TimeSpan(span[0], start, end)
        yield time_span
