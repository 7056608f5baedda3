"""Protection of processes that multiprocessing starts from running the main script again."""

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
    """Keep processes that are spawned inside this context from importing `__main__`.

    `multiprocessing` imports it in every spawned child: seconds and gigabytes of torch, Megatron
    and vLLM, and a second start of a script without `if __name__ == "__main__"`. It skips a main
    module whose spec has the name `__main__`, so the spec has that name inside the context.

    Objects sent to such a process must not be defined in the main script. Several threads may be
    inside at once.
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
    """Mark this process as part of a run, so that it cannot start a run from now on."""
    global _serves_a_run
    _serves_a_run = True


def refuse_run_in_run() -> None:
    """Raise UsageError in a process of a run that imports the run's own script."""
    # The attribute exists while a spawned process imports its parent's main script.
    if _serves_a_run or hasattr(multiprocessing.current_process(), "_inheriting"):
        raise UsageError(
            "a process that the run has started imports the script of the run, which would start "
            "it again",
            remedy='put what starts it below if __name__ == "__main__":',
        )
