"""A long run of the tiny task: growth of memory, open files and step times.

    python benchmarks/soak.py [--steps 200] [--processes 2] [--record]

The first half of the steps warms up and does not count. The trends of the others are linear fits,
with twice the standard error of their slope:

- heap: bytes allocated by malloc and blocks of Python's allocator, recorded by each rank after
  every step (`soak_notes.py`);
- resident: anonymous resident memory, sampled from outside a few times per second; the minimum in
  each of twenty equal spans. It moves in steps, since a small allocation keeps a whole page, so it
  shows a leak later and less reliably than the heap;
- seconds of the steps that neither save nor evaluate, and the same in units of a fixed piece of
  work after each step: a shared machine gets faster and slower over minutes.

Exit code 1 if the heap grows by more than 1 KB per step (0.1 GB in a hundred thousand), if Python's
blocks or the steps in units of that work grow by more than the error, or if files stay open.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from make_tiny_deepseek import make_checkpoint  # noqa: E402

from benchmarks import records  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.pages import fact_list, section  # noqa: E402
from mcore_rl.observe.run_directory import read_metrics  # noqa: E402

SECTION, PAGE = "soak", ROOT / "benchmarks" / "SOAK.md"
PERIOD_SECONDS = 0.3
NUM_SPANS = 20
HEAP_LIMIT_BYTES = 1024  # a step
# Otherwise free memory in the heap, memory kept for the next large tensor (up to 40 MB after a
# save) and the caches of threads would count as used.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
}


@dataclass(frozen=True)
class Trend:
    """Linear fit of values by step."""

    slope: float
    twice_error: float  # twice the standard error of the slope

    @classmethod
    def of(cls, steps: Sequence[float], values: Sequence[float]) -> Trend:
        line = stats.linregress(steps, values)
        return cls(float(line.slope), 2 * float(line.stderr))


@dataclass(frozen=True)
class Sample:
    """Memory and files of a rank at a moment of a step."""

    step: int
    rank: int
    anonymous_bytes: int
    open_files: int


class Watch(threading.Thread):
    """Sampler of all ranks of a launcher; `metrics` has a line for each finished step."""

    def __init__(self, launcher: int, metrics: Path) -> None:
        super().__init__(daemon=True)
        self._launcher, self._metrics, self._ended = launcher, metrics, threading.Event()
        self.samples: list[Sample] = []

    def run(self) -> None:
        while not self._ended.wait(PERIOD_SECONDS):
            if not self._metrics.is_file():
                continue  # no step yet
            step = self._metrics.read_bytes().count(b"\n")
            for process in psutil.Process(self._launcher).children():
                with contextlib.suppress(psutil.Error, OSError):
                    rank = process.environ().get("RANK")
                    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
                    found = re.search(r"RssAnon:\s+(\d+)", status)
                    if rank is not None and found is not None:
                        resident = int(found[1]) << 10
                        self.samples.append(Sample(step, int(rank), resident, process.num_fds()))

    def end(self) -> None:
        self._ended.set()
        self.join()


def command(checkpoint: Path, folder: Path, num_steps: int, num_processes: int) -> list[str]:
    return [
        *(sys.executable, "-m", "mcore_rl.launch", "--nproc-per-node", str(num_processes)),
        *("-m", "mcore_rl.train", "--rl-hf-checkpoint", str(checkpoint)),
        *("--rl-prompts", str(checkpoint / "prompts" / "train.jsonl")),
        *("--rl-eval-prompts", str(checkpoint / "prompts" / "heldout.jsonl")),
        *("--rl-reward", "scripts.varied_reward:score", "--rl-num-steps", str(num_steps)),
        *("--rl-num-prompts-per-step", "8", "--rl-num-samples-per-prompt", "4"),
        *("--rl-max-prompt-tokens", "24", "--rl-max-response-tokens", "8"),
        *("--rl-eval-interval", "50", "--rl-num-eval-prompts", "32", "--lr", "1e-4"),
        *("--save-interval", "50", "--rl-rollout-kv-cache-gib", "0.1"),
        *("--rl-run-dir", str(folder), "--rl-import", str(ROOT / "benchmarks" / "soak_notes.py")),
    ]


def soak(num_steps: int, num_processes: int, work: Path) -> dict[str, Any]:
    """Run, and return the trends of ranks and steps."""
    checkpoint = make_checkpoint(work / "checkpoint", size="micro")
    folder = work / "run"
    environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment["MCORE_RL_SOAK_NOTES"] = str(work / "notes")
    process = subprocess.Popen(
        command(checkpoint, folder, num_steps, num_processes),
        cwd=ROOT,
        env=environment | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdout=subprocess.DEVNULL,
    )
    watch = Watch(process.pid, folder / "metrics.jsonl")
    watch.start()
    exit_code = process.wait()
    watch.end()
    if exit_code:
        raise RuntimeError(f"the run ended with {exit_code}")
    first = num_steps // 2
    metrics = read_metrics(folder / "metrics.jsonl")
    # Without steps that save or evaluate.
    plain = [
        step
        for step in range(first, num_steps)
        if not metrics[step]["time/checkpoint_seconds"] + metrics[step]["time/eval_seconds"]
    ]
    notes = [_notes(work / f"notes.{rank}") for rank in range(num_processes)]
    # A step begins at the end of the one before, so it includes the fixed work.
    reference = [note["reference_seconds"] for note in notes[0]]
    seconds = [metrics[step]["time/step_seconds"] - reference[step - 1] for step in plain]
    units = [spent / reference[step] for step, spent in zip(plain, seconds, strict=True)]
    return {
        "num_steps": num_steps,
        "step_seconds": _median_and_trend(plain, seconds),
        "step_units": _median_and_trend(plain, units),
        "ranks": [
            {
                "rank": rank,
                **heap_of(notes[rank][first:]),
                **of_rank(
                    [s for s in watch.samples if s.rank == rank and first <= s.step < num_steps]
                ),
            }
            for rank in range(num_processes)
        ],
    }


def _notes(path: Path) -> list[dict[str, Any]]:
    """Return the records of a rank, by step."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _median_and_trend(steps: Sequence[int], values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), **vars(Trend.of(steps, values))}


def heap_of(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the trends of a rank's records, and the last values."""
    steps = [note["step"] for note in notes]
    found = {}
    for name in ("heap_bytes", "python_blocks"):
        values = [note[name] for note in notes]
        found[name] = {"last": values[-1], **vars(Trend.of(steps, values))}
    return found


def of_rank(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the trend of a rank's resident memory, and the open files of both halves."""
    first, last = samples[0].step, samples[-1].step
    length = (last + 1 - first) / NUM_SPANS
    spans: dict[int, list[Sample]] = {}
    for sample in samples:
        spans.setdefault(int((sample.step - first) / length), []).append(sample)
    # The minimum excludes temporary memory of a step.
    least = [min(span, key=lambda s: s.anonymous_bytes) for _, span in sorted(spans.items())]
    trend = Trend.of([s.step for s in least], [s.anonymous_bytes for s in least])
    half = len(samples) // 2
    return {
        "anonymous_bytes": {**vars(trend), "least": [s.anonymous_bytes for s in least]},
        "open_files": [
            min(s.open_files for s in part) for part in (samples[:half], samples[half:])
        ],
    }


def is_flat(found: dict[str, Any]) -> bool:
    """Return whether nothing grows, by the limits in the module's docstring."""
    ranks = found["ranks"]
    trends = [found["step_units"], *(rank["python_blocks"] for rank in ranks)]
    return (
        all(rank["heap_bytes"]["slope"] <= HEAP_LIMIT_BYTES for rank in ranks)
        and all(trend["slope"] <= trend["twice_error"] for trend in trends)
        and all(before >= after for before, after in (rank["open_files"] for rank in ranks))
    )


def part_of(record: records.Record) -> str:
    """Return the section of a record."""
    found = record["found"]
    seconds, units = found["step_seconds"], found["step_units"]
    lines = [
        "# A long run of the tiny task",
        "",
        f"Of {found['num_steps']} steps the first half warms up. Slopes are a step's, with twice "
        "their standard error; `soak.py` says how they are measured.",
        "",
        *fact_list(record["facts"]),
        f"- nothing grows: {'yes' if is_flat(found) else '**no**'}",
        "",
        "| | at the end | slope |",
        "| --- | ---: | ---: |",
    ]
    for rank in found["ranks"]:
        name = f"rank {rank['rank']}"
        heap, blocks = rank["heap_bytes"], rank["python_blocks"]
        resident, files = rank["anonymous_bytes"], rank["open_files"]
        lines += [
            f"| {name}, heap | {heap['last'] / 1e6:.1f} MB | {_slope(heap, 1e-3)} KB |",
            f"| {name}, Python's blocks | {blocks['last']:,} | {_slope(blocks, 1)} |",
            f"| {name}, resident | {resident['least'][-1] / 1e6:.1f} MB | "
            f"{_slope(resident, 1e-3)} KB |",
            f"| {name}, open files | {files[1]} | {files[0]} before |",
        ]
    lines += [
        f"| seconds, in the median | {seconds['median']:.2f} | {_slope(seconds, 1e3)} ms |",
        f"| the same by the seconds of fixed work | {units['median']:.1f} | "
        f"{_slope(units, 100 / units['median'], 2)} % |",
    ]
    return section(SECTION, lines)


def _slope(trend: Mapping[str, float], scale: float, digits: int = 1) -> str:
    return f"{scale * trend['slope']:+.{digits}f} ± {scale * trend['twice_error']:.{digits}f}"


def main(tokens: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    records.add_flag(parser)
    args = parser.parse_args(tokens)
    facts = facts_of_run("soak.py", tokens, ())
    with tempfile.TemporaryDirectory(prefix="mcore_rl_soak_") as work:
        found = soak(args.steps, args.processes, Path(work))
    records.report(SECTION, part_of, facts, to=args.record, page=PAGE, found=found)
    return int(not is_flat(found))


if __name__ == "__main__":
    sys.exit(main())
