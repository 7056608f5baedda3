"""Pages of results: paired ratios, tables of targets, and the sections of a Markdown file.

Each benchmark owns the section between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Verdict = tuple[str, str, bool]  # target, measured value, whether the target is met


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median over repetitions of the ratio within a repetition."""
    return statistics.median(a / b for a, b in zip(values, reference, strict=True))


def verdict_table(verdicts: Iterable[Verdict]) -> list[str]:
    """Return the lines of a table of targets."""
    lines = ["| target | measured | met |", "| --- | --- | --- |"]
    lines += [
        f"| {target} | {measured} | {'yes' if met else '**no**'} |"
        for target, measured, met in verdicts
    ]
    return lines


def fact_list(facts: Mapping[str, str]) -> list[str]:
    """Return the lines of a list of facts."""
    return [f"- {name}: {value}" for name, value in facts.items()]


def markers(name: str) -> tuple[str, str]:
    """Return the first and the last line of a benchmark's section."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def section(name: str, lines: Iterable[str]) -> str:
    """Return a benchmark's section, with its markers."""
    begin, end = markers(name)
    return "\n".join([begin, *lines, end]) + "\n"


def with_section(page: str, name: str, part: str) -> str:
    """Return `page` with `part` in place of the section `name`, or at the end.

    Raises ValueError if one marker stands without the other, or either stands twice.
    """
    if not page:
        return part
    begin, end = markers(name)
    begins, ends = page.count(begin), page.count(end)
    if begins == ends == 0:
        return page.rstrip("\n") + "\n\n" + part
    if begins != 1 or ends != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the markers {begin} and {end} must stand there once each, in this order")
    pattern = re.escape(begin) + ".*?" + re.escape(end) + "\n?"
    return re.sub(pattern, lambda _: part, page, flags=re.DOTALL)


def write_section(file: Path, name: str, part: str) -> None:
    """Replace the section in a file, which need not exist."""
    file.write_text(with_section(file.read_text() if file.is_file() else "", name, part))
