"""Cases of `separate_engines.py`, the ways to run them, and what is measured of a run."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import records  # noqa: E402
from benchmarks.processes import train  # noqa: E402
from benchmarks.step_time_task import Teaching, Workload  # noqa: E402

NUM_PROCESSES = 2
# The mean of an answer with its tail is 20 tokens; one in a hundred reaches the limit or nearly.
TAILS = Workload(
    "tails",
    max_response_tokens=120,
    num_prompts_per_step=16,
    num_samples_per_prompt=4,
    num_steps=100,
    num_eval_prompts=256,
    packed_tokens=2048,
    teaching=Teaching(num_steps=100, num_samples=16, learning_rate=5e-4),
    taught="tails",
    mean_response_tokens=24.0,
)
COLOCATED, PARTIAL = "colocated", "partial"
PARTIAL_STALENESS = 4
STILL = 1e-6  # learning rate: with that of TAILS, lengths drift at random to up to four times
# Steps that are not counted: pipelines fill, and engines start more groups than they need.
WARM_UP = 10


def apart(staleness: int) -> tuple[str, ...]:
    """Return the flags of engines on a rank of their own."""
    return ("--rl-rollout-ranks", "1", "--rl-max-staleness", str(staleness))


STALENESS = {f"separate, K={k}": k for k in (1, 2, 4)}
WAYS: dict[str, tuple[str, ...]] = {
    COLOCATED: (),
    PARTIAL: ("--rl-partial-rollouts", "--rl-max-staleness", str(PARTIAL_STALENESS)),
    **{way: apart(k) for way, k in STALENESS.items()},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, and the ways that run it."""

    workload: Workload
    flags: tuple[str, ...]
    ways: tuple[str, ...]
    best: str  # "separate" or "colocated": what is expected to be faster
    least_ratio: float  # of the expected one over the other


CASES = {
    "tools": Case(
        replace(
            TAILS,
            name="tools",
            num_prompts_per_step=8,
            num_samples_per_prompt=4,
            num_steps=30,
            max_response_tokens=200,
        ),
        (
            *("--rl-environment", "benchmarks.tail_tool:TailTool", "--rl-max-turn-tokens", "16"),
            *("--rl-max-turns", "12"),
        ),
        (COLOCATED, *(way for way in WAYS if way.startswith("separate"))),
        "separate",
        1.3,
    ),
    "tails": Case(
        replace(TAILS, num_steps=40, learning_rate=STILL),
        ("--rl-reward", "benchmarks.step_time_task:reward"),
        tuple(WAYS),
        "separate",
        1.0,
    ),
    "even": Case(
        replace(TAILS, name="even", num_steps=30, max_response_tokens=8, learning_rate=STILL),
        ("--rl-reward", "benchmarks.step_time_task:reward"),
        tuple(WAYS),
        "colocated",
        1.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """Measurements of a run, without its first steps."""

    samples_per_second: float  # of a process
    tokens_per_second: float  # of responses that are trained on, of all processes
    step_seconds: float
    idle_trainers: float
    idle_engines: float
    staleness: float
    staleness_max: float


def read_options(
    tokens: Sequence[str] | None, description: str | None, *, repeat: int
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a benchmark that runs cases, with this default of --repeat, and the
    cases' names."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    records.add_flag(parser)
    parser.add_argument("--repeat", type=int, default=repeat, help="runs of each way")
    parser.add_argument("--cases", default=",".join(CASES), help="some of " + ", ".join(CASES))
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run directories")
    options = parser.parse_args(tokens)
    names = options.cases.split(",")
    if unknown := set(names) - CASES.keys():
        parser.error(f"--cases {options.cases}: {min(unknown)} is not one of {', '.join(CASES)}")
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat} must be at least 1; raise it")
    return options, names


def mean_of(runs: Sequence[Run]) -> Run:
    """Return the means."""
    return Run(
        **{
            name: statistics.fmean(getattr(each, name) for each in runs)
            for name in Run.__dataclass_fields__
        }
    )


def flags_of(case: Case, checkpoint: Path, run_dir: Path, seed: int) -> list[str]:
    """Return the flags that all ways share."""
    prompts = checkpoint / "prompts"
    flags = case.workload.flags(checkpoint, run_dir, precision="fp32", seed=seed)
    flags += (
        f"--rl-prompts {prompts}/train.jsonl --rl-eval-interval 0 "
        f"--rl-num-steps {case.workload.num_steps} --rl-mismatch-correction token_tis "
        f"--rl-max-tokens-per-microbatch {case.workload.packed_tokens} "
        f"--rl-num-logged-rollouts {case.workload.samples_per_step}"
    ).split()
    return [*flags, *case.flags]


def run(
    case: Case, way: str, checkpoint: Path, run_dir: Path, seed: int, **environment: str
) -> Run:
    """Run a case on two processes."""
    flags = [*flags_of(case, checkpoint, run_dir, seed), *WAYS[way]]
    lines = train(NUM_PROCESSES, flags, run_dir, **environment)
    return run_of(lines, case.workload.samples_per_step)


def kept_run(case: Case, run_dir: Path) -> Run | None:
    """Return the measurements of a run that --keep has kept; None if it is not complete."""
    if not (run_dir / "summary.json").exists():
        return None
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return run_of(lines, case.workload.samples_per_step)


def run_of(lines: Sequence[Mapping[str, float]], samples_per_step: int) -> Run:
    """Return the measurements in the lines of metrics.jsonl."""
    steps = [line for line in lines if "time/step_seconds" in line]
    windows = [_seconds_between_samplings(*pair) for pair in itertools.pairwise(steps)]
    windows, steps = windows[WARM_UP - 1 :], steps[WARM_UP:]

    def mean(name: str) -> float:
        return statistics.fmean(line.get(name, 0.0) for line in steps)

    def share_of_time(name: str) -> float:
        shares = [line.get(name, 0.0) for line in steps]
        return statistics.fmean(shares, windows)

    seconds = mean("time/step_seconds")
    return Run(
        samples_per_second=samples_per_step / seconds / NUM_PROCESSES,
        tokens_per_second=mean("response_tokens/mean") * samples_per_step / seconds,
        step_seconds=seconds,
        idle_trainers=share_of_time("idle/trainers"),
        idle_engines=share_of_time("idle/engines"),
        staleness=mean("rollout/staleness_mean"),
        staleness_max=max(line.get("rollout/staleness_max", 0.0) for line in steps),
    )


def _seconds_between_samplings(before: Mapping[str, float], step: Mapping[str, float]) -> float:
    """Return the seconds from the end of one step's sampling to the end of the next, of which
    `idle/*` are shares."""

    def until_sampled(line: Mapping[str, float]) -> float:
        stages = ("reshard_to_rollout", "eval", "data", "rollout", "reward")
        return sum(line.get(f"time/{stage}_seconds", 0.0) for stage in stages)

    return before["time/step_seconds"] - until_sampled(before) + until_sampled(step)
