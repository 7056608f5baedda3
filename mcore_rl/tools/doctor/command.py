"""`mcore-rl doctor`: read the command line, examine, print."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mcore_rl.common.errors import UsageError
from mcore_rl.data.tokenizer_process import close_all
from mcore_rl.planner.report import make_console
from mcore_rl.planner.settings import GB, GPU_RESERVED_GB, GPUS, gpu_named
from mcore_rl.tools.doctor.examination import examine
from mcore_rl.tools.doctor.finding import Finding, Level, Request, counts

# A word for each colour, for readers and files without colours.
_WORDS: dict[Level, str] = {"green": "ok", "yellow": "warn", "red": "fail"}
_INDENT = (0, 0, 0, 2)


def main(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Run the command on a job's flags, `others`; return 0 if nothing is red, else 1."""
    gpu_memory_gb, source = options.gpu_memory_gb, "--gpu-memory-gb"
    if options.gpu is not None and gpu_memory_gb is None:
        gpu_memory_gb, source = gpu_named(options.gpu).memory_gb, f"--gpu {options.gpu}"
    sizes = (gpu_memory_gb, options.host_memory_gb)
    gpu_bytes, host_bytes = (None if size is None else int(size * GB) for size in sizes)
    request = Request(
        tokens=_flags_of_job(others),
        world_size=options.world_size,
        gpu_memory_bytes=gpu_bytes,
        gpu_memory_source=source,
        gpu_reserved_bytes=int(options.gpu_reserved_gb * GB),
        host_memory_bytes=host_bytes,
    )
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
    parser.usage = "mcore-rl doctor [options] [-- flags of mcore_rl.train]"
    parser.description = (
        "Check this installation, and a command line if there is one, before a GPU is used. "
        "Exit code 0 if nothing is red, 1 if something is, 2 for a wrong use."
    )
    parser.epilog = (
        "All other flags are those of mcore_rl.train (see -m mcore_rl.train --help): any Megatron "
        "flag, any --rl-* flag, --rl-ranks-per-node and --rl-config FILE included. GB are 10^9 "
        "bytes."
    )
    ranks = "ranks of the job (default: the GPUs of this machine that are visible, or one process)"
    names = f"device of the job: {', '.join(GPUS)} (default: this machine's)"
    memory = "memory of a device (default: that of --gpu, or this machine's)"
    reserved, add = "part of it that tensors cannot use", parser.add_argument
    add("--world-size", type=_positive(int), help=ranks)
    add("--json", action="store_true", help="print the findings as JSON")
    add("--gpu", metavar="NAME", help=names)
    add("--gpu-memory-gb", type=_positive(float), help=memory)
    add("--gpu-reserved-gb", type=_positive(float, 0), default=GPU_RESERVED_GB, help=reserved)
    node = "memory of a node (default: this machine's)"
    add("--host-memory-gb", type=_positive(float), help=node)


def _positive(number: type[float], *least: float) -> Callable[[str], float]:
    """Return a type of argparse for numbers above 0, or of at least `least`."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if (value := number(text)) > 0 or value in least:
                return value
        bound = f"of at least {least[0]:g}" if least else "greater than 0"
        raise argparse.ArgumentTypeError(f"'{text}' must be a number {bound}")

    return parse


def _flags_of_job(others: Sequence[str]) -> tuple[str, ...]:
    """Return the flags behind --, which may be omitted."""
    job = list(others)
    if "--" in job:
        if stray := job[: job.index("--")]:
            remedy = "put the job's flags after --"
            raise UsageError("{flag} is not a flag of the doctor", flag=stray[0], remedy=remedy)
        job.remove("--")
    if {"-h", "--help"} & set(job):
        remedy = "see -m mcore_rl.train --help for those"
        raise UsageError("cannot follow --", flag="--help", remedy=remedy)
    return tuple(job)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what examined packages and their processes write; findings replace it."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with open(os.devnull, "w") as nowhere:
        for number, _ in kept:
            os.dup2(nowhere.fileno(), number)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)


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
                table.add_row("", Padding(Text(finding.remedy), _INDENT))
        console.print(Padding(table, _INDENT))
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
