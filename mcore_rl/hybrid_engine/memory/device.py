"""Measured memory of this process: what it peaks at, and what it holds, on the host and the device.

"The device" is this process's CUDA device, 0 bytes without one. What is in use there is asked of
the driver: PyTorch's allocator counts the memory of a sleeping engine, which is not there, and does
not know that of communicators, graphs and libraries, which is.
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


def device_bytes() -> int:
    """What the driver has given out of this process's device, to whomever; noted for the peak."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    _note(0, total - free)
    return total - free


def give_back_cached() -> None:
    """Return freed memory that allocators keep for later: PyTorch's to the driver, C's to Linux.

    vLLM takes the memory of its weights and its KV cache from the driver, at its start and whenever
    it wakes: before each of these this is called. glibc's heap keeps freed tensors of up to 32 MiB,
    over a gigabyte of a model of 0.6 billion parameters.
    """
    device_bytes()  # at its highest just before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # other C libraries return pages by themselves
        libc.malloc_trim(0)


_highest = [0, 0]  # of the host and of the device, as far as it was noted


def _note(host: int, device: int) -> None:
    _highest[:] = max(_highest[0], host), max(_highest[1], device)


def highest_bytes() -> tuple[int, int]:
    """(host, device) at their highest since the process began, in spite of any `PeakMemory`.

    On the host the resident set, on the device what the driver had given out, which it keeps no
    record of: PyTorch's allocator keeps what it has until `give_back_cached`, and a stage's peak is
    there until then, so that it is seen before each of these, and here.
    """
    _note(host_bytes("VmHWM"), device_bytes())
    return _highest[0], _highest[1]


class PeakMemory:
    """Measures the peak within a `with` block, above where the process stood at its start.

    On CUDA the peak of what PyTorch's allocator has given out, which an engine that wakes up does
    not change; without it the resident set's, whose high-water mark Linux resets on request. Nested
    use would reset the outer one's mark.
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

    resident_bytes: int  # without mapped files: code that is touched late is not a leak
    heap_bytes: int  # malloc's, in use: the resident set without its free pieces; glibc only
    device_bytes: int  # given out by the driver, without what PyTorch keeps for later
    open_files: int
    threads: int
    shared_memory: int  # segments in /dev/shm that this process has mapped

    @classmethod
    def now(cls) -> Footprint:
        """Measured after unreachable objects and free pages were given back, and no earlier.

        Otherwise the resident set would count what the collector or malloc have not got round to.
        """
        gc.collect()
        give_back_cached()
        mapped = Path("/proc/self/maps").read_text()
        return cls(
            resident_bytes=host_bytes("RssAnon"),
            heap_bytes=_heap_bytes(),
            device_bytes=device_bytes(),
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


def _heap_bytes() -> int:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)  # from the heaps, and mapped one by one
