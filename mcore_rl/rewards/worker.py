"""What a worker process of a reward pool runs.

Workers import this module, `functions`, `process`, `algorithms.registry` and what the user's own
functions import, nothing else: it must stay free of torch, Megatron, vLLM and numpy, and so must
whatever it imports. What a worker takes from itself before it runs a user's code is Linux's doing;
elsewhere the parts that the system lacks are left out.
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
import resource
import signal
import struct
import sys
import time
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat

from mcore_rl.algorithms.registry import import_user_file
from mcore_rl.common.errors import UsageError
from mcore_rl.common.spawning import forbid_runs
from mcore_rl.rewards.functions import (
    PYTHON_SANDBOX,
    RewardFunction,
    resolve_reward,
    shortened,
    takes_row,
)

# What libraries map beyond what they use: code, and what allocators and thread pools reserve.
_ADDRESS_SPACE_MARGIN_BYTES = 16 << 30

# To look into any process, and to raise one's own limits; only root has them.
_CAPABILITIES = {
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_PERFMON": 38,
}
_CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h

_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
_LANDLOCK_CREATE_RULESET = 444  # these two are the same on all architectures
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_ACCESS_FS_MAKE_BLOCK = 1 << 11
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_SCOPE_SIGNAL = 1 << 1
_LANDLOCK_ABI_WITH_SCOPES = 6  # Linux 6.12


def limit_memory(limit_bytes: int) -> None:
    """From here on memory beyond `limit_bytes` is refused, for good; 0 sets no limit.

    RLIMIT_DATA is what counts: private memory that can be written, which is what a function fills.
    RLIMIT_AS alone would also count what numpy or torch map and never touch, so that a limit that
    they start under would be none. It is set to more, for shared memory, which the other leaves
    out. Both are those of one process: what a reward starts itself has the same limits anew.
    """
    if limit_bytes == 0:
        return
    _lower(resource.RLIMIT_DATA, limit_bytes)
    _lower(resource.RLIMIT_AS, limit_bytes + _ADDRESS_SPACE_MARGIN_BYTES)


def write_no_core() -> None:
    """A reward that crashes leaves no file of its memory, which holds prompts and answers."""
    _lower(resource.RLIMIT_CORE, 0)


def drop_privileges() -> None:
    """Give up what root could take the other limits back by, also in programs started from here."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable: their low words, then their high ones.
    sets = ctypes.create_string_buffer(24)
    if libc.capget(ctypes.c_char_p(header), sets) != 0:
        return
    words = list(struct.unpack("=6I", sets.raw))
    for number in _CAPABILITIES.values():
        high, bit = divmod(number, 32)
        for index in range(3):
            words[3 * high + index] &= ~(1 << bit)
    libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(struct.pack("=6I", *words)))


def see_no_other_process(*, send_no_signals: bool = False) -> None:
    """Take from this process the sight of others' memory and environment under /proc.

    Call `drop_privileges` first. With `send_no_signals` it can also signal none but those that it
    starts itself from here on, where the kernel is 6.12 or later.

    The trainer has the same user, whose secrets would otherwise stand in /proc/PID/environ. A
    process under Landlock may look only into processes under the same rules; these here forbid
    nothing but to make block devices, as there is no empty set. A kernel before 5.13, or one that
    was started without Landlock, leaves all as it is.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    rules = struct.pack("=Q", _LANDLOCK_ACCESS_FS_MAKE_BLOCK)
    version = libc.syscall(
        _LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_CREATE_RULESET_VERSION
    )
    if send_no_signals and version >= _LANDLOCK_ABI_WITH_SCOPES:
        rules += struct.pack("=QQ", 0, _LANDLOCK_SCOPE_SIGNAL)
    ruleset = libc.syscall(
        _LANDLOCK_CREATE_RULESET, ctypes.c_char_p(rules), ctypes.c_size_t(len(rules)), 0
    )
    if ruleset < 0:
        return
    libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    libc.close(ruleset)


def _lower(kind: int, value: int) -> None:
    """Both limits, so that it cannot be taken back; a lower one that is there already stays."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


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


def start_worker(
    specs: Sequence[str],
    imports: Sequence[str],
    memory_bytes: int = 0,
    sandbox_accept: Sequence[str] = (),
) -> None:
    """First thing that runs in a worker: gives up what it must not have, before the user's code.

    `memory_bytes` is the limit of its memory, 0 for none. What `process` has not given it needs no
    taking away. Imports the user's files and modules now, so that this does not count against the
    first sample.
    """
    forbid_runs()  # whatever script the user's modules are
    # A worker that the pool stops must go at once: pebble holds the lock of all workers meanwhile,
    # and a handler in Python would wait for the C code that the reward may be hanging in.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    if PYTHON_SANDBOX in specs:
        from mcore_rl.isolation.client import start_supervisor  # processes, which most do without

        start_supervisor(sandbox_accept)  # what starts from here on can make no namespaces
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
        return Outcome(0.0, f"raised {type(error).__name__}", text_of(error))
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


def text_of(error: BaseException) -> str:
    """What an exception of the user's says, as far as there is room."""
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


def die_with_parent(by: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """A trainer that is killed closes nothing, and a worker that hangs would never notice.

    `parent` is the process's number where `multiprocessing` did not start this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if parent is None and (known := multiprocessing.parent_process()) is not None:
        parent = known.pid
    if parent is not None and os.getppid() != parent:  # it died before the call above
        os._exit(1)
