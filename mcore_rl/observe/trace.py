"""Tracing of N steps (`--rl-trace N`).

    <run dir>/trace/rank<R>.json   Chrome trace events, for ui.perfetto.dev or chrome://tracing
    <run dir>/trace/trace.json     all ranks, if they run on one machine
    <run dir>/trace/table.txt      seconds of every stage, and the bottleneck; logged as well

The first step of a run warms up (it compiles, allocates, connects), so the N steps after it are
traced; a run of N steps or fewer is traced completely. `common.spans` says what is recorded.
Traced steps are slower. A failure of tracing is logged as a warning and does not stop training.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from mcore_rl.common import objects
from mcore_rl.common.spans import COLLECTIVE, Recording, Span
from mcore_rl.observe.trace_table import TracedStep, table_of, traced_step

logger = logging.getLogger(__name__)


class Tracer:
    """Tracer of a run's steps on this rank.

    `num_steps` are requested, and `num_steps_left` remain in the run, starting with step
    `first_step` (from 0). Call `end_step` on all ranks after every step: after the last traced
    step it is collective over the world. Nothing is recorded for 0 steps.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        first_step: int,
        num_steps_left: int,
        folder: Path,
        rank: int,
        label: str = "",
    ) -> None:
        num_skipped = 1 if num_steps < num_steps_left else 0
        self._first = first_step + num_skipped
        self._last = self._first + max(min(num_steps, num_steps_left), 0) - 1
        self._step = first_step
        self._folder, self._rank, self._label = folder, rank, label
        self._recording: Recording | None = None
        self._ends: list[int] = []  # of the traced steps, after the begin of the first

    def start(self) -> None:
        """Begin the first step, and log which steps are traced."""
        if self._first > self._last:
            return
        if self._rank == 0:
            logger.info("steps %d to %d are traced: %s", self._first, self._last, self._folder)
        self._begin_if_due()

    def end_step(self) -> None:
        """End a step; after the last traced one, write the table and the trace of all ranks."""
        self._step += 1
        if self._recording is not None:
            self._ends.append(self._recording.now())
            if self._step > self._last:
                self._report()
        else:
            self._begin_if_due()

    def close(self) -> None:
        """Write this rank's events of a run that ends early. Local to the rank; idempotent."""
        if self._recording is not None:
            self._write()

    def _begin_if_due(self) -> None:
        if self._step == self._first <= self._last:
            self._recording = Recording()
            self._recording.start()
            self._ends.append(self._recording.now())

    def _write(self) -> list[TracedStep]:
        """Stop, and write this rank's events; return its steps for the table."""
        assert self._recording is not None, "nothing was recorded"
        recording, self._recording = self._recording, None
        device_events = recording.stop(self._folder)
        periods = list(enumerate(pairwise(self._ends), start=self._first))
        name = f"rank {self._rank}{self._label and f' ({self._label})'}"
        main = threading.get_native_id()
        steps = [Span(f"step {step}", "step", *period, main) for step, period in periods]
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "args": {"name": name}},
            {"ph": "M", "name": "process_sort_index", "args": {"sort_index": self._rank}},
            *map(_event_of, [*steps, *recording.spans]),
            *device_events,
        ]
        file = self._folder / f"rank{self._rank}.json"
        _try_to_write(file, lambda: _chrome({**e, "pid": self._rank} for e in events))
        spans = [*recording.spans, *_collectives_of(device_events)]
        return [traced_step(step, spans, *period) for step, period in periods]

    def _report(self) -> None:
        mine = (socket.gethostname(), self._write())
        everyone = objects.all_gather(mine) if torch.distributed.is_initialized() else [mine]
        if self._rank != 0:
            return
        table = table_of([steps for _, steps in everyone])
        logger.info("%s", table)
        _try_to_write(self._folder / "table.txt", lambda: f"{table}\n")
        if len({host for host, _ in everyone}) > 1:
            logger.info("each machine has the traces of its ranks: %s", self._folder)
            return
        files = [self._folder / f"rank{rank}.json" for rank in range(len(everyone))]
        if _try_to_write(merged := self._folder / "trace.json", lambda: merge(files)):
            logger.info("for ui.perfetto.dev: %s", merged)


def merge(files: Sequence[Path]) -> str:
    """Return the trace of several ranks' files."""
    traces = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return _chrome(event for trace in traces for event in trace["traceEvents"])


def _event_of(span: Span) -> dict[str, Any]:
    # Integers: the fractions that a float keeps of today's microseconds do not add up.
    start, end = span.start // 1000, span.end // 1000
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "name": span.name, "cat": span.kind, "tid": span.thread, **times}


def _collectives_of(device_events: Iterable[dict[str, Any]]) -> Iterator[Span]:
    for event in device_events:
        if event["cat"] == "kernel" and event["name"].startswith("nccl"):
            start = round(1e3 * event["ts"])
            yield Span(event["name"], COLLECTIVE, start, start + round(1e3 * event["dur"]))


def _chrome(events: Iterable[dict[str, Any]]) -> str:
    lines = ",\n".join(map(json.dumps, events))
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _try_to_write(path: Path, text: Callable[[], str]) -> bool:
    """Write a file; if that fails, log a warning and return False."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(), encoding="utf-8")
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be written, training continues (%s)", path, error)
        return False
    return True
