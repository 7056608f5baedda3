"""What run.log tells of a run beside its hand-overs: alarms, resumes, ends. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.tools.report.texts import clean

_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (.*)", re.DOTALL)
_ALARM = re.compile(r"\[Health\] step (\d{1,15}), ([a-z-]+): (.*)", re.DOTALL)
# What lines that are worth showing begin with or hold, by the kind they are shown as.
_WORTH = (
    ("alarm", "[Health]"),
    ("resume", "[Resume]"),
    ("canary", "[Canary]"),
    ("end", "the run ended early"),
    ("files", "gets no further points"),
    ("files", "its lines wait until they can be written"),
    ("files", "can be written again"),
    ("hand-over", "attested=no"),
)
# The traceback of a run that ended early is dozens of lines; of a kind that repeats each step the
# first ones tell as much as all.
_MAX_LINES = 60
_MAX_OF_KIND = 200


@dataclass(frozen=True, slots=True)
class Event:
    """A message of run.log. `step` and `alarm` are those of a `[Health]` line that raises one."""

    time: str  # as in the log
    kind: str
    text: str
    details: str = ""  # the lines that followed, of a traceback
    step: int | None = None
    alarm: str | None = None  # as in its flag, --rl-alarm-<alarm>


def read_events(path: Path) -> tuple[Event, ...]:
    """The messages worth showing, in their order; of each kind the first 200.

    Hand-overs that nobody attested are one event, the first, if others were attested.
    """
    events: list[Event] = []
    counts: dict[str, int] = {}
    num_attested = 0
    for time, text, details in _messages(path):
        num_attested += "attested=yes" in text
        kind = next((kind for kind, mark in _WORTH if mark in text), None)
        if kind is None or text.startswith("reward "):  # whose failures may quote a response
            continue
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= (1 if kind == "hand-over" else _MAX_OF_KIND):
            events.append(_event(time, kind, text, details))
    return tuple(e for e in events if e.kind != "hand-over" or num_attested)


def _event(time: str, kind: str, text: str, details: str) -> Event:
    text, details = clean(text), clean(textwrap.dedent(details))  # run.log indents them
    found = _ALARM.match(text)
    if kind != "alarm" or found is None:
        return Event(time, kind, text, details)
    step, name, says = found.groups()
    return Event(time, kind, says, details, int(step), name)


def _messages(path: Path) -> Iterator[tuple[str, str, str]]:
    """Time, first line, further lines of each message."""
    current: tuple[str, str] | None = None
    further: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            found = _LINE.match(line.rstrip("\n"))
            if found is None:
                if len(further) < _MAX_LINES:
                    further.append(line.rstrip("\n"))
                continue
            if current is not None:
                yield *current, "\n".join(further)
            current, further = (found[1], found[2]), []
    if current is not None:
        yield *current, "\n".join(further)
