"""Texts of a run as a page can show them. Pure."""

from __future__ import annotations

import json
from typing import Any

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
