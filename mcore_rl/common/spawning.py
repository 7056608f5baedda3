"""Processes that multiprocessing starts, and the main script that they would run again."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec

from mcore_rl.common.errors import UsageError

_lock = threading.Lock()
_num_inside = 0
_hidden_spec: ModuleSpec | None = None
_serves_a_run = False


@contextmanager
def main_script_left_out() -> Iterator[None]:
    """While inside, processes that are spawned do not import this one's `__main__`.

    `multiprocessing` does so in every spawned child. Here that is a trainer with torch, Megatron
    and vLLM: seconds and gigabytes for a process that hands on a queue; and a script without an `if
    __name__ == "__main__"` would start the whole run there once more, while the ranks wait for an
    answer. It leaves out a main module whose spec says that it is called `__main__`, as that of a
    package's `__main__.py` may be, so that is what the spec says meanwhile.

    What is sent to such a process must not be defined in the main script. Threads may be inside
    together.
    """
    global _num_inside, _hidden_spec
    main_module = sys.modules["__main__"]
    with _lock:
        if _num_inside == 0:
            _hidden_spec = main_module.__spec__
            main_module.__spec__ = ModuleSpec("__main__", loader=None)
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                main_module.__spec__ = _hidden_spec


def forbid_runs() -> None:
    """From now on this process starts no run: it belongs to one."""
    global _serves_a_run
    _serves_a_run = True


def refuse_run_in_run() -> None:
    """UsageError in a process of a run that imports the run's own script."""
    # The attribute is there while a spawned process imports its parent's main script.
    if _serves_a_run or hasattr(multiprocessing.current_process(), "_inheriting"):
        raise UsageError(
            "a process that the run has started imports the script of the run, which would start "
            "it again",
            remedy='put what starts it below if __name__ == "__main__":',
        )
