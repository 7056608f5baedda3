"""The Python versions that setup.py accepts."""

from __future__ import annotations

import re

from tests.rank_pool import ROOT


def supported_pythons() -> list[str]:
    """By minor version, the oldest first: "3.11"."""
    pattern = r'python_requires=">=3\.(\d+),<3\.(\d+)"'
    ((oldest, end),) = re.findall(pattern, (ROOT / "setup.py").read_text())
    return [f"3.{minor}" for minor in range(int(oldest), int(end))]
