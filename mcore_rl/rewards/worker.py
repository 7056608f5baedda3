"""What a worker process of a reward pool runs.

Workers import this module, `functions`, `algorithms.registry` and what the user's own
functions import, nothing else: it must stay free of torch, Megatron, vLLM and numpy, and so must
whatever it imports.
"""

from __future__ import annotations

import ctypes
import functools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import NamedTuple, SupportsFloat

from mcore_rl.algorithms.registry import import_user_file
from mcore_rl.errors import UsageError
from mcore_rl.rewards.functions import RewardFunction, resolve_reward, shortened

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Outcome(NamedTuple):
    """What became of one sample; `kind` groups the failures that are counted and logged once."""

    reward: float
    kind: str | None = None
    detail: str = ""

    @property
    def failure(self) -> str | None:
        """What went wrong, for people to read; None if nothing did."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class WorkerProcess(SpawnProcess):
    """A spawned process that does not run the parent's main script again.

    `multiprocessing` imports the parent's `__main__` in every spawned child, here a trainer with
    torch, Megatron and vLLM: seconds and gigabytes for a function that compares two strings. It
    leaves out a main module whose spec says that it is called `__main__`, as that of a package's
    `__main__.py` may be, so this process is started while the spec says so.
    """

    def start(self) -> None:
        """Start the process, as a child to which the main script is unknown."""
        with _nameless_main():
            super().start()


class WorkerContext(SpawnContext):
    """Fork is not an option: the trainer has threads (gloo, vLLM, pebble) and maybe CUDA."""

    Process = WorkerProcess


_main_spec_lock = threading.Lock()


@contextmanager
def _nameless_main() -> Iterator[None]:
    main_module = sys.modules["__main__"]
    with _main_spec_lock:
        main_spec = main_module.__spec__
        main_module.__spec__ = ModuleSpec("__main__", loader=None)
        try:
            yield
        finally:
            main_module.__spec__ = main_spec


def start_worker(specs: Sequence[str], imports: Sequence[str]) -> None:
    """First thing that runs in a worker; limits and the cleaning of its environment belong here.

    Imports the user's files and modules now, so that this does not count against the first sample.
    """
    # A worker that the pool stops must go at once: pebble holds the lock of all workers meanwhile,
    # and a handler in Python would wait for the C code that the reward may be hanging in.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent()
    try:
        for spec in specs:
            _resolve_once(spec, tuple(imports))
    except UsageError:
        return  # raised again by the first sample, which can carry it to the trainer


def score_sample(
    spec: str,
    prompt: str,
    response: str,
    answer: str,
    *,
    timeout_seconds: float,
    imports: tuple[str, ...] = (),
) -> Outcome:
    """Scores one sample by one function. The process ends by SIGALRM when the time is over.

    The kernel's timer starts with the sample, ends Python and C code alike, and can only hit the
    sample that is running. Raises UsageError if a file of `imports` cannot be run or `spec` not be
    resolved; whatever the reward function itself does wrong is part of the outcome.
    """
    function = _resolve_once(spec, imports)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the last sample may have left a handler
    signal.setitimer(signal.ITIMER_REAL, timeout_seconds)
    try:
        return _checked(function(prompt=prompt, response=response, answer=answer))
    except BaseException as error:  # SystemExit too costs only this sample
        return Outcome(0.0, f"raised {type(error).__name__}", _text_of(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def score_samples(
    samples: Sequence[tuple[str, str, str]],
    spec: str,
    *,
    timeout_seconds: float,
    imports: tuple[str, ...] = (),
) -> tuple[list[Outcome], float]:
    """`score_sample` of (prompt, response, answer) after each other, and the seconds of all.

    A sample that takes too long takes those with it that were scored before.
    """
    started = time.perf_counter()
    outcomes = [
        score_sample(spec, *sample, timeout_seconds=timeout_seconds, imports=imports)
        for sample in samples
    ]
    return outcomes, time.perf_counter() - started


def _checked(value: object) -> Outcome:
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        return Outcome(0.0, f"returned {type(value).__name__}", "a reward is a finite number")
    number = float(value)
    if not math.isfinite(number):
        return Outcome(0.0, f"returned {number}", "a reward is a finite number")
    return Outcome(number)


def _text_of(error: BaseException) -> str:
    try:
        return shortened(str(error))
    except Exception:  # an exception of the user's whose __str__ raises
        return "(its text cannot be shown)"


@functools.cache
def _resolve_once(spec: str, imports: tuple[str, ...]) -> RewardFunction:
    for path in imports:
        import_user_file(path)
    return resolve_reward(spec)


def _die_with_parent() -> None:
    """A trainer that is killed closes nothing, and a worker that hangs would never notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it died before the call above
        os._exit(1)
