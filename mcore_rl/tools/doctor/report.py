"""Findings for a reader: a line each, by area, the remedy below; or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mcore_rl.tools.doctor.finding import Finding, Level, counts

# A word beside each colour, for those who see none, and for files.
_WORDS: dict[Level, str] = {"green": "ok", "yellow": "warn", "red": "fail"}
_INDENT = 2


def print_findings(findings: Sequence[Finding], seconds: float, console: Console) -> None:
    """Grouped by area, and a last line with counts."""
    for area, group in groupby(findings, key=lambda finding: finding.area):
        console.print(Text(area, style="bold"))
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, min_width=4)
        table.add_column()
        for finding in group:
            table.add_row(Text(_WORDS[finding.level], style=finding.level), Text(finding.found))
            if finding.remedy:
                table.add_row("", Padding(Text(finding.remedy), (0, 0, 0, _INDENT)))
        console.print(Padding(table, (0, 0, 0, _INDENT)))
    numbers = counts(findings)
    line = ", ".join(f"{numbers[level]} {word}" for level, word in _WORDS.items())
    console.print(f"{line}, in {seconds:.1f} s")


def as_json(findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """{"findings": [{area, level, found, remedy}], "counts": {level: number}, "seconds": s}"""
    return {
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "counts": counts(findings),
        "seconds": seconds,
    }
