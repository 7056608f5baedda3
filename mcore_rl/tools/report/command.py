"""`mcore-rl report`: read the command line and the run directories, write or serve the page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.errors import UsageError
from mcore_rl.tools.report.live import serve
from mcore_rl.tools.report.page import render
from mcore_rl.tools.report.run_files import read_runs


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.description = (
        "Write a run directory, finished or still being written, as one HTML page that loads "
        "nothing; or compare two. With --live, show it while the run writes."
    )
    add, page = parser.add_argument, "the page (default: RUN_DIR/report.html)"
    add("run_dir", metavar="RUN_DIR", help="--rl-run-dir of a run")
    add("other_run_dir", metavar="OTHER_RUN_DIR", nargs="?", help="another, to compare with")
    add("-o", "--output", metavar="FILE", help=page)
    live = "serve the page on 127.0.0.1 instead; it follows the run until its end"
    add("--live", action="store_true", help=live)
    add("--port", type=int, help="of --live (default: a free one)")


def main(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Run the command; return 0. Raises UsageError."""
    if others:
        remedy = "see mcore-rl report --help"
        raise UsageError("unrecognized arguments: {flag}", flag=" ".join(others), remedy=remedy)
    folders = [Path(path) for path in (options.run_dir, options.other_run_dir) if path is not None]
    if len({folder.resolve() for folder in folders}) < len(folders):
        both, remedy = "RUN_DIR and OTHER_RUN_DIR", "name another run to compare with, or only one"
        raise UsageError(f"are both {folders[0].resolve()}", flag=both, remedy=remedy)
    if options.live:
        if options.output:
            flag, remedy = f"--output {options.output}", "leave out one of them"
            raise UsageError("is not written with --live", flag=flag, remedy=remedy)
        serve(folders, options.port or 0)
        return 0
    if options.port is not None:
        flag, remedy = f"--port {options.port}", "add --live or leave it out"
        raise UsageError("has an effect with --live only", flag=flag, remedy=remedy)
    target = Path(options.output) if options.output else folders[0] / "report.html"
    runs = read_runs(folders)
    page = render(runs).encode("utf-8", errors="replace")
    try:
        target.write_bytes(page)
    except OSError as error:
        found = f"cannot be written ({error.strerror})"
        remedy = "name another file"
        raise UsageError(found, flag=f"--output {target}", remedy=remedy) from error
    for run in runs:
        for note in run.notes:
            print(f"{run.name}: {note}")
    print(f"{target} ({shown_bytes(len(page))})")
    return 0
