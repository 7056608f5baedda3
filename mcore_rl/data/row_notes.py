"""What the log and the doctor say of a file's rows: those left out, and one as it is learned."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

_VARIES = re.compile(r"\([^()]*\)|'[^']*'|\d+")  # what differs between rows of one reason
_MOST_REASONS = 10
_MOST_CHARACTERS = 400  # of a part that is shown


class BadRows(NamedTuple):
    """Rows that are skipped for one reason; `first` is a row from 0, with its `problem`."""

    num_rows: int
    first: int
    problem: str

    def __str__(self) -> str:
        """Describe them; "3 rows, the first is row 7: it has no column 'prompt'"."""
        what = f"{self.num_rows:,} rows, the first is row" if self.num_rows > 1 else "row"
        return f"{what} {self.first + 1:,}: {self.problem}"


def bad_rows_of(problems: Sequence[str], rows: Sequence[int]) -> list[BadRows]:
    """Count problems by reason, the most frequent first; `rows` are those that have them."""
    by_reason: dict[str, BadRows] = {}
    for row, problem in zip(rows, problems, strict=True):
        reason = _VARIES.sub("", problem)
        first = by_reason.get(reason, BadRows(0, row, problem))
        by_reason[reason] = first._replace(num_rows=first.num_rows + 1)
    return sorted(by_reason.values(), key=lambda each: (-each.num_rows, each.first))


def lines_of(bad_rows: Sequence[BadRows], num_rows: int) -> Iterator[str]:
    """Describe skipped rows of a file with `num_rows`: a line for all, and one for each reason."""
    if not bad_rows:
        return
    total = sum(each.num_rows for each in bad_rows)
    yield f"{total:,} of {num_rows:,} rows cannot be used and are skipped (--rl-bad-rows skip)"
    yield from map(str, bad_rows[:_MOST_REASONS])
    if others := bad_rows[_MOST_REASONS:]:
        yield f"{sum(each.num_rows for each in others):,} rows for other reasons"


def counted(left_out: pa.ChunkedArray) -> dict[str, tuple[int, int]]:
    """Count omitted fields: name -> number of rows, and the first of them (from 0)."""
    counts: dict[str, tuple[int, int]] = {}
    lengths = left_out.combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(lengths):
        for name in left_out[int(row)].as_py():
            count, first = counts.get(name, (0, int(row)))
            counts[name] = (count + 1, first)
    return counts


def as_learned(parts: Sequence[str]) -> str:
    """Return one line: texts that are read and texts that are learned alternate in `parts`, the
    learned ones are in « »."""
    shown = map(_printable, parts)
    return "".join(f"«{part}»" if n % 2 else part for n, part in enumerate(shown))


def _printable(text: str) -> str:
    """Escape characters that do not print, and shorten the middle of a long text."""
    if (more := len(text) - _MOST_CHARACTERS) > 0:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]} [{more:,} more characters] {text[-half:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
