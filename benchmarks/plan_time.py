"""Time and memory of `mcore-rl plan` for DeepSeek-V3.

    python benchmarks/plan_time.py [--world-sizes 256 4096] [--repeats 3] [--against CHECKOUT]

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
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ROOT / "scripts" / "presets"


@dataclass(frozen=True, slots=True)
class Run:
    """Measurements of one process."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def plan(checkout: Path, world_size: int) -> Run:
    """Plan once with the code of `checkout`. Raises RuntimeError if that fails."""
    flags = ["--hf-config", str(PRESETS / "v3.json"), "--rl-config", str(PRESETS / "v3.yaml")]
    command = [sys.executable, "-m", "mcore_rl.cli", "plan", *flags]
    command += ["--world-size", str(world_size)]
    with tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=checkout,  # which Python imports from first
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"mcore-rl plan in {checkout}: {errors.read().decode()}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    options = parser.parse_args()
    checkouts = [ROOT, *([options.against.resolve()] if options.against else [])]
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| ranks | checkout | seconds | processor seconds | resident |")
    print("| --- | --- | --- | --- | --- |")
    for world_size in options.world_sizes:
        runs: dict[Path, list[Run]] = {checkout: [] for checkout in checkouts}
        for _ in range(options.repeats):
            for checkout in checkouts:
                runs[checkout].append(plan(checkout, world_size))
        medians = []
        for checkout, some in runs.items():
            medians.append(statistics.median(run.cpu_seconds for run in some))
            seconds = statistics.median(run.seconds for run in some)
            peak = max(run.peak_bytes for run in some) / 1e6
            name = "this one" if checkout == ROOT else "the other"
            print(f"| {world_size} | {name} | {seconds:.1f} | {medians[-1]:.1f} | {peak:.0f} MB |")
        if options.against:
            print(
                f"processor seconds of {world_size}: {medians[0] / medians[1]:.2f} of the other's"
            )


if __name__ == "__main__":
    main()
