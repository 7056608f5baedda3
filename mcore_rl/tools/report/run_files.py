"""Reader of a run directory that is finished, still being written, or left by a killed run.

Missing, empty or truncated files are noted, and the rest is read.
"""

from __future__ import annotations

import contextlib
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mcore_rl.common.errors import UsageError
from mcore_rl.common.readers import InvalidData, finite_number, parse_json
from mcore_rl.observe.run_directory import RunConfig, damage_note, read_config, read_metrics
from mcore_rl.observe.timeline import RoleStep, read_timeline
from mcore_rl.tools.report.texts import clean

_Read = TypeVar("_Read")

# The files of a run, and the note for a missing one.
_ABSENT = {
    "metrics.jsonl": "metrics.jsonl is missing",
    "config.yaml": "config.yaml is missing, and with it the configuration",
    "summary.json": "summary.json (versions, layouts) is missing: a run writes it at its end",
    "rollouts.jsonl": "rollouts.jsonl is missing, and with it the samples",
    "run.log": "run.log is missing, and with it alarms and events",
    "timeline.jsonl": "timeline.jsonl is missing, and with it the timeline",
}
FILES = tuple(_ABSENT)
NO_SUMMARY = _ABSENT["summary.json"]
# Time, first line and further lines of a message.
_TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
_MESSAGE = re.compile(rf"^({_TIME}),\d+ (.*)((?:\n(?!{_TIME},\d+ ).*)*)", re.MULTILINE)
_ALARM = re.compile(r"\[Health\] step (\d{1,15}), ([a-z-]+): (.*)", re.DOTALL)
# A text in the message of an event -> its kind.
_EVENTS = {
    "[Health]": "alarm",
    "[Resume]": "resume",
    "[Canary]": "canary",
    "the run ended early": "end",
    "gets no further points": "files",
    "its lines wait until they can be written": "files",
    "can be written again": "files",
    "attested=no": "hand-over",
}
_MAX_OF_KIND = 200
_MAX_LINES = 60  # of a message
_MOST_CHARACTERS = 1 << 27  # of run.log: months
NUM_STEPS_SHOWN = 8  # of rollouts.jsonl
_STEP = re.compile(rb'\{"step": ?(\d{1,15})\b')


@dataclass(frozen=True, slots=True)
class Event:
    """A message of run.log. A `[Health]` line that raises an alarm sets `step` and `alarm`.

    Example: `Event("2026-01-02 03:04:05", "alarm", "the entropy is 0.08", "", 30, "entropy")`
    """

    time: str  # as in the log
    kind: str
    text: str
    details: str = ""  # further lines, such as a traceback
    step: int | None = None
    alarm: str | None = None  # as in its flag, --rl-alarm-<alarm>


@dataclass(frozen=True, slots=True)
class Sample:
    """A response and its reward. All texts can be written as UTF-8."""

    prompt: str
    response: str
    answer: str
    reward: float | None
    parts: tuple[tuple[str, str], ...]
    note: str  # why it was cut, or got no reward; "" otherwise


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The best sample of a step and, if its reward is lower, the worst."""

    step: int
    weight_version: str
    num_logged: int
    best: Sample
    worst: Sample | None


@dataclass(frozen=True, slots=True)
class Run:
    """Contents of a run's files.

    `points` has the steps with a finite value, and these values, of each metric that has any. The
    evaluation after the last step has a separate step, with nothing else.
    """

    folder: Path
    name: str
    steps: np.ndarray  # [n] int64, ascending
    points: Mapping[str, tuple[np.ndarray, np.ndarray]]  # [k] int64, [k] float64; k <= n
    config: Mapping[str, Any]  # every argument
    about: Mapping[str, Any]  # command, ranks, versions
    summary: Mapping[str, Any]
    samples: tuple[StepSamples, ...]
    events: tuple[Event, ...]
    timeline: tuple[RoleStep, ...]
    notes: tuple[str, ...]  # sentences about parts that could not be read
    last_written: datetime
    has_ended: bool  # with a summary; one from before a resume does not count

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps with a finite value, and these values."""
        return self.points.get(metric, (np.empty(0, np.int64), np.empty(0)))


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs, each named by the shortest end of its path that is unique among them."""
    paths = [folder.absolute().resolve() for folder in folders]
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [
        read_run(folder, name="/".join(path.parts[-depth:]))
        for folder, path in zip(folders, paths, strict=True)
    ]


def read_run(folder: Path, *, name: str) -> Run:
    """Read a run directory. Raises UsageError if `folder` is not one."""
    if not any((folder / file).is_file() for file in ("metrics.jsonl", "config.yaml")):
        empty = "has no metrics.jsonl and no config.yaml"
        found = empty if folder.is_dir() else "is not a folder"
        remedy = "name the folder (--rl-run-dir) of a run that has begun"
        raise UsageError(found, flag=f"RUN_DIR {folder}", remedy=remedy)
    notes: list[str] = []
    metrics = _read_lines(folder / "metrics.jsonl", read_metrics, notes)
    if metrics == {}:
        notes.append("metrics.jsonl has no step yet, so there are no charts")
    metrics = dict(sorted((metrics or {}).items()))
    config = _read(folder / "config.yaml", read_config, notes) or RunConfig()
    summary = _read(folder / "summary.json", _read_mapping, notes) or {}
    times = {name: file.stat().st_mtime for name in FILES if (file := folder / name).is_file()}
    return Run(
        folder=folder,
        name=name,
        steps=np.array(list(metrics), dtype=np.int64),
        points=_points(metrics),
        config=config.resolved,
        about=config.about,
        summary=summary,
        samples=_read(folder / "rollouts.jsonl", read_samples, notes) or (),
        events=_read(folder / "run.log", read_events, notes) or (),
        timeline=_read_lines(folder / "timeline.jsonl", read_timeline, notes) or (),
        notes=tuple(notes),
        last_written=datetime.fromtimestamp(max(times.values())),
        # A run writes its configuration at each start, and its summary at the end.
        has_ended=bool(summary) and times["summary.json"] >= times.get("config.yaml", 0),
    )


def _points(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Return `Run.points`. Its size follows the file's: names may have the step in them."""
    points: dict[str, tuple[list[int], list[float]]] = {}
    for step, values in metrics.items():
        for name, value in values.items():
            if math.isfinite(value):
                steps, series = points.setdefault(name, ([], []))
                steps.append(step)
                series.append(value)
    return {name: (np.array(steps), np.array(series)) for name, (steps, series) in points.items()}


def _read(path: Path, parse: Callable[[Path], _Read], notes: list[str]) -> _Read | None:
    """Return `parse`'s result for a file; None and a note if it is missing or cannot be read."""
    if not path.is_file():
        notes.append(_ABSENT[path.name])
        return None
    try:
        result = parse(path)
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 1))
            is_cut = file.read(1) not in (b"", b"\n")
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror})")
        return None
    except ValueError:
        notes.append(f"{path.name} is empty or truncated; it is left out")
        return None
    if is_cut and path.suffix == ".jsonl":
        notes.append(f"{path.name} ends in an incomplete line, which is left out")
    return result


def _read_lines(
    path: Path, parse: Callable[[Path, list[int]], _Read], notes: list[str]
) -> _Read | None:
    """As `_read`, with a note about damaged lines."""
    damaged: list[int] = []
    result = _read(path, lambda path: parse(path, damaged), notes)
    if damaged:
        notes.append(damage_note(path.name, damaged))
    return result


def _read_mapping(path: Path) -> dict[str, Any]:
    mapping = parse_json(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(mapping, dict):
        raise InvalidData(f"{path} is not a mapping")
    return mapping


def read_events(path: Path) -> tuple[Event, ...]:
    """Return the messages to show, in their order; the first 200 of each kind.

    If some hand-overs were attested, the first one that was not is an event.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(_MOST_CHARACTERS)
    events: list[Event] = []
    counts: Counter[str] = Counter()
    for time, first, further in (match.groups() for match in _MESSAGE.finditer(text)):
        kind = next((kind for mark, kind in _EVENTS.items() if mark in first), None)
        if kind is None or first.startswith("reward "):  # its failures may quote a response
            continue
        counts[kind] += 1
        if counts[kind] > (1 if kind == "hand-over" else _MAX_OF_KIND):
            continue
        # run.log indents the further lines.
        details = textwrap.dedent("\n".join(further.strip("\n").split("\n")[:_MAX_LINES]))
        event = Event(time, kind, clean(first), clean(details))
        if kind == "alarm" and (raised := _ALARM.match(event.text)):
            event = replace(event, text=raised[3], step=int(raised[1]), alarm=raised[2])
        events.append(event)
    return tuple(e for e in events if e.kind != "hand-over" or "attested=yes" in text)


def read_samples(path: Path, num_steps: int = NUM_STEPS_SHOWN) -> tuple[StepSamples, ...]:
    """Return the samples of up to `num_steps` steps, including the first and the last, without
    truncated lines. If a step was done twice, with others in between, the later samples count.

    Only lines of the steps that are shown are parsed: the file of a long run has gigabytes.
    """
    places: dict[int, tuple[int, int]] = {}  # step -> begin and end of its last lines, in bytes
    before, position = -1, 0
    samples = []
    with path.open("rb") as file:
        for line in file:
            if match := _STEP.match(line):
                step = int(match[1])
                begin = places[step][0] if step == before else position
                places[step] = (begin, position + len(line))
                before = step
            position += len(line)
        steps, last = sorted(places), len(places) - 1
        if len(steps) > num_steps:
            steps = [steps[round(i * last / (num_steps - 1))] for i in range(num_steps)]
        for step in steps:
            begin, end = places[step]
            file.seek(begin)
            values = [_parsed(line) for line in file.read(end - begin).splitlines()]
            if lines := [value for value in values if value.get("step") == step]:
                samples.append(_of_step(step, lines))
    return tuple(samples)


def _parsed(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(InvalidData):
        value = parse_json(line.decode("utf-8", errors="replace"))
        return value if isinstance(value, dict) else {}
    return {}


def _of_step(step: int, lines: list[dict[str, Any]]) -> StepSamples:
    def reward(line: dict[str, Any]) -> float:
        value = finite_number(line.get("reward"))
        return float("-inf") if value is None else value

    best, worst = max(lines, key=reward), min(lines, key=reward)
    return StepSamples(
        step=step,
        weight_version=clean(lines[0].get("weight_version", "?")),
        num_logged=len(lines),
        best=_sample(best),
        worst=_sample(worst) if reward(worst) < reward(best) else None,
    )


def _sample(line: dict[str, Any]) -> Sample:
    notes = [f"the reward failed: {clean(line['failure'])}"] if line.get("failure") else []
    if line.get("finish_reason") == "length":
        notes.append("cut at --rl-max-response-tokens")
    parts = line.get("parts")
    return Sample(
        prompt=clean(line.get("prompt", "")),
        response=clean(line.get("response", "")),
        answer=clean(line.get("answer", "")),
        reward=finite_number(line.get("reward")),
        parts=tuple((clean(name), clean(value)) for name, value in parts.items())
        if isinstance(parts, dict) and len(parts) > 1
        else (),
        note="; ".join(notes),
    )
