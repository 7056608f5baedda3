"""A few of the texts in rollouts.jsonl, spread over the run: the best and the worst of a step.

The file of a long run has gigabytes, so that only its steps are looked at, and only the lines of
those that are shown are parsed. Pure.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.common.readers import InvalidData, finite_number, parse_json
from mcore_rl.tools.report.texts import clean

NUM_STEPS_SHOWN = 8
_STEP = re.compile(rb'\{"step": ?(\d{1,15})\b')


@dataclass(frozen=True, slots=True)
class Sample:
    """A response and what it earned. Texts hold nothing that could not be written as UTF-8."""

    prompt: str
    response: str
    answer: str
    reward: float | None
    parts: tuple[tuple[str, str], ...]
    note: str  # why it ended where it did, or got no reward; "" if all is as usual


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The best sample of a step and, if it earned less, the worst."""

    step: int
    weight_version: str
    num_logged: int
    best: Sample
    worst: Sample | None


def read_samples(path: Path, num_steps: int = NUM_STEPS_SHOWN) -> tuple[StepSamples, ...]:
    """Of up to `num_steps` steps, the first and the last among them; lines that are cut are not
    read. Of a step that was done twice, with others in between, the later samples count."""
    places = _places(path)
    steps = sorted(places)
    if len(steps) > num_steps:
        last = len(steps) - 1
        steps = [steps[round(i * last / (num_steps - 1))] for i in range(num_steps)]
    found = []
    with path.open("rb") as file:
        for step in steps:
            start, end = places[step]
            file.seek(start)
            lines = _parsed(file.read(end - start).splitlines(), step)
            if lines:
                found.append(_of_step(step, lines))
    return tuple(found)


def _places(path: Path) -> dict[int, tuple[int, int]]:
    """Where the last run of lines of each step begins and ends, in bytes."""
    places: dict[int, tuple[int, int]] = {}
    before: int | None = None
    position = 0
    with path.open("rb") as file:
        for line in file:
            end = position + len(line)
            if match := _STEP.match(line):
                step = int(match[1])
                start = places[step][0] if step == before else position
                places[step] = (start, end)
                before = step
            position = end
    return places


def _parsed(lines: Sequence[bytes], step: int) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        with contextlib.suppress(InvalidData):
            value = parse_json(line.decode("utf-8", errors="replace"))
            if isinstance(value, dict) and value.get("step") == step:
                found.append(value)
    return found


def _of_step(step: int, lines: Sequence[dict[str, Any]]) -> StepSamples:
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
    notes = []
    if line.get("failure"):
        notes.append(f"the reward failed: {clean(line['failure'])}")
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
