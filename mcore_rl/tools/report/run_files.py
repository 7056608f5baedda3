"""A run directory as it is found: finished, still being written, or left by a run that was killed.

What is missing, empty or cut is noted, and the rest is read. Pure.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mcore_rl.common.errors import UsageError
from mcore_rl.common.readers import InvalidData, parse_json
from mcore_rl.observe.run_directory import RunConfig, damage_note, read_config, read_metrics
from mcore_rl.tools.report.run_events import Event, read_events
from mcore_rl.tools.report.sample_texts import StepSamples, read_samples

_Read = TypeVar("_Read")


# What a run writes, and what is said where one of the files is not there.
_ABSENT = {
    "metrics.jsonl": "metrics.jsonl is not there",
    "rollouts.jsonl": "rollouts.jsonl is not there: no sample texts",
    "run.log": "run.log is not there: no alarms and events but the metric health/alarms",
    "config.yaml": "config.yaml is not there: no configuration",
    "summary.json": "summary.json is not there: a run writes it at its end (versions, layouts)",
}


@dataclass(frozen=True, slots=True)
class Run:
    """What the files of a run say.

    `values` has an array for each metric, aligned with `steps`, NaN where a step lacks it. The
    evaluation after the last step has a step of its own, with nothing else.
    """

    folder: Path
    name: str
    steps: np.ndarray  # [n] int64, ascending
    values: Mapping[str, np.ndarray]  # [n] float64
    config: Mapping[str, Any]  # every argument
    about: Mapping[str, Any]  # command, ranks, versions
    summary: Mapping[str, Any]
    samples: tuple[StepSamples, ...]
    events: tuple[Event, ...]
    notes: tuple[str, ...]  # sentences about what could not be read
    last_written: datetime | None

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the steps that have a finite one."""
        values = self.values.get(metric)
        if values is None:
            return self.steps[:0], np.empty(0)
        there = np.isfinite(values)
        return self.steps[there], values[there]

    @property
    def num_steps_done(self) -> int:
        """Steps that were trained; the last evaluation is none of them."""
        return int(np.isfinite(self.values.get("reward/mean", np.empty(0))).sum())

    @property
    def num_steps_asked(self) -> int | None:
        """`--rl-num-steps`, where the configuration is there."""
        asked = self.config.get("rl_num_steps", self.config.get("num_steps"))  # of an older run
        return asked if isinstance(asked, int) else None

    @property
    def is_finished(self) -> bool:
        """The last step is done; a summary alone may be that of a shorter run in the folder."""
        asked, trained = self.num_steps_asked, self.series("reward/mean")[0]
        return asked is not None and trained.size > 0 and int(trained[-1]) >= asked - 1


def read_run(folder: Path, *, name: str) -> Run:
    """All of a run directory. Raises UsageError if `folder` is none."""
    if not any((folder / file).is_file() for file in ("metrics.jsonl", "config.yaml")):
        what = (
            "is not a folder" if not folder.is_dir() else "has no metrics.jsonl and no config.yaml"
        )
        raise UsageError(
            what,
            flag=f"RUN_DIR {folder}",
            remedy="name the folder (--rl-run-dir) of a run that has begun",
        )
    notes: list[str] = []
    damaged: list[int] = []
    metrics = _read(folder / "metrics.jsonl", lambda path: read_metrics(path, damaged), notes)
    if damaged:
        _note(notes, damage_note("metrics.jsonl", damaged))
    if metrics == {}:
        _note(notes, "metrics.jsonl has no step yet: no curve can be drawn")
    steps, values = _columns(metrics or {})
    config = _whole(folder / "config.yaml", read_config, notes) or RunConfig()
    files = [file for name in _ABSENT if (file := folder / name).is_file()]
    last_written = max((file.stat().st_mtime for file in files), default=None)
    return Run(
        folder=folder,
        name=name,
        steps=steps,
        values=values,
        config=config.resolved,
        about=config.about,
        summary=_whole(folder / "summary.json", _parse_json, notes) or {},
        samples=_read(folder / "rollouts.jsonl", read_samples, notes) or (),
        events=_read(folder / "run.log", read_events, notes) or (),
        notes=tuple(notes),
        last_written=None if last_written is None else datetime.fromtimestamp(last_written),
    )


def _note(notes: list[str], sentence: str) -> None:
    if sentence not in notes:
        notes.append(sentence)


def _read(path: Path, parse: Callable[[Path], _Read], notes: list[str]) -> _Read | None:
    """What `parse` makes of a file; None and a note where it is not there or not readable."""
    if not path.is_file():
        _note(notes, _ABSENT[path.name])
        return None
    try:
        found = parse(path)
        if path.suffix == ".jsonl" and _last_byte(path) not in (b"", b"\n"):
            _note(notes, f"{path.name} ends in a line that is not finished; it is left out")
        return found
    except OSError as error:
        _note(notes, f"{path.name} cannot be read ({error.strerror})")
        return None


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return file.read(1)


def _parse_json(path: Path) -> dict[str, Any]:
    found = parse_json(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(found, dict):
        raise InvalidData(f"{path} is not a mapping")
    return found


def _whole(path: Path, parse: Callable[[Path], _Read], notes: list[str]) -> _Read | None:
    """The same for a file that is worth nothing if it is half written."""
    found = None
    with contextlib.suppress(ValueError):
        found = _read(path, parse, notes)
    if found is None and path.is_file():
        _note(notes, f"{path.name} is empty or cut; it is left out")
    return found


def _columns(
    metrics: Mapping[int, Mapping[str, float]],
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    steps = np.array(sorted(metrics), dtype=np.int64)
    values: dict[str, np.ndarray] = {}
    for row, step in enumerate(steps.tolist()):
        for name, value in metrics[step].items():
            if name not in values:
                values[name] = np.full(steps.size, math.nan)
            values[name][row] = value
    return steps, values
