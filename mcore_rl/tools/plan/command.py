"""`mcore-rl plan`: read the command line, plan, print, write."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.garbage import nothing_collected
from mcore_rl.planner.comparison import Comparison
from mcore_rl.planner.plan import as_json, plan_case
from mcore_rl.planner.report import (
    make_console,
    print_comparison,
    print_plan,
    print_search,
    print_seconds,
)
from mcore_rl.planner.search import CRITERIA, Candidate, Found, search
from mcore_rl.tools.plan.command_line import add_flags, read_request
from mcore_rl.tools.plan.simulate import simulate_job

__all__ = ["add_flags", "main"]


def main(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Run the command; return 0, also if the plan does not fit. Raises UsageError."""
    if options.measure_engine is not None:
        from mcore_rl.tools.plan.measure import measure  # late: it imports Megatron and vLLM

        return measure(Path(options.measure_engine), others)
    with nothing_collected():  # garbage collection would take a third of the time
        request = read_request(options, others)
        outcome = plan_case(request.case)
    console = make_console()
    print_plan(outcome, request.notes, console)
    print_seconds(outcome, request.step, console)
    written = as_json(outcome, request.notes)
    written["step_seconds"] = dataclasses.asdict(outcome.seconds_of_step(request.step))
    if options.search:
        result = search(request.case, request.step, top=options.top)
        print_search(result, console)
        written["search"] = _search(result)
    if options.simulate:
        comparison, notes = simulate_job(request, options, outcome)
        print_comparison(comparison, notes, console)
        written["simulation"] = {**_comparison(comparison), "notes": notes}
    if options.json:
        _write(Path(options.json), written)
    return 0


def _search(result: Found) -> dict[str, Any]:
    return {
        "num_tried": result.num_tried,
        "num_fitting": result.num_fitting,
        "criteria": CRITERIA,
        "layouts": [_row(candidate) for candidate in result.candidates],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    rows = [dataclasses.asdict(row) for row in comparison.rows]
    for row, simulated in zip(rows, comparison.rows, strict=True):
        del row["trained"]
        row["candidate"]["flags"] = simulated.candidate.flags
        row["samples_per_second_and_rank"] = simulated.samples_per_second_and_rank
    return {
        "candidates": rows,
        "left_out": list(comparison.left_out),
        "best": comparison.best.candidate.flags if comparison.rows else None,
        "recommendation": comparison.recommendation,
    }


def _row(candidate: Candidate) -> dict[str, Any]:
    return {
        "flags": candidate.flags,
        "seconds": {**dataclasses.asdict(candidate.seconds), "total": candidate.seconds.total},
        "received_bytes_max": candidate.received_bytes_max,
        "peak_bytes": candidate.peak_bytes,
        "kv_cache_tokens": candidate.kv_cache_tokens,
    }


def _write(file: Path, written: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(written, indent=2, default=sorted) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot be written ({error.strerror})",
            flag=f"--json {file}",
            remedy="name another file",
        ) from error
