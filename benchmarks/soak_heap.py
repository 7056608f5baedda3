"""Given to --rl-import by soak.py: after every step each rank notes what it holds of the heap.

A line of `<MCORE_RL_SOAK_HEAP>.<rank>` is a JSON object: `step`, `heap_bytes` (what malloc has
given out and not got back) and `python_blocks` (the same of Python's own allocator).
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import sys
from typing import Any

FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")


class _Mallinfo2(ctypes.Structure):
    """malloc.h"""

    _fields_ = [(name, ctypes.c_size_t) for name in (*FIELDS, "fordblks", "keepcost")]


def note_after_every_step(path: str) -> None:
    from mcore_rl.run_parts.parts import Parts

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    record = Parts.record

    def record_and_note(self: Parts, step: int, *args: Any) -> None:
        record(self, step, *args)
        info = libc.mallinfo2()
        line = {
            "step": step,
            "heap_bytes": info.uordblks + info.hblkhd,
            "python_blocks": sys.getallocatedblocks(),
        }
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    Parts.record = record_and_note  # type: ignore[method-assign]


if multiprocessing.parent_process() is None:  # the workers of rewards import this as well
    note_after_every_step(f"{os.environ['MCORE_RL_SOAK_HEAP']}.{os.environ['RANK']}")
