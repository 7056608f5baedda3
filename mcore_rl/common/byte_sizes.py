"""Readable sizes: 12.3 MB, 4.56 GB. Units are decimal, as in every log line and plan."""

from __future__ import annotations

_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def shown_bytes(num_bytes: float) -> str:
    """Format a size with three significant digits, in the largest unit that does not exceed it."""
    for size, unit in _UNITS:
        if num_bytes >= size:
            number = num_bytes / size
            return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f} {unit}"
    return f"{num_bytes:.0f} bytes"
