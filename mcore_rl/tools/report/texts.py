"""Readable texts and numbers of a run. Sizes are decimal, as in run.log."""

from __future__ import annotations

import json
import math
from typing import Any

from mcore_rl.common.byte_sizes import shown_bytes

_MAX_CHARACTERS = 20_000
# Control characters would affect the page or vanish, so Unicode's pictures of them are shown.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


def clean(value: Any) -> str:
    """Convert any value to a text for UTF-8, with visible control characters, cut if very long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    left_out = len(text) - _MAX_CHARACTERS
    if left_out > 0:
        text = f"{text[:_MAX_CHARACTERS]}\n[{left_out:,} more characters in the file]"
    # Half of a pair of surrogates becomes U+FFFD.
    text = text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")
    return text.translate(_PICTURES)


def shown(metric: str, value: float) -> str:
    """Format a metric's value in the unit of its name; "–" for NaN and infinity."""
    if not math.isfinite(value):
        return "–"
    if "bytes" in metric:
        return shown_bytes(value)
    if metric.endswith("_seconds"):
        if value >= 100:
            return f"{value:,.0f} s"
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{1000 * value:.3g} ms"
    if metric.endswith(("accuracy", "_share")):
        return f"{100 * value:.1f} %"
    is_count = value == int(value) and abs(value) < 1e15
    return f"{value:,.0f}" if is_count or metric.endswith("_per_second") else f"{value:.4g}"
