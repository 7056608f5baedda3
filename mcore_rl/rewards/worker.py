"""What a worker process of a reward pool runs.

Workers import this module, `functions`, `limits`, `process`, `algorithms.registry` and what the
user's own functions import, nothing else: it must stay free of torch, Megatron, vLLM and numpy, and
so must whatever it imports.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import functools
import inspect
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat

from mcore_rl.algorithms.registry import import_user_file
from mcore_rl.common.errors import UsageError
from mcore_rl.common.spawning import forbid_runs
from mcore_rl.rewards.functions import RewardFunction, resolve_reward, shortened, takes_row
from mcore_rl.rewards.limits import (
    drop_privileges,
    limit_memory,
    see_no_other_process,
    write_no_core,
)

if TYPE_CHECKING:
    import asyncio

EXIT_OUT_OF_MEMORY = 112  # of a process that has scored no sample to its end
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


def start_worker(specs: Sequence[str], imports: Sequence[str], memory_bytes: int = 0) -> None:
    """First thing that runs in a worker: gives up what it must not have, before the user's code.

    `memory_bytes` is the limit of its memory, 0 for none. What `process` has not given it needs no
    taking away. Imports the user's files and modules now, so that this does not count against the
    first sample.
    """
    forbid_runs()  # whatever script the user's modules are
    # A worker that the pool stops must go at once: pebble holds the lock of all workers meanwhile,
    # and a handler in Python would wait for the C code that the reward may be hanging in.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent()
    limit_memory(memory_bytes)
    write_no_core()
    drop_privileges()
    see_no_other_process()
    try:
        for spec in specs:
            _resolve_once(spec, tuple(imports))
    except UsageError:
        return  # raised again by the first sample, which can carry it to the trainer


def score_sample(
    spec: str,
    prompt: str,
    response: str,
    answer: Any,
    row: str = "{}",
    *,
    timeout_seconds: float,
    imports: tuple[str, ...] = (),
) -> Outcome:
    """Scores one sample by one function. The process ends by SIGALRM when the time is over.

    `row` is the JSON of all columns, which only a function that takes it gets. What an async
    function returns is awaited. The kernel's timer starts with the sample, ends Python and C code
    alike, and can only hit the sample that is running. Raises UsageError if a file of `imports`
    cannot be run or `spec` not be resolved; whatever the reward function itself does wrong is part
    of the outcome, but for one thing: where there is no more memory the process ends, with
    EXIT_OUT_OF_MEMORY, as what holds it may outlive the sample.
    """
    function, takes_columns = _resolve_once(spec, imports)
    given = {"row": json.loads(row)} if takes_columns else {}
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the last sample may have left a handler
    signal.setitimer(signal.ITIMER_REAL, timeout_seconds)
    try:
        # Of its own: samples of a prompt that come together share it.
        answer = copy.deepcopy(answer)
        value: object = function(prompt=prompt, response=response, answer=answer, **given)
        if inspect.isawaitable(value):
            value = _runner().run(_awaited(value))
        return _checked(value)
    except MemoryError:
        os._exit(EXIT_OUT_OF_MEMORY)
    except BaseException as error:  # SystemExit too costs only this sample
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            os._exit(EXIT_OUT_OF_MEMORY)
        return Outcome(0.0, f"raised {type(error).__name__}", _text_of(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def score_samples(
    samples: Sequence[tuple[str, str, Any, str]],
    spec: str,
    *,
    timeout_seconds: float,
    imports: tuple[str, ...] = (),
) -> tuple[list[Outcome], float]:
    """`score_sample` of (prompt, response, answer, row) after each other, and the seconds of all.

    A sample that takes too long takes those with it that were scored before.
    """
    started = time.perf_counter()
    outcomes = [
        score_sample(spec, *sample, timeout_seconds=timeout_seconds, imports=imports)
        for sample in samples
    ]
    return outcomes, time.perf_counter() - started


def resolve_rewards(specs: Sequence[str], imports: tuple[str, ...] = ()) -> None:
    """Raises UsageError for a function that cannot be found or called."""
    for spec in specs:
        _resolve_once(spec, imports)


async def _awaited(value: Awaitable[object]) -> object:
    return await value


@functools.cache
def _runner() -> asyncio.Runner:
    """One for all samples of this process: what a reward keeps from one to the next, as a session
    of HTTP, belongs to the loop that it was made in."""
    import asyncio  # which most rewards do without

    return asyncio.Runner()


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
def _resolve_once(spec: str, imports: tuple[str, ...]) -> tuple[RewardFunction, bool]:
    """The function, and whether it takes the row."""
    for path in imports:
        import_user_file(path)
    function = resolve_reward(spec)
    return function, takes_row(function)


def _die_with_parent() -> None:
    """A trainer that is killed closes nothing, and a worker that hangs would never notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it died before the call above
        os._exit(1)
