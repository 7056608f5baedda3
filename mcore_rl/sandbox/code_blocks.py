"""Blocks of Python in a Markdown text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PYTHON_TAG = re.compile(r"(?:i?python|py)[0-9.]*", re.IGNORECASE)
_MAX_FENCE_INDENT = 3  # of a closing fence beyond the opening fence, as in CommonMark


@dataclass(frozen=True, slots=True)
class _Fence:
    """The opening of a block of code in Markdown."""

    mark: str  # "```", or more of the same, or "~~~"
    indent: int
    is_python: bool  # by its tag, or because it has none


def code_in(text: str) -> str | None:
    """Return the last closed block of Python in a Markdown text; None without one.

    A block is fenced by three or more backticks, which may follow text on their line, or tildes,
    which may not. Its tag is `python`, `py`, `python3` or the like, in any case, or missing. Reads
    each line once, so the time is linear in the length of the text, whatever a policy writes.
    """
    code: str | None = None
    fence: _Fence | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        if fence is None:
            fence, lines = _opening(line), []
            continue
        rest = _after_closing(line, fence)
        if rest is None:
            blanks = len(line) - len(line.lstrip(" "))
            lines.append(line[min(blanks, fence.indent) :] + "\n")
            continue
        before = line[: line.find(fence.mark)]
        if fence.is_python:
            code = "".join(lines) + before.rstrip() if before.strip() else "".join(lines)
        # A tag after it begins the next block: the fence between the two is missing.
        fence, lines = (_opening(line), []) if rest.strip() else (None, [])
    return code


def _opening(line: str) -> _Fence | None:
    """Return the fence that a line ends in, with its tag; None for a line that opens no block."""
    start = line.lstrip(" \t")
    if start.startswith("~~~"):
        character, at = "~", len(line) - len(start)
    else:
        character, at = "`", line.find("```")
    if at < 0:
        return None
    tag = line[at:].lstrip(character)
    if character in tag:
        return None  # inline code
    words = tag.split(None, 1)
    return _Fence(
        mark=character * (len(line) - at - len(tag)),
        indent=0 if line[:at].strip() else at,
        is_python=not words or _PYTHON_TAG.fullmatch(words[0].strip("{.}")) is not None,
    )


def _after_closing(line: str, fence: _Fence) -> str | None:
    """Return the text after the closing fence on a line; None for a line that closes nothing.

    The fence begins its line, or ends a line of code.
    """
    start = line.lstrip(" ")
    if start.startswith(fence.mark) and len(line) - len(start) <= fence.indent + _MAX_FENCE_INDENT:
        return start.lstrip(fence.mark[0])
    end = line.rstrip()
    if end.endswith(fence.mark) and "`" in fence.mark and "`" not in end.rstrip("`"):
        return "" if end.strip("` ") else None
    return None
