"""A file for --rl-import, used by soak.py: each rank records its heap after every step.

A line of `<MCORE_RL_SOAK_NOTES>.<rank>` is a JSON object: `step`, `heap_bytes` (allocated by malloc
and not freed), `python_blocks` (the same for Python's allocator) and `reference_seconds` (duration
of a fixed piece of work).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import torch

FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")


class _Mallinfo2(ctypes.Structure):
    """malloc.h"""

    _fields_ = [(name, ctypes.c_size_t) for name in (*FIELDS, "fordblks", "keepcost")]


def reference_seconds() -> float:
    """Time a fixed amount of work like that of a step: small tensors, driven by Python."""
    started = time.perf_counter()
    matrix = torch.full((64, 64), 1 / 64)
    for _ in range(5000):
        matrix = matrix @ matrix
    return time.perf_counter() - started


def note_after_every_step(path: str) -> None:
    from mcore_rl.train import Run

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    record = Run.record

    def record_and_note(self: Run, step: int, *args: Any) -> None:
        record(self, step, *args)
        info = libc.mallinfo2()
        line = {
            "step": step,
            "heap_bytes": info.uordblks + info.hblkhd,
            "python_blocks": sys.getallocatedblocks(),
            "reference_seconds": reference_seconds(),
        }
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    Run.record = record_and_note  # type: ignore[method-assign]


if "RANK" in os.environ:  # not in the workers of rewards, which import this as well
    note_after_every_step(f"{os.environ['MCORE_RL_SOAK_NOTES']}.{os.environ['RANK']}")
