"""What a process holds of each resource that a leak would exhaust."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.hybrid_engine.memory.usage import (
    device_bytes,
    give_back_cached,
    host_bytes,
    malloc_info,
)


@dataclass(frozen=True, slots=True)
class Footprint:
    """This process's use of each resource that a leak would exhaust."""

    resident_bytes: int  # without mapped files: code that is first used late is not a leak
    heap_bytes: int  # malloc's memory in use, without free blocks; glibc only, else 0
    device_bytes: int  # in use according to the driver, without what PyTorch keeps for later
    open_files: int
    threads: int
    shared_memory: int  # segments in /dev/shm that this process has mapped

    @classmethod
    def now(cls) -> Footprint:
        """Measure after freeing unreachable objects and free pages.

        Otherwise the resident set would include what the collector or malloc has yet to free.
        """
        gc.collect()
        give_back_cached()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)  # also where a run keeps the little that is free
        mapped = Path("/proc/self/maps").read_text()
        return cls(
            resident_bytes=host_bytes("RssAnon"),
            heap_bytes=_heap_bytes(),
            device_bytes=device_bytes(),
            open_files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            shared_memory=len(set(re.findall(r"/dev/shm/.*$", mapped, re.MULTILINE))),
        )


def _heap_bytes() -> int:
    info = malloc_info()
    return 0 if info is None else int(info.uordblks + info.hblkhd)  # heaps, and other mappings
