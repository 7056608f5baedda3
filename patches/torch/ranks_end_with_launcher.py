"""Ranks end with the process that has started them, even if that is killed.

Symptom: after SIGKILL of a launcher (a scheduler's last word, or the kernel's for want of memory)
its ranks run on, hold memory and devices, and write into the run directory of the run that replaces
them.
Cause: torchrun's agent starts ranks as ordinary children; who is killed ends none of them.
Why safe: a rank asks the kernel for SIGKILL at the end of its parent (PR_SET_PDEATHSIG) before its
program begins, and looks whether that came too late. The kernel goes by the thread that has started
it: torchrun's agent starts ranks in the main thread, which lives as long as its process. Only where
`apply` is called, which is `mcore_rl.launch`. What is in `before_a_rank` is called before each of
them starts, when torchrun's rendezvous is over.
Upstream: as described, as of torch 2.13.0, which leaves no other way to have something done in a
rank before its program.
Drop when: torchrun ties its ranks to itself, or takes a `preexec_fn`.
Versions: torch 2.13.0; 2.8 to 2.12, which is not tried, start ranks by the same name.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from packaging.specifiers import SpecifierSet

from mcore_rl.patches.registry import Patch, require

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
before_a_rank: list[Callable[[], None]] = []


def needed() -> bool:
    return True


def apply() -> None:
    """Have the ranks that this process starts tied to it."""
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
        for call in before_a_rank:
            call()
        # mypy knows no overload for any arguments.
        return subprocess.Popen(*args, preexec_fn=tie, **kwargs)  # type: ignore[call-overload]

    subprocess_handler.Popen = start  # type: ignore[assignment, misc]  # in the place of the class


PATCH = Patch(
    name="torch.ranks_end_with_launcher",
    package="torch",
    versions=SpecifierSet(">=2.8,<2.14"),
    reason="ranks end with a launcher that is killed",
    needed=needed,
    apply=apply,
)
