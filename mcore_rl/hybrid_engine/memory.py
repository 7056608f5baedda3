"""Measured memory of this process: what it peaks at, and what it holds, on the host and the device.

"The device" is this process's CUDA device as PyTorch's allocator sees it, 0 bytes without one.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def host_bytes(field: str = "VmRSS") -> int:
    """Resident bytes: now (`VmRSS`), now without files (`RssAnon`), or at the highest (`VmHWM`)."""
    match = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert match is not None, f"{_STATUS} has no {field}"
    return int(match[1]) << 10


_highest_before_reset = [0, 0]  # of the host and of the device


def highest_bytes() -> tuple[int, int]:
    """(host, device) at their highest since the process began, in spite of any `PeakMemory`.

    On the host the resident set, on the device what its allocator has given out.
    """
    on_device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    for which, now in enumerate((host_bytes("VmHWM"), on_device)):
        _highest_before_reset[which] = max(_highest_before_reset[which], now)
    host, device = _highest_before_reset
    return host, device


class PeakMemory:
    """Measures the peak within a `with` block, above where the process stood at its start.

    On CUDA the allocator's peak, without it the resident set's, whose high-water mark Linux resets
    on request. Nested use would reset the outer one's mark.
    """

    extra_bytes = 0

    def __enter__(self) -> PeakMemory:
        highest_bytes()  # remembered, for the mark is lost now
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self._before = host_bytes()
        return self

    def __exit__(self, *exc: object) -> None:
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = host_bytes("VmHWM")
        self.extra_bytes = max(0, peak - self._before)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process holds of everything that a leak would eat up."""

    resident_bytes: int  # without mapped files: code that is touched late is no leak
    heap_bytes: int  # malloc's, in use: the resident set without its free pieces; glibc only
    device_bytes: int  # allocated, not what the allocator caches
    open_files: int
    threads: int
    shared_memory: int  # segments in /dev/shm that this process has mapped

    @classmethod
    def now(cls) -> Footprint:
        """Measured after unreachable objects and free pages were given back, and no earlier.

        Otherwise the resident set would count what the collector or malloc have not got round to.
        """
        gc.collect()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc's; other libraries give pages back by themselves
            libc.malloc_trim(0)
        mapped = Path("/proc/self/maps").read_text()
        return cls(
            resident_bytes=host_bytes("RssAnon"),
            heap_bytes=_heap_bytes(libc),
            device_bytes=torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
            open_files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            shared_memory=len(set(re.findall(r"/dev/shm/.*$", mapped, re.MULTILINE))),
        )


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2` (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        ).split()
    ]


def _heap_bytes(libc: ctypes.CDLL) -> int:
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd  # from the heaps, and mapped one by one
