"""Samples per second of the stream of rollouts and of fixed blocks, and hidden rewards.

    python benchmarks/rollout.py [--record] [--only CASE ...] [--quick]

About a quarter of an hour on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import records  # noqa: E402
from benchmarks import rollout_report as report  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.processes import ENVIRONMENT, run_python  # noqa: E402

NUM_RANKS = 2
# Case -> repetitions that count.
REPETITIONS = {
    "long_tail": 9,
    "partial": 3,
    "quick_reward": 3,
    "slow_reward": 2,
    "short": 21,
    "overhead": 5,
    "tool": 5,
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = list(REPETITIONS)
    records.add_flag(parser)
    parser.add_argument("--only", nargs="+", choices=cases, default=cases, help="some cases")
    parser.add_argument("--quick", action="store_true", help="one repetition of each")
    return parser


def main(tokens: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(tokens)
    os.environ.update(ENVIRONMENT)
    started = time.monotonic()
    facts = facts_of_run("rollout.py", tokens, ())
    cases: dict[str, report.Found] = {}
    with tempfile.TemporaryDirectory(prefix="mcore_rl_rollout_") as folder:
        checkpoint = Path(folder) / "checkpoint"
        make = str(ROOT / "scripts" / "make_tiny_deepseek.py")
        run_python([make, "--out", str(checkpoint), "--no-warm-up"])
        for case in options.only:
            cases[case] = run(case, checkpoint, 1 if options.quick else REPETITIONS[case])
            for target, measured, met in report.OF_CASE[case](cases[case]):
                print(f"{target}: {measured}{'' if met else ' (not met)'}", flush=True)
    facts["time"] = f"{(time.monotonic() - started) / 60:.0f} minutes in all"
    records.report(report.SECTION, report.part_of, facts, to=options.record, cases=cases)
    return 0


def run(case: str, checkpoint: Path, repetitions: int) -> report.Found:
    """Return the measurements of `rollout_worker.py` on its ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={NUM_RANKS}"]
    script = str(ROOT / "benchmarks" / "rollout_worker.py")
    output = run_python(
        [*launch, f"--master-port={port}", script, case, str(checkpoint), str(repetitions)]
    )
    found: report.Found = json.loads(next(x for x in output.splitlines() if x.startswith("{")))
    return found


if __name__ == "__main__":
    sys.exit(main())
