"""Texts and numbers of a run as people read them. Sizes are decimal, as in run.log. Pure."""

from __future__ import annotations

import json
import math
from typing import Any

from mcore_rl.common.byte_sizes import shown_bytes

# Characters of a text beyond which a page is no place for it.
_MAX_CHARACTERS = 20_000
# Controls would act on the page or vanish from it: shown as the pictures Unicode has for them.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


def clean(value: Any) -> str:
    """Any value as a text: controls become visible, half a pair of surrogates the sign for what
    cannot be read, and what is very long is cut and says so."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    left_out = len(text) - _MAX_CHARACTERS
    if left_out > 0:
        text = f"{text[:_MAX_CHARACTERS]}\n[{left_out:,} more characters in the file]"
    text = text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")
    return text.translate(_PICTURES)


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
