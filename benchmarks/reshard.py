"""Resharding beside the peers, in one run.

    python benchmarks/reshard.py [--record] [--quick]

Makes checkpoints of random weights in a temporary folder, runs each case on 4 or 8 processes of
this machine, and prints a table per case. Without mbridge (the `bench` extra) its rows say so.
Eight to ten minutes on 2 cores; --quick runs one small layout.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import records  # noqa: E402
from benchmarks.cases import CASES, QUICK, Case, Model  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.processes import ENVIRONMENT  # noqa: E402
from benchmarks.report import SECTION, Row, part_of  # noqa: E402

CASE_SECONDS = 600


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    records.add_flag(parser)
    parser.add_argument("--repetitions", type=int, default=10, help="timed runs of every path")
    parser.add_argument("--bucket-mb", type=int, default=16, help="of ours and of the plain gather")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose layout has TEXT")
    parser.add_argument("--quick", action="store_true", help="one small layout, 2 repetitions")
    return parser


def main(tokens: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(tokens)
    for name in ("repetitions", "bucket_mb"):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            print(
                f"reshard.py: {flag} {getattr(options, name)} must be at least 1; raise it",
                file=sys.stderr,
            )
            return 2
    cases = [case for case in (QUICK if options.quick else CASES) if options.only in case.layout]
    if not cases:
        print(
            f"reshard.py: --only {options.only} is part of no layout; leave it out to see them",
            file=sys.stderr,
        )
        return 2
    repetitions = 2 if options.quick else options.repetitions
    rows: list[Row] = []
    facts = facts_of_run("reshard.py", tokens, ("mbridge",), note=", gloo over the loopback")
    facts["bucket"] = f"{options.bucket_mb} MiB; OMP_NUM_THREADS=1"
    with tempfile.TemporaryDirectory(prefix="mcore_rl_bench_") as folder:
        for case in cases:
            rows += _measured(case, Path(folder), options.bucket_mb, repetitions)
    records.report(SECTION, part_of, facts, to=options.record, rows=rows)
    return 0


def _measured(case: Case, folder: Path, bucket_mb: int, repetitions: int) -> list[Row]:
    """Measure a case in processes forked from this one, which has imported everything."""
    os.environ.update(ENVIRONMENT)
    started = time.monotonic()
    model = re.sub(r"\W+", "_", case.model.name)
    checkpoint = folder / model
    in_processes(1, lambda: _make_checkpoint(case.model, checkpoint), folder / "making")
    _import_everything()
    weights = _load(checkpoint)
    gc.freeze()

    def measure() -> list[Row]:
        from benchmarks.reshard_worker import measure_case

        return measure_case(
            case,
            checkpoint=str(checkpoint),
            weights=weights,
            bucket_mb=bucket_mb,
            repetitions=repetitions,
        )

    name = re.sub(r"\W+", "_", case.layout)
    rows = in_processes(case.world_size, measure, folder / f"{model}_{name}")[0]
    print(f"{case.model.name}, {case.layout}: {time.monotonic() - started:.0f} s", flush=True)
    return rows


def _make_checkpoint(model: Model, checkpoint: Path) -> None:
    make = importlib.import_module("make_tiny_deepseek").make_checkpoint
    make(checkpoint, arch=model.arch, size=model.size, overrides=model.overrides)


def _import_everything() -> None:
    """Import once for all ranks of all cases. This starts neither threads nor process groups."""
    importlib.import_module("mcore_rl.trainer.build")

    importlib.import_module("megatron.training.training")
    from vllm import LLM, _custom_ops  # noqa: F401  (the package alone is lazy)

    from benchmarks import reshard_worker  # noqa: F401


def _load(checkpoint: Path) -> dict[str, Any]:
    """Load the checkpoint into memory, which all forked ranks share."""
    from safetensors.torch import load_file

    files = sorted(checkpoint.glob("*.safetensors"))
    return {n: t.clone() for file in files for n, t in load_file(file).items()}


def in_processes(count: int, function: Callable[[], Any], base: Path) -> list[Any]:
    """Call `function` on `count` forked ranks; return each rank's result, which must be JSON.

    Raises RuntimeError, with the ends of their outputs, if one fails or the time limit passes.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    running = {}
    for rank in range(count):
        if (pid := os.fork()) == 0:
            _run_rank(function, rank, count, port, base)
        running[pid] = rank
    failed = _wait(running, time.monotonic() + CASE_SECONDS)
    if failed:
        outputs = [_of_rank(base, rank, "output") for rank in range(count)]
        tails = [f"--- rank {r}\n{o.read_text()[-3000:]}" for r, o in enumerate(outputs)]
        raise RuntimeError(f"{failed}\n" + "\n".join(tails))
    return [json.loads(_of_rank(base, rank, "result").read_text()) for rank in range(count)]


def _of_rank(base: Path, rank: int, what: str) -> Path:
    return base.with_name(f"{base.name}.{rank}.{what}")


def _run_rank(function: Callable[[], Any], rank: int, count: int, port: int, base: Path) -> None:
    """Run one rank in a forked process. Does not return."""
    os.setpgid(0, 0)
    output = os.open(_of_rank(base, rank, "output"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    code = 1
    try:
        _of_rank(base, rank, "result").write_text(json.dumps(function()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(running: dict[int, int], deadline: float) -> str:
    """Wait for all, and end all if one fails. Return the reason, or ""."""
    left, fault = dict(running), ""
    while left and not fault:
        for pid, rank in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del left[pid]
                if status:
                    fault = f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}"
        if time.monotonic() > deadline:
            fault = f"ranks {sorted(left.values())} took more than {CASE_SECONDS} s"
        time.sleep(0.05)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for pid in left:
        os.waitpid(pid, 0)
    return fault


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Otherwise Triton would list the objects that it has not freed.
    os._exit(code)
