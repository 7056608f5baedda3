"""Ranks end with the process that started them, even if it is killed.

Symptom: after SIGKILL of a launcher (from a scheduler, or from the kernel when memory runs out) its
ranks continue, hold memory and devices, and write into the directory of the run that replaces them.
Cause: torchrun's agent starts ranks as ordinary children, which survive if it is killed.
Why safe: before its program begins, a rank requests SIGKILL at the end of its parent
(PR_SET_PDEATHSIG), and checks whether the request came too late. The kernel watches the thread that
started the rank: torchrun's agent uses the main thread, which lives as long as its process. Only
`mcore_rl.launch` calls `apply`. Functions in `before_ranks` are called once, after torchrun's
rendezvous and before the first rank starts.
Upstream: as described, as of torch 2.13.0, which offers no other way to run code in a rank before
its program.
Drop when: torchrun ties its ranks to itself, or takes a `preexec_fn`.
Versions: torch 2.13.0; 2.8 to 2.12 are not tried, but start ranks by the same name.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from mcore_rl.patches.registry import Patch, require

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
before_ranks: list[Callable[[], None]] = []


def apply() -> None:
    """Tie the ranks that this process starts to its life."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    require(
        getattr(subprocess_handler, "Popen", None) is subprocess.Popen,
        subprocess_handler.__name__,
        "starts no rank by subprocess.Popen",
    )
    libc, launcher = ctypes.CDLL(None), os.getpid()

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it ended before the call above
            os._exit(1)

    def start(*args: Any, **kwargs: Any) -> Any:
        while before_ranks:
            before_ranks.pop()()
        # mypy finds no overload that takes any arguments.
        return subprocess.Popen(*args, preexec_fn=tie, **kwargs)  # type: ignore[call-overload]

    subprocess_handler.Popen = start  # type: ignore[assignment, misc]  # in the place of the class


PATCH = Patch(
    "torch.ranks_end_with_launcher",
    "ranks end with a launcher that is killed",
    apply,
    packages=("torch",),
    versions=">=2.8,<2.14",
)
