"""Tracing of N steps (`--rl-trace N`) with torch.profiler.

    <run dir>/trace/rank<R>.json   Chrome trace events, for ui.perfetto.dev or chrome://tracing
    <run dir>/trace/trace.json     all ranks, if they run on one machine
    <run dir>/trace/table.txt      seconds of every stage, and the bottleneck; printed as well

The first step of a run warms up (it compiles, allocates, connects), so the N steps after it are
traced; a run of N steps or fewer is traced completely. A step ends where `time/step_seconds` ends.

The trace records spans: the stages of `StageTimers`, Megatron's forward and backward passes, the
update, and torch's own spans of collectives, from call to end. It does not record operations: a
rollout has millions of them, at half a kilobyte each. With CUDA it also records kernels, except
during a rollout or evaluation, and stages and passes begin and end with a wait for the current
stream, because a launch does not show how long its kernel runs. Traced steps are slower.

A failure of tracing is logged once as a warning, and never stops training.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from mcore_rl.common import objects
from mcore_rl.observe.trace_table import STEP, TracedStep, make_table, render, traced_steps

logger = logging.getLogger(__name__)

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
# These also contain the loss, the release of the output and the transfer of the gradient.
_PASSES = {
    "forward_step": "forward",
    "backward_step": "backward",
    "backward_step_multimodule": "backward",
}
# During these only the engine uses the device.
_WITHOUT_KERNELS = ("rollout", "eval")
_current: Tracer | None = None


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Time a `with` block as a stage while steps are traced."""
    tracer = _current
    if tracer is None:
        yield
        return
    with tracer.span(name, is_stage=True):
        if name in _WITHOUT_KERNELS:
            tracer.record_kernels(False)
        try:
            yield
        finally:
            if name in _WITHOUT_KERNELS:
                tracer.record_kernels(True)


def step_ended() -> None:
    """Mark the end of a step and the start of the next."""
    if _current is not None:
        _current.step_ended()


@dataclass(frozen=True, slots=True)
class _Report:
    """A rank's message to rank 0."""

    host: str
    steps: list[TracedStep]
    file: Path | None  # its events
    failure: str | None


class Tracer:
    """Tracer of a run's steps on this rank.

    `num_steps` are requested, and `num_steps_left` remain in the run, starting with step
    `first_step` (from 0). Nothing happens before `start`, or for 0 steps. `report` is collective;
    everything else is local to the rank. No method raises.
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
        self.num_steps = max(min(num_steps, num_steps_left), 0)
        self._num_skipped = 1 if num_steps < num_steps_left else 0
        self._first_step = first_step
        self._folder, self._rank, self._label = folder, rank, label
        self._file = folder / f"rank{rank}.json"
        self._profile: profile | None = None
        self._undo = contextlib.ExitStack()
        self._handover = contextlib.ExitStack()
        self._stages: set[str] = set()
        self._steps: list[TracedStep] = []
        self._num_ended = 0  # steps of the run, traced or not; counted even if tracing failed
        self._reported = False
        self._failure: str | None = None

    @property
    def _over(self) -> bool:
        return self._num_ended >= self._num_skipped + self.num_steps

    def start(self) -> None:
        """Begin with the first step, and log which steps are traced."""
        global _current
        if self.num_steps == 0:
            return
        first = self._first_step + self._num_skipped
        last = first + self.num_steps - 1
        which = f"step {first} is" if first == last else f"steps {first} to {last} are"
        why = "the one before warms up" if self._num_skipped else "the first one warms up as well"
        if self._rank == 0:
            logger.info("%s traced (%s): %s", which, why, self._folder)
        _current = self
        # Kineto reports every start and stop on stderr, at a level above errors.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        with self._surviving(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if no step warms up
            steps = schedule(wait=0, warmup=self._num_skipped, active=self.num_steps, repeat=1)
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(
                activities=activities, schedule=steps, on_trace_ready=self._write
            )
            self._time_passes()
            with _spans_alone():
                self._profile.start()

    @contextlib.contextmanager
    def span(self, name: str, *, is_stage: bool = False) -> Iterator[None]:
        """Time a `with` block."""
        if is_stage:
            self._stages.add(name)
        _synchronize()
        with record_function(name):
            yield
            _synchronize()

    def record_kernels(self, wanted: bool) -> None:
        """Switch the recording of CUDA kernels on or off while a step is traced."""
        is_tracing = self._num_skipped <= self._num_ended and not self._over
        if self._profile is not None and is_tracing and torch.cuda.is_available():
            with self._surviving():
                self._profile.toggle_collection_dynamic(wanted, [ProfilerActivity.CUDA])

    def handover_started(self, direction: str) -> None:
        """Begin a hand-over's span (`on_reshard_start`), of direction "train_to_rollout", say."""
        if _current is self:
            name = f"reshard_{direction.partition('_')[2]}"
            self._handover.enter_context(self.span(name, is_stage=True))

    def handover_ended(self) -> None:
        """End a hand-over's span (`on_reshard_end`)."""
        self._handover.close()

    def step_ended(self) -> None:
        """End a step: start, continue or stop tracing."""
        self._num_ended += 1
        with self._surviving(), _spans_alone():
            _synchronize()
            if self._profile is not None:
                self._profile.step()
        if self._over:
            self._stop()

    def report(self) -> None:
        """Write the table and the trace of all ranks, on rank 0. Collective over the world.

        Call it after every step; it has an effect after the last traced one.
        """
        if self.num_steps == 0 or self._reported or not self._over:
            return
        self._reported = True
        with self._surviving():
            everyone = self._gather()
            if self._rank == 0:
                self._show(everyone)

    def close(self) -> None:
        """Stop, and write the trace of a run that ends early. Local to this rank; idempotent."""
        self._stop()

    def _stop(self) -> None:
        global _current
        if _current is self:
            _current = None
        profiler, self._profile = self._profile, None
        with self._surviving():
            self._undo.close()
            if profiler is not None:
                profiler.stop()

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """End tracing on an exception, not training; steps still count for `report`."""
        try:
            yield
        except Exception as error:
            if self._failure is None:
                self._failure = f"{type(error).__name__}: {error}"
                logger.warning(
                    "rank %d: tracing failed, training goes on: %s", self._rank, self._failure
                )
            profiler, self._profile = self._profile, None
            with contextlib.suppress(Exception):
                self._undo.close()
                if profiler is not None:
                    profiler.on_trace_ready = None
                    profiler.stop()

    def _time_passes(self) -> None:
        """Replace the passes in Megatron's schedules, which look them up by name at each call."""
        schedules = sys.modules.get(SCHEDULES)
        for function, name in _PASSES.items():
            original = getattr(schedules, function, None)
            if original is not None:
                setattr(schedules, function, self._timed(name, original))
                self._undo.callback(setattr, schedules, function, original)

    def _timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return original(*args, **kwargs)

        return timed

    def _write(self, profiler: profile) -> None:
        """Write this rank's events, with the rank as the process id."""
        self._folder.mkdir(parents=True, exist_ok=True)
        raw = self._folder / f".{self._file.name}.raw"
        try:
            profiler.export_chrome_trace(str(raw))
            events = json.loads(raw.read_text(encoding="utf-8"))["traceEvents"]
        finally:
            raw.unlink(missing_ok=True)
        kept = [event for event in events if event["ph"] in "MX" and event["name"] != _WHOLE]
        self._steps = traced_steps(kept, self._stages, self._first_step)
        name = f"rank {self._rank}{self._label and f' ({self._label})'}"
        shown = [_about(self._rank, "process_name", name=name)]
        shown.append(_about(self._rank, "process_sort_index", sort_index=self._rank))
        for event in kept:
            if not event["name"].startswith("process_"):
                shown.append({**event, "pid": self._rank, **self._named(event)})
        _write_events(self._file, shown)

    def _named(self, event: dict[str, Any]) -> dict[str, str]:
        """Return the name of a step's event, with its number in the run."""
        if not event["name"].startswith(STEP):
            return {}
        number = self._first_step + int(event["name"].removeprefix(STEP))
        return {"name": f"step {number}", "cat": "step"}

    def _gather(self) -> list[_Report]:
        file = self._file.absolute() if self._file.exists() else None
        mine = _Report(socket.gethostname(), self._steps, file, self._failure)
        if not torch.distributed.is_initialized():
            return [mine]
        return objects.all_gather(mine)

    def _show(self, everyone: Sequence[_Report]) -> None:
        lines = [
            f"rank {rank}: {report.failure}"
            for rank, report in enumerate(everyone)
            if report.failure is not None
        ]
        complete = [r.steps for r in everyone if len(r.steps) == self.num_steps]
        if complete:
            lines.append(render(make_table(complete)))
        text = "\n".join(lines)
        logger.info("%s", text)
        _write_text(self._folder / "table.txt", text + "\n")
        files = [report.file for report in everyone if report.file is not None]
        if len({report.host for report in everyone}) > 1:
            logger.info("each machine has the traces of its ranks: %s", self._folder)
        elif files:
            merge(files, self._folder / "trace.json")
            logger.info("for ui.perfetto.dev: %s", self._folder / "trace.json")


_WHOLE = "PyTorch Profiler (0)"  # an event around all others


@contextlib.contextmanager
def _spans_alone() -> Iterator[None]:
    """Make a profiler that starts here record spans, not operations: `profile` does not expose the
    argument `scopes` of the function that it calls."""
    original = autograd_profiler._enable_profiler
    autograd_profiler._enable_profiler = functools.partial(
        original,
        scopes={RecordScope.USER_SCOPE},  # type: ignore[call-arg]  # missing in torch's stub
    )
    try:
        yield
    finally:
        autograd_profiler._enable_profiler = original


def _synchronize() -> None:
    """Wait for the current stream, except during a graph capture, which forbids it."""
    if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()


def _about(rank: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": 0, "name": what, "args": args}


def merge(paths: Sequence[Path], merged: Path) -> None:
    """Merge the trace files of several ranks of one machine."""
    events: list[dict[str, Any]] = []
    for path in paths:
        events += json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    _write_events(merged, events)


def _write_events(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Write a trace that a viewer opens."""
    lines = ",\n".join(json.dumps(event) for event in events)
    _write_text(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n')


def _write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
