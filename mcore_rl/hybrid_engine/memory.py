"""Measured memory of this process: what it peaks at, on the host or on the device."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def host_bytes(field: str = "VmRSS") -> int:
    """Resident bytes of this process now (`VmRSS`) or at their highest (`VmHWM`)."""
    match = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert match is not None, f"{_STATUS} has no {field}"
    return int(match[1]) << 10


class PeakMemory:
    """Measures the peak within a `with` block, above where the process stood at its start.

    On CUDA the allocator's peak, without it the resident set's, whose high-water mark Linux resets
    on request. Nested use would reset the outer one's mark.
    """

    extra_bytes = 0

    def __enter__(self) -> PeakMemory:
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
