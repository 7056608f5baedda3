"""Measured memory of this process, current and peak, on the host and the device.

"The device" is this process's CUDA device; without one, its memory is 0 bytes. The driver reports
what is in use there: PyTorch's allocator counts a sleeping engine's memory, which has been freed,
and does not know the memory of communicators, graphs and libraries.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_MIN_TRIM_BYTES = 256 << 20


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2` (malloc.h). `fordblks` are the bytes of free chunks."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        ).split()
    ]


def malloc_info() -> MallocInfo | None:
    """Return the state of glibc's heaps; None before glibc 2.33 and with another C library."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = MallocInfo
    info: MallocInfo = libc.mallinfo2()
    return info


def host_bytes(field: str = "VmRSS") -> int:
    """Return resident bytes: current (`VmRSS`), without files (`RssAnon`), or peak (`VmHWM`)."""
    match = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert match is not None, f"{_STATUS} has no {field}"
    return int(match[1]) << 10


def device_bytes() -> int:
    """Return the bytes in use on this process's device, by any process; updates the peak."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    _note(0, total - free)
    return total - free


def give_back_cached() -> None:
    """Return freed memory that allocators keep for later: PyTorch's to the driver, C's to Linux.

    Call it before vLLM starts or wakes, when it takes the memory of its weights and KV cache from
    the driver. glibc's heap keeps freed tensors of up to 32 MiB: over 1 GB for a model of 0.6
    billion parameters. Less than `_MIN_TRIM_BYTES` stay, since returned pages are zeroed again at
    the next use: for small models that took a tenth of a step.
    """
    device_bytes()  # records the peak
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    info, libc = malloc_info(), ctypes.CDLL(None)
    keeps_much = info is None or info.fordblks >= _MIN_TRIM_BYTES  # unknown before glibc 2.33
    if keeps_much and hasattr(libc, "malloc_trim"):  # other C libraries return pages by themselves
        libc.malloc_trim(0)


_highest = [0, 0]  # peak bytes of the host and of the device, as far as recorded


def _note(host: int, device: int) -> None:
    _highest[:] = max(_highest[0], host), max(_highest[1], device)


def highest_bytes() -> tuple[int, int]:
    """Return the (host, device) peaks since the process began; `PeakMemory` does not reset them.

    The host's peak is the resident set's. The driver keeps no record of the device's, so it is
    sampled here and before each `give_back_cached`: until then PyTorch's allocator keeps what it
    has allocated, and a stage's peak can still be measured.
    """
    _note(host_bytes("VmHWM"), device_bytes())
    return _highest[0], _highest[1]


class PeakMemory:
    """The peak memory of a `with` block, above the process's memory at its start.

    With CUDA it is the peak of PyTorch's allocations, which a waking engine does not change.
    Without CUDA it is the resident set's, whose high-water mark Linux resets on request. Do not
    nest: an inner block resets the outer one's mark.
    """

    extra_bytes = 0

    def __enter__(self) -> PeakMemory:
        highest_bytes()  # records the peak before the mark is reset
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
