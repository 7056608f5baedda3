"""Spans as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

A rank is a process with a row each for stages, model and communication. Times are microseconds of
the machine's monotonic clock, which all processes of one machine share.

This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.observe.trace.table import COMMUNICATION, MODEL, STAGE, Span

_THREADS = {STAGE: 0, MODEL: 1, COMMUNICATION: 2}
_THREAD_NAMES = ("stages", "model", "communication")


def chrome_events(
    rank: int, label: str, spans: Sequence[Span], steps: Iterable[tuple[int, int, int]]
) -> list[dict[str, Any]]:
    """One rank's events; `steps` are (number, begin, end), which enclose the stages."""
    events = [
        _about(rank, "process_name", name=f"rank {rank}{label and f' ({label})'}"),
        _about(rank, "process_sort_index", sort_index=rank),
    ]
    for thread, name in enumerate(_THREAD_NAMES):
        events.append(_about(rank, "thread_name", thread, name=name))
        events.append(_about(rank, "thread_sort_index", thread, sort_index=thread))
    for number, begin, end in steps:
        events.append(_complete(rank, 0, f"step {number}", "step", begin, end))
    for span in spans:
        thread = _THREADS[span.category]
        event = _complete(rank, thread, span.name, span.category, span.start, span.end)
        events.append({**event, "args": {"row": span.row}})
    return events


def _about(rank: int, what: str, thread: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": args}


def _complete(
    rank: int, thread: int, name: str, category: str, begin: int, end: int
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
    }


def write_events(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Write a trace that a viewer opens; the file is complete or not there."""
    lines = ",\n".join(json.dumps(event) for event in events)
    write_text(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n')


def merge(paths: Sequence[Path], merged: Path) -> None:
    """One trace of several ranks' files, all of one machine."""
    events: list[dict[str, Any]] = []
    for path in paths:
        events += json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    write_events(merged, events)


def write_text(path: Path, text: str) -> None:
    """Write a file that nobody can see half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
