"""`--rl-trace N`: where the time of N steps goes, by spans of our own.

    <run dir>/trace/rank<R>.json   Chrome trace events, for ui.perfetto.dev or chrome://tracing
    <run dir>/trace/trace.json     all ranks, where one machine has them all
    <run dir>/trace/table.txt      seconds of every stage, and the bottleneck; printed as well

The first step of a run warms up (it compiles, allocates, connects), so the N steps after it are
traced, unless the run has no more than N: then all of it. A step ends where `time/step_seconds`
ends. What happens inside the rollout is not traced: an engine calls its collectives for every layer
and token.

With CUDA the stream in use is waited for where a span begins and ends, as a launch tells nothing of
what it launches. Only that stream: all communication that a wait orders before it is then over too,
and no rank waits for what another would send only later. Communication that overlaps with
computation is traced as it is launched and where it is waited for. Traced steps are slower.

What fails while tracing is told in a warning, once, and never stops training.

`span`, `timed` and `step_ended` speak to the one tracer that is at work; without one they cost a
comparison.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.common import objects
from mcore_rl.hybrid_engine.report import TO_ROLLOUT, ReshardReport
from mcore_rl.observe.trace.files import chrome_events, merge, write_events, write_text
from mcore_rl.observe.trace.hooks import Hooks
from mcore_rl.observe.trace.table import (
    COMMUNICATION,
    MODEL,
    STAGE,
    Span,
    TracedStep,
    make_table,
    render,
    row_of,
    traced_step,
)

logger = logging.getLogger(__name__)

_NOTHING = contextlib.nullcontext()
# Within these the engine has the process to itself.
_UNTRACED_STAGES = ("rollout", "eval")
_current: Tracer | None = None


def span(name: str, category: str) -> AbstractContextManager[None]:
    """Times a `with` block while steps are traced; `category` is STAGE or MODEL."""
    tracer = _current
    return _NOTHING if tracer is None else tracer.span(name, category)


def timed(name: str, category: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: every call is a `span`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with span(name, category):
                return function(*args, **kwargs)

        return call

    return decorate


def step_ended() -> None:
    """A step ends and the next begins."""
    if _current is not None:
        _current.step_ended()


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank tells rank 0."""

    host: str
    steps: Sequence[TracedStep]
    file: Path | None  # None: it was not written
    failure: str | None


class Tracer:
    """Traces steps of a run on this rank.

    `num_steps` are asked for and `num_steps_left` are to come, the first of them being number
    `first_step` (from 0). Nothing happens before `start`, and nothing at all for 0 steps. `report`
    is collective, everything else local to the rank. No method raises. Spans of stages and of the
    model are those of the thread that made the tracer.
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
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.num_steps = max(min(num_steps, num_steps_left), 0)
        self._num_skipped = 1 if num_steps < num_steps_left else 0
        self._first_step = first_step
        self._folder, self._rank, self._label, self._clock = folder, rank, label, clock
        self._synchronize: Callable[[], None] | None = None
        self._hooks = Hooks(self)
        self._thread = threading.get_ident()
        self._inside = threading.local()  # of a collective, which may call others
        self._recording = self._reported = False
        self._num_ended = 0  # steps of the run, traced or not; counted whatever fails
        self._began = 0  # the step that is traced
        self._first_of_step = 0  # its first span in `_spans`
        self._spans: list[Span] = []  # of all traced steps, in the order of their beginnings
        self._stages: list[Span] = []  # open ones
        self._num_backward = 0  # open backward passes
        self._handover: Span | None = None
        self._steps: list[TracedStep] = []
        self._bounds: list[tuple[int, int, int]] = []  # of the steps: number, begin, end
        self._failure: str | None = None

    @property
    def _over(self) -> bool:
        return self._num_ended >= self._num_skipped + self.num_steps

    def start(self) -> None:
        """Become the tracer that `span` speaks to, and say which steps are traced."""
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
        try:
            self._synchronize = _synchronizer()
        except Exception as error:
            self._fail(error)

    def span(self, name: str, category: str) -> AbstractContextManager[None]:
        """Times a `with` block, if its step is traced."""
        self._begin_run(category)
        return self._span(name, category) if self._recording else _NOTHING

    @contextlib.contextmanager
    def _span(self, name: str, category: str) -> Iterator[None]:
        opened = self.begin(name, category)
        try:
            yield
        finally:
            self.end(opened)

    def begin(self, name: str, category: str) -> Span | None:
        """Begin a span of the stages or the model; `end` takes what is returned."""
        self._begin_run(category)
        if not self._recording or threading.get_ident() != self._thread:
            return None
        return self._begin(name, category)

    def begin_collective(self, name: str, *, of_world: bool, launches: bool) -> Span | None:
        """Begin a collective; None for one that another calls, and where none are traced.

        One that only launches does not wait for the device.
        """
        if not self._recording or getattr(self._inside, "collective", False):
            return None
        mine = threading.get_ident() == self._thread
        # Autograd may have a thread of its own, for which this one waits; others do not count.
        if not (mine or self._num_backward):
            return None
        if any(stage.name in _UNTRACED_STAGES for stage in self._stages):
            return None
        opened = self._begin(name, COMMUNICATION, of_world=of_world and mine, launches=launches)
        self._inside.collective = opened is not None
        return opened

    def _begin(
        self, name: str, category: str, *, of_world: bool = False, launches: bool = False
    ) -> Span | None:
        try:
            stage = self._stages[-1].name if self._stages else None
            row = row_of(name, category, stage)
            now = self._now(wait=not launches)
            opened = Span(name, category, row, now, of_world=of_world)
            self._spans.append(opened)
        except Exception as error:
            self._fail(error)
            return None
        if category == STAGE:
            self._stages.append(opened)
        elif name == "backward":
            self._num_backward += 1
        return opened

    def end(self, span: Span | None, *, launches: bool = False) -> None:
        """End what `begin` began; None is nothing."""
        if span is None:
            return
        if span.category == COMMUNICATION:
            self._inside.collective = False
        elif span.category == STAGE:
            self._stages.remove(span)
        elif span.name == "backward":
            self._num_backward -= 1
        try:
            span.end = span.end or self._now(wait=not launches)
        except Exception as error:
            self._fail(error)

    def handover_started(self, report: ReshardReport) -> None:
        """For `on_reshard_start` of the sharding manager."""
        direction = "rollout" if report.direction == TO_ROLLOUT else "train"
        self._handover = self.begin(f"reshard_to_{direction}", STAGE)

    def handover_ended(self, report: ReshardReport) -> None:
        """For `on_reshard_end` of the sharding manager."""
        self.end(self._handover)
        self._handover = None

    def step_ended(self) -> None:
        """A step ends: begin to trace, go on, or stop."""
        self._num_ended += 1
        try:
            now = self._now()
            if self._recording:
                self._end_step(now)
            if self._over:
                self._stop()
            elif self._num_ended >= self._num_skipped and self._failure is None:
                self._begin_step(now)
        except Exception as error:
            self._fail(error)

    def _begin_run(self, category: str) -> None:
        """Begin with the first stage where no step is left out: what comes before builds the run
        and is part of no step."""
        waiting = self._num_ended == self._num_skipped == 0 < self.num_steps
        if waiting and category == STAGE and not self._recording and self._failure is None:
            try:
                self._begin_step(self._now())
            except Exception as error:
                self._fail(error)

    def _begin_step(self, now: int) -> None:
        self._began, self._first_of_step = now, len(self._spans)
        if not self._recording:
            self._hooks.install()
            self._recording = True

    def _end_step(self, now: int) -> None:
        number = self._first_step + self._num_ended - 1  # which has just been counted
        spans = self._spans[self._first_of_step :]
        for opened in spans:
            opened.end = opened.end or now
        self._bounds.append((number, self._began, now))
        self._steps.append(traced_step(number, spans, self._began, now))

    def _stop(self) -> None:
        global _current
        self._recording = False
        if _current is self:
            _current = None
        self._hooks.remove()

    def _now(self, *, wait: bool = True) -> int:
        if wait and self._recording and self._synchronize is not None:
            self._synchronize()
        return self._clock()

    def _fail(self, error: Exception) -> None:
        """Tracing ends and training goes on; steps are still counted, as `report` is collective."""
        self._recording = False
        with contextlib.suppress(Exception):
            self._hooks.remove()
        if self._failure is None:
            self._failure = f"{type(error).__name__}: {error}"
            logger.warning(
                "rank %d: tracing failed, training goes on: %s", self._rank, self._failure
            )

    def report(self) -> None:
        """Files of every rank and, on rank 0, the table. Collective over the world.

        To be called after every step; it does something after the last traced one.
        """
        if self.num_steps == 0 or self._reported or not self._over:
            return
        self._reported = True
        written = self._write()
        try:
            everyone = self._gather(written)
            if self._rank == 0:
                self._show(everyone)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Stop, and write what a run that ends early has traced. Local to this rank; idempotent."""
        self._stop()
        if self._spans and not self._reported:
            self._reported = True
            self._write()

    def _write(self) -> Path | None:
        """This rank's events; the file, if there is one now."""
        path = self._folder / f"rank{self._rank}.json"
        try:
            spans = [span for span in self._spans if span.end]
            write_events(path, chrome_events(self._rank, self._label, spans, self._bounds))
        except Exception as error:
            self._fail(error)
            return None
        return path.absolute()

    def _gather(self, written: Path | None) -> list[_Report]:
        import torch.distributed as dist

        mine = _Report(socket.gethostname(), self._steps, written, self._failure)
        if not dist.is_initialized():
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
        write_text(self._folder / "table.txt", text + "\n")
        files = [report.file for report in everyone if report.file is not None]
        if len({report.host for report in everyone}) > 1:
            logger.info("each machine has the traces of its ranks: %s", self._folder)
        elif files:
            merge(files, self._folder / "trace.json")
            logger.info("for ui.perfetto.dev: %s", self._folder / "trace.json")


def _synchronizer() -> Callable[[], None] | None:
    """What waits for the stream in use; None without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return None

    def synchronize() -> None:
        # A graph that is being captured may not be waited for.
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()

    return synchronize


__all__ = ["COMMUNICATION", "MODEL", "STAGE", "Tracer", "span", "step_ended", "timed"]
