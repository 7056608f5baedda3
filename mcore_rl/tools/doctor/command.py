"""`mcore-rl doctor`: read the command line, examine, print."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mcore_rl.common.errors import CORRECT, UsageError
from mcore_rl.data.tokenizer_process import close_all
from mcore_rl.planner.report import make_console
from mcore_rl.planner.settings import GB, GPU_RESERVED_GB
from mcore_rl.tools.doctor.examination import Request, examine
from mcore_rl.tools.doctor.finding import Finding, Level, counts

# A word for each colour, for readers and files without colours.
_WORDS: dict[Level, str] = {"green": "ok", "yellow": "warn", "red": "fail"}
_INDENT = 2


def main(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Run the command; return 0 if nothing is red, else 1. Raises UsageError for a wrong use.

    `others` are the job's flags.
    """
    request = _request(options, others)
    started = time.perf_counter()
    with _quiet():
        findings = examine(request)
    close_all()  # the process of the tokenizer
    seconds = time.perf_counter() - started
    if options.json:
        print(json.dumps(as_json(findings, seconds), indent=2))
    else:
        print_findings(findings, seconds, make_console())
    return 1 if counts(findings)["red"] else 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the doctor's own flags; all others are the job's."""
    parser.usage = "mcore-rl doctor [options] [--world-size N -- flags of mcore_rl.train]"
    parser.description = (
        "Check this installation, and with --world-size a command line, before any GPU is taken. "
        "Exit code 0 if nothing is red, 1 if something is, 2 for a wrong use."
    )
    parser.epilog = (
        "All other flags are those of mcore_rl.train (see -m mcore_rl.train --help): any Megatron "
        "flag, any --rl-* flag, --rl-ranks-per-node and --rl-config FILE included. GB are 10^9 "
        "bytes."
    )
    add = parser.add_argument
    add("--world-size", type=int, help="number of ranks of the job")
    add("--json", action="store_true", help="print the findings as JSON")
    add("--gpu-memory-gb", type=float, help="of a device (default: what is found here)")
    add("--gpu-reserved-gb", type=float, default=GPU_RESERVED_GB, help="of it, what no tensor gets")
    add("--host-memory-gb", type=float, help="of a node (default: what is found here)")


def _request(options: argparse.Namespace, others: Sequence[str]) -> Request:
    job = list(others)
    if "--" in job:
        if stray := job[: job.index("--")]:
            raise UsageError(
                "{flag} is not a flag of the doctor",
                flag=stray[0],
                remedy="put the job's flags behind --",
            )
        job.remove("--")
    if {"-h", "--help"} & set(job):
        raise UsageError(
            "behind -- is of no flag",
            flag="--help",
            remedy="see -m mcore_rl.train --help for those",
        )
    for name in ("world_size", "gpu_memory_gb", "host_memory_gb"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            flag = f"--{name.replace('_', '-')} {value}"
            raise UsageError("must be greater than 0", flag=flag, remedy=CORRECT)
    if not options.gpu_reserved_gb >= 0:
        flag = f"--gpu-reserved-gb {options.gpu_reserved_gb}"
        raise UsageError("must be at least 0", flag=flag, remedy=CORRECT)
    if job and options.world_size is None:
        raise UsageError(
            "is missing", flag="--world-size", remedy="give the number of ranks of the job"
        )
    return Request(
        tokens=tuple(job),
        world_size=options.world_size,
        gpu_memory_bytes=_bytes(options.gpu_memory_gb),
        gpu_reserved_bytes=_bytes(options.gpu_reserved_gb) or 0,
        host_memory_bytes=_bytes(options.host_memory_gb),
    )


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * GB)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress output, logs and warnings of the examined packages; findings replace them."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(action="ignore"),
        ):
            yield
    finally:
        logging.disable(disabled)


def print_findings(findings: Sequence[Finding], seconds: float, console: Console) -> None:
    """Print the findings, grouped by area, and a last line with counts."""
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
    """Return {"findings": [{area, level, found, remedy}], "counts": {level: n}, "seconds": s}."""
    return {
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "counts": counts(findings),
        "seconds": seconds,
    }
