"""Samples per second of the stream of rollouts beside fixed blocks, and what hides behind it.

    python benchmarks/rollout.py [--json FILE] [--markdown FILE] [--only CASE ...] [--quick]

About a quarter of an hour on 2 cores. --markdown replaces its own section of FILE and leaves what
else stands there.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import rollout_report as report  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.reshard import ENVIRONMENT  # noqa: E402
from benchmarks.step_time_report import with_section  # noqa: E402

NUM_RANKS = 2
CASE_SECONDS = 1800
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the section there")
    parser.add_argument("--only", nargs="+", choices=cases, default=cases, help="some cases")
    parser.add_argument("--quick", action="store_true", help="one repetition of each")
    return parser


def main(tokens: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(tokens)
    if options.markdown and options.markdown.is_file():
        try:
            with_section(options.markdown.read_text(), "", (report.BEGIN, report.END))
        except ValueError as error:
            print(f"rollout.py: --markdown {options.markdown}: {error}", file=sys.stderr)
            return 2
    os.environ.update(ENVIRONMENT)
    started = time.monotonic()
    facts = facts_of_run("rollout.py", tokens, ())
    cases: dict[str, report.Found] = {}
    with tempfile.TemporaryDirectory(prefix="mcore_rl_rollout_") as folder:
        checkpoint = Path(folder) / "checkpoint"
        make = str(ROOT / "scripts" / "make_tiny_deepseek.py")
        _output([make, "--out", str(checkpoint), "--no-warm-up"])
        for case in options.only:
            cases[case] = run(case, checkpoint, 1 if options.quick else REPETITIONS[case])
            for target, measured, met in report.OF_CASE[case](cases[case]):
                print(f"{target}: {measured}{'' if met else ' (not met)'}", flush=True)
    facts["time"] = f"{(time.monotonic() - started) / 60:.0f} minutes in all"
    if options.json:
        options.json.write_text(json.dumps(cases, indent=1) + "\n")
    part = report.section(cases, facts)
    if options.markdown:
        page = options.markdown.read_text() if options.markdown.is_file() else ""
        options.markdown.write_text(with_section(page, part, (report.BEGIN, report.END)))
    return 0


def run(case: str, checkpoint: Path, repetitions: int) -> report.Found:
    """What `rollout_worker.py` measured, on its ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={NUM_RANKS}"]
    script = str(ROOT / "benchmarks" / "rollout_worker.py")
    output = _output(
        [*launch, f"--master-port={port}", script, case, str(checkpoint), str(repetitions)]
    )
    found: report.Found = json.loads(next(x for x in output.splitlines() if x.startswith("{")))
    return found


def _output(arguments: Sequence[str]) -> str:
    """A Python of its own; what it printed. RuntimeError with the end of that if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=CASE_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(arguments[:4])} ended with {done.returncode}\n"
            f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
