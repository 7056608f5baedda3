"""The code that a reward pool's worker processes run.

Workers import only this module, `process`, their imports and what the user's functions import: all
of these must stay free of torch, Megatron, vLLM and numpy, except the user's own. Dropping rights
before user code runs depends on Linux; on other systems, missing parts are skipped.
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

from mcore_rl.common.errors import UsageError
from mcore_rl.common.spawning import forbid_runs
from mcore_rl.common.user_files import import_user_file
from mcore_rl.rewards.functions import (
    PYTHON_SANDBOX,
    RewardFunction,
    resolve_reward,
    shortened,
    takes_row,
)

# Memory that libraries map but do not use: code, and reserves of allocators and thread pools.
_ADDRESS_SPACE_MARGIN_BYTES = 16 << 30

# Capabilities to inspect any process and to raise one's own limits; only root has them.
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
    """Refuse memory beyond `limit_bytes` from here on, permanently; 0 sets no limit.

    RLIMIT_DATA is the effective limit: it counts private writable memory, which a function fills.
    RLIMIT_AS also counts what numpy or torch map and never touch, so a limit that they start under
    would be ineffective. It is set higher, for shared memory, which RLIMIT_DATA omits. Both apply
    to one process: processes that a reward starts have the same limits anew.
    """
    if limit_bytes == 0:
        return
    _lower(resource.RLIMIT_DATA, limit_bytes)
    _lower(resource.RLIMIT_AS, limit_bytes + _ADDRESS_SPACE_MARGIN_BYTES)


def write_no_core() -> None:
    """Disable core files: the memory of a crashed reward holds prompts and answers."""
    _lower(resource.RLIMIT_CORE, 0)


def drop_privileges() -> None:
    """Drop root's capabilities to undo the other limits, also for programs started from here."""
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
    """Remove this process's access to other processes' memory and environment under /proc.

    Call `drop_privileges` first. With `send_no_signals`, and Linux 6.12 or later, it can also
    signal only the processes that it starts from here on.

    The trainer runs as the same user, and /proc/PID/environ would reveal its secrets. A process
    under Landlock may inspect only processes under the same rules. These rules forbid only the
    creation of block devices, as an empty set is not allowed. Kernels before 5.13, or started
    without Landlock, restrict nothing.
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
    """Lower both limits, so that it cannot be undone; a limit that is already lower stays."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


if TYPE_CHECKING:
    import asyncio

EXIT_OUT_OF_MEMORY = 112  # of a process that completed no sample
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Outcome(NamedTuple):
    """The outcome of one sample; `kind` groups failures for counting and logging."""

    reward: float
    kind: str | None = None
    detail: str = ""

    @property
    def failure(self) -> str | None:
        """The reason of the failure, in words; None without one."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def start_worker(
    specs: Sequence[str],
    imports: Sequence[str],
    memory_bytes: int = 0,
    sandbox_accept: Sequence[str] = (),
) -> None:
    """Prepare a worker: drop its rights, then import the user's files and modules.

    Runs first in a worker. `memory_bytes` limits its memory; 0 sets no limit. What `process` did
    not pass on need not be dropped. Importing now does not count against the first sample.
    """
    forbid_runs()  # whatever script the user's modules are
    # A worker that the pool stops must end at once: pebble holds the lock of all workers meanwhile,
    # and a Python handler would wait for the C code in which the reward may hang.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    if PYTHON_SANDBOX in specs:
        from mcore_rl.isolation.client import start_supervisor  # starts processes; few rewards do

        start_supervisor(sandbox_accept)  # processes started later cannot create namespaces
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
    """Score one sample by one function. SIGALRM ends the process when the time is over.

    `row` is the JSON of all columns, passed only to a function that takes it. Async results are
    awaited. The kernel's timer starts with the sample, ends Python and C code alike, and only
    affects the running sample. Raises UsageError if a file of `imports` fails or `spec` cannot be
    resolved. Any other fault of the reward function is part of the outcome, with one exception:
    without memory the process ends with EXIT_OUT_OF_MEMORY, because the memory's owner may outlive
    the sample.
    """
    function, takes_columns = _resolve_once(spec, imports)
    given = {"row": json.loads(row)} if takes_columns else {}
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the last sample may have left a handler
    signal.setitimer(signal.ITIMER_REAL, timeout_seconds)
    try:
        # A copy: samples of a prompt that are sent together share the answer.
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
    """Apply `score_sample` to each (prompt, response, answer, row); also return the total seconds.

    A sample that takes too long also loses the outcomes of the samples before it.
    """
    started = time.perf_counter()
    outcomes = [
        score_sample(spec, *sample, timeout_seconds=timeout_seconds, imports=imports)
        for sample in samples
    ]
    return outcomes, time.perf_counter() - started


def resolve_rewards(specs: Sequence[str], imports: tuple[str, ...] = ()) -> None:
    """Raise UsageError for a function that cannot be found or called."""
    for spec in specs:
        _resolve_once(spec, imports)


async def _awaited(value: Awaitable[object]) -> object:
    return await value


@functools.cache
def _runner() -> asyncio.Runner:
    """Return the process's only event loop: objects that a reward keeps, such as an HTTP session,
    belong to the loop that created them."""
    import asyncio  # most rewards do not need it

    return asyncio.Runner()


def _checked(value: object) -> Outcome:
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        return Outcome(0.0, f"returned {type(value).__name__}", "a reward is a finite number")
    number = float(value)
    if not math.isfinite(number):
        return Outcome(0.0, f"returned {number}", "a reward is a finite number")
    return Outcome(number)


def text_of(error: BaseException) -> str:
    """Return the text of a user's exception, shortened."""
    try:
        return shortened(str(error))
    except Exception:  # a user's exception whose __str__ raises
        return "(its text cannot be shown)"


@functools.cache
def _resolve_once(spec: str, imports: tuple[str, ...]) -> tuple[RewardFunction, bool]:
    """Return the function, and whether it takes the row."""
    for path in imports:
        import_user_file(path)
    function = resolve_reward(spec)
    return function, takes_row(function)


def die_with_parent(by: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """End this process with its parent: a hanging worker would not notice that its trainer is gone.

    `parent` is its process id if `multiprocessing` did not start this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if parent is None and (known := multiprocessing.parent_process()) is not None:
        parent = known.pid
    if parent is not None and os.getppid() != parent:  # it ended before the call above
        os._exit(1)
