"""Time and memory of `mcore-rl plan` for DeepSeek-V3.

    python benchmarks/plan_time.py [--record] [--repeats 3] [--against CHECKOUT]

Each plan runs in a new process, imports included. With --against, this and another checkout run in
turns, so that ratios are valid on a busy machine. Processor seconds are user plus system time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import records  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.pages import fact_list, section  # noqa: E402

PRESETS = "--rl-config scripts/presets/v3.yaml --hf-config scripts/presets/v3.json"
SECTION, PAGE = "plan_time", ROOT / "docs" / "using" / "planner.md"
CASES = (
    "--world-size 256",
    "--world-size 4096",
    "--world-size 4096 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
    "--decoder-last-pipeline-num-layers 1 --expert-model-parallel-size 256 --rl-rollout-tp-size 8 "
    "--rl-rollout-ep-size 256",
    "--world-size 256 --search",
    "--world-size 4096 --search",
    "--world-size 4096 --simulate --rl-num-prompts-per-step 2048",
)


def plan(checkout: Path, flags: str) -> dict[str, float]:
    """Plan once with the code of `checkout`. Raises RuntimeError if that fails."""
    command = [sys.executable, "-m", "mcore_rl.cli", "plan", *PRESETS.split(), *flags.split()]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            cwd=checkout,  # which Python imports from first
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"mcore-rl plan in {checkout}: {errors.read().decode()}")
    return {
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def part_of(record: records.Record) -> str:
    """Return the section of a record."""
    lines = ["", "| flags | processor seconds | resident |", "| --- | ---: | ---: |"]
    for case in record["cases"]:
        seconds, peak = _summary(case["runs"])
        lines.append(f"| `{case['flags']}` | {seconds:.1f} | {peak:.0f} MB |")
    return section(SECTION, [*lines, "", *fact_list(record["facts"]), ""])


def _summary(runs: Sequence[dict[str, float]]) -> tuple[float, float]:
    """Return the median of processor seconds, and the peak in MB."""
    seconds = statistics.median(run["cpu_seconds"] for run in runs)
    return seconds, max(run["peak_bytes"] for run in runs) / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    records.add_flag(parser)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    options = parser.parse_args(arguments)
    facts = facts_of_run("plan_time.py", arguments, ())
    checkouts = [ROOT, *([options.against.resolve()] if options.against else [])]
    cases: list[dict[str, Any]] = []
    for flags in CASES:
        runs: dict[Path, list[dict[str, float]]] = {checkout: [] for checkout in checkouts}
        for _ in range(options.repeats):
            for checkout in checkouts:
                runs[checkout].append(plan(checkout, flags))
        cases.append({"flags": flags, "runs": runs[ROOT]})
        seconds = [_summary(runs[checkout])[0] for checkout in checkouts]
        if options.against:
            print(f"{flags}: {seconds[0] / seconds[1]:.2f} of the other's processor seconds")
    records.report(SECTION, part_of, facts, to=options.record, page=PAGE, cases=cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
