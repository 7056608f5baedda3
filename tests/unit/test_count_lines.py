"""Lines of code and of docs, as scripts/count_lines.py counts them."""

from __future__ import annotations

from pathlib import Path

from scripts.count_lines import counted, room_of

TEXT = '''"""A docstring
of two lines."""

import os  # a comment beside code


# A comment.
def f() -> str:
    """One line."""
    return """not a
docstring"""
'''


def test_lines_are_code_or_docs_or_blank() -> None:
    assert counted(TEXT) == (4, 4)
    assert counted("") == (0, 0)


def test_rooms_are_packages() -> None:
    assert room_of(Path("mcore_rl/data/prompts.py")) == "mcore_rl/data"
    assert room_of(Path("mcore_rl/cli.py")) == "mcore_rl/*.py"
    assert room_of(Path("patches/vllm/rank_map.py")) == "patches"
    assert room_of(Path("tests/unit/algorithms/test_kl.py")) == "tests/unit"
    assert room_of(Path("setup.py")) == "setup.py"
