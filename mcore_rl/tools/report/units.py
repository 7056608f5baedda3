"""Numbers as people read them. Sizes are decimal, as in run.log and in plans. Pure."""

from __future__ import annotations

import math

from mcore_rl.common.byte_sizes import shown_bytes

_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"))


def axis_unit(unit: str, largest: float) -> tuple[float, str]:
    """What to divide values by, and the name of what they then are, for an axis up to `largest`."""
    if unit == "bytes":
        return next(((size, name) for size, name in _BYTES if largest >= size), (1.0, "bytes"))
    if unit == "seconds":
        return next(((size, name) for size, name in _SECONDS if largest >= size), (1e-3, "ms"))
    return 1.0, ""


def shown(metric: str, value: float | None) -> str:
    """A metric's value, in the unit that its name tells; "–" for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if "bytes" in metric:
        return shown_bytes(value)
    if metric.endswith("_seconds"):
        return shown_seconds(value)
    if metric.endswith(("accuracy", "_share")):
        return f"{100 * value:.1f} %"
    if metric.endswith("_per_second"):
        return f"{value:,.0f}"
    return shown_number(value)


def shown_number(value: float) -> str:
    """Four digits that count; counts as they are."""
    if value == int(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def shown_seconds(value: float) -> str:
    """Three digits that count."""
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 1 or value == 0 else f"{1000 * value:.3g} ms"
