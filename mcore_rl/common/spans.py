"""Spans of time on this process, which `--rl-trace` records. Without it they cost next to nothing.

    with span("optimizer", PASS): ...

On a GPU `torch.profiler` records the kernels as well, and spans of stages and passes begin and end
with a wait for the current stream, because a launch does not show how long its kernel runs.
Operators are not recorded: torch.profiler takes a kilobyte and microseconds for each of them, and a
step has millions.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)

# Kinds of spans. A wait for all ranks is a collective that no rank leaves before all have come.
STAGE, PASS, COLLECTIVE, WORLD, PART = "stage", "pass", "collective", "wait for all ranks", "part"
# Stages during which only the engine uses the device: its kernels are not recorded.
_ENGINE_STAGES = ("rollout", "eval")
_current: Recording | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A period of time; the clock counts nanoseconds since 1970, see `Recording.now`.

    Example: `Span("rollout", STAGE, 1_790_000_000_000_000_000, 1_790_000_001_000_000_000)`
    """

    name: str
    kind: str
    start: int
    end: int
    thread: int = 0


class Recording:
    """The spans of this process, from `start` to `stop`. One at a time."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._profile: profile | None = None
        # torch.profiler counts from 1970.
        self._shift = time.time_ns() - time.perf_counter_ns()

    def now(self) -> int:
        """Return nanoseconds since 1970, by a clock that does not jump while this records."""
        return self._shift + time.perf_counter_ns()

    def start(self) -> None:
        global _current
        assert _current is None, "spans are recorded twice"
        _current = self
        if torch.cuda.is_available():
            # Kineto reports every start and stop on stderr, at a level above errors.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._guarded(self._profile.start)

    def stop(self, folder: Path) -> list[dict[str, Any]]:
        """Stop, and return the device's events in the format of Chrome traces.

        torch.profiler writes them to a temporary file in `folder`.
        """
        global _current
        _current = None
        events: list[dict[str, Any]] = []
        if self._profile is not None:
            self._guarded(self._profile.stop)
        if (profiler := self._profile) is not None:
            self._guarded(lambda: events.extend(events_of(profiler, folder)))
        self._profile = None
        return events

    def record_kernels(self, wanted: bool) -> None:
        if (profiler := self._profile) is not None:
            activities = [ProfilerActivity.CUDA]
            self._guarded(lambda: profiler.toggle_collection_dynamic(wanted, activities))

    def _guarded(self, action: Callable[[], object]) -> None:
        """Continue without kernels if torch.profiler fails: tracing must not stop training."""
        try:
            action()
        except Exception as error:
            self._profile = None
            logger.warning("the trace has no kernels: torch.profiler failed (%s)", error)


def events_of(profiler: profile, folder: Path) -> list[dict[str, Any]]:
    """Return a profiler's events, whose "ts" are microseconds since 1970."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        file = Path(scratch) / "events.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text(encoding="utf-8"))
    base = trace["baseTimeNanoseconds"] / 1e3
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "Trace"]
    return [{**event, "ts": base + event["ts"]} for event in events]


@contextlib.contextmanager
def span(name: str, kind: str = PART) -> Iterator[None]:
    """Record a `with` block or a decorated function, unless it raises."""
    if (recording := _current) is None:
        yield
        return
    is_engine = kind == STAGE and name in _ENGINE_STAGES
    start = _now(recording, kind)
    if is_engine:
        recording.record_kernels(False)
    yield
    if is_engine:
        recording.record_kernels(True)
    thread = threading.get_native_id()
    recording.spans.append(Span(name, kind, start, _now(recording, kind), thread))


def _now(recording: Recording, kind: str) -> int:
    # A graph capture forbids to wait.
    if kind in (STAGE, PASS) and torch.cuda.is_available():
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
    return recording.now()


class MegatronTimers:
    """Megatron's `config.timers`. It records the parts that Megatron times as spans: forward and
    backward passes, and communication between pipeline stages and of gradients."""

    def __init__(self) -> None:
        self._timers: dict[str, _Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        return self._timers.setdefault(name, _Timer(name))


class _Timer:
    def __init__(self, name: str) -> None:
        self._name, self._kind = _MEGATRON_PARTS.get(name, (name, COLLECTIVE))
        self._open = contextlib.ExitStack()

    def start(self, barrier: bool = False) -> None:
        self._open.enter_context(span(self._name, self._kind))

    def stop(self, barrier: bool = False) -> None:
        self._open.close()


# All other timers of Megatron's schedules time communication.
_MEGATRON_PARTS = {
    "forward-compute": ("forward", PASS),
    "backward-compute": ("backward", PASS),
    "forward-backward": ("forward and backward", PART),
}
