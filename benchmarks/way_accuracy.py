"""Accuracy of each way to sample, after as many steps and after as much time, with a slow verifier.

    python benchmarks/way_accuracy.py [--record] [--steps 100] [--seeds 2]

Half an hour on 2 cores.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import records  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.pages import fact_list, section, verdict_table  # noqa: E402
from benchmarks.processes import ENVIRONMENT, alternating, in_a_process, train  # noqa: E402
from benchmarks.separate_cases import COLOCATED, NUM_PROCESSES, STALENESS, TAILS, WAYS  # noqa: E402
from benchmarks.step_time_task import checkpoint_of  # noqa: E402
from benchmarks.tail_tool import MEDIAN_SECONDS, MOST_SECONDS, SPREAD  # noqa: E402

SECTION = "way_accuracy"
WORKLOAD = replace(
    TAILS,
    name="verified",
    max_response_tokens=16,
    teaching=None,
    taught="",
    mean_response_tokens=0.0,
)


@dataclass(frozen=True, slots=True)
class Run:
    """Measurements of a run."""

    accuracies: list[float]  # greedy, held-out: before, at each eighth, and after
    seconds: list[float]  # from the start to each of them, without evaluations
    step_seconds: float
    staleness: float  # in the mean, of samples
    staleness_max: float


def main(tokens: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    records.add_flag(parser)
    parser.add_argument("--steps", type=int, default=96, help="a multiple of 8")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each way, in turns")
    options = parser.parse_args(tokens)
    if options.steps < 8 or options.steps % 8:
        parser.error(f"--steps {options.steps} must be a multiple of 8; choose for example 96")
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds} must be at least 1; raise it")
    os.environ.update(ENVIRONMENT)
    started = time.monotonic()
    facts = facts_of_run("way_accuracy.py", tokens, ())
    checkpoint = in_a_process(checkpoint_of, WORKLOAD)
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="mcore_rl_way_accuracy_") as folder:
        for number in range(options.seeds):
            for way in alternating(WAYS, number):
                found = run(way, checkpoint, Path(folder) / "run", number + 1, options.steps)
                print(f"{way}: {found}", flush=True)
                runs[way].append(found)
    facts["time"] = f"{(time.monotonic() - started) / 60:.0f} minutes in all"
    records.report(SECTION, part_of, facts, to=options.record, num_steps=options.steps, runs=runs)
    return 0


def run(way: str, checkpoint: Path, run_dir: Path, seed: int, num_steps: int) -> Run:
    """Run on two processes."""
    prompts = checkpoint / "prompts"
    flags = WORKLOAD.flags(checkpoint, run_dir, precision="fp32", seed=seed)
    flags += (
        f"--rl-prompts {prompts}/train.jsonl --rl-eval-prompts {prompts}/heldout.jsonl "
        f"--rl-num-eval-prompts {WORKLOAD.num_eval_prompts} "
        "--rl-environment benchmarks.tail_tool:TailVerifier "
        f"--rl-num-steps {num_steps} --rl-eval-interval {num_steps // 8} "
        "--rl-mismatch-correction token_tis "
        f"--rl-max-tokens-per-microbatch {WORKLOAD.packed_tokens}"
    ).split()
    lines = train(NUM_PROCESSES, [*flags, *WAYS[way]], run_dir)
    shutil.rmtree(run_dir)
    return run_of(lines)


def run_of(lines: Sequence[Mapping[str, float]]) -> Run:
    """Return the measurements in the lines of metrics.jsonl."""
    steps = [line for line in lines if "time/step_seconds" in line]

    # An evaluation is of the weights before the step of its line; the last one has no step.
    ends = itertools.accumulate(
        (each["time/step_seconds"] - each.get("time/eval_seconds", 0.0) for each in steps),
        initial=0.0,
    )
    evaluated = [
        (line["eval/accuracy"], end)
        for line, end in zip(lines, ends, strict=False)
        if "eval/accuracy" in line
    ]
    return Run(
        accuracies=[accuracy for accuracy, _ in evaluated],
        seconds=[end for _, end in evaluated],
        # The median: an evaluation is in one step of an eighth.
        step_seconds=statistics.median(line["time/step_seconds"] for line in steps),
        staleness=statistics.fmean(line.get("rollout/staleness_mean", 0.0) for line in steps),
        staleness_max=max(line.get("rollout/staleness_max", 0.0) for line in steps),
    )


def noise_of(runs: Mapping[str, Sequence[Run]]) -> float:
    """Return twice the standard error of the difference of final accuracies, from the variance of
    runs, but at least from that of the number of prompts."""
    finals = {way: [each.accuracies[-1] for each in found] for way, found in runs.items()}
    share = statistics.fmean(each for found in finals.values() for each in found)
    of_prompts = share * (1 - share) / WORKLOAD.num_eval_prompts
    spreads = [statistics.variance(found) for found in finals.values() if len(found) > 1]
    of_runs = statistics.fmean(spreads) if spreads else 0.0
    return 2 * math.sqrt(2 * max(of_prompts, of_runs) / min(map(len, finals.values())))


def accuracy_at(run: Run, seconds: float) -> float:
    """Return the accuracy at a time, on the line between the evaluations around it."""
    return float(np.interp(seconds, run.seconds, run.accuracies))


def part_of(record: records.Record) -> str:
    """Return the section of a record."""
    runs = {way: [Run(**run) for run in found] for way, found in record["runs"].items()}
    return section_of(runs, record["facts"], record["num_steps"])


def section_of(runs: Mapping[str, Sequence[Run]], facts: Mapping[str, str], num_steps: int) -> str:
    """Return the section of the page."""
    times = np.linspace(0, min(run.seconds[-1] for found in runs.values() for run in found), 5)[1:]
    at = {
        way: [statistics.fmean(accuracy_at(run, each) for run in found) for each in times]
        for way, found in runs.items()
    }
    finals = {way: statistics.fmean(r.accuracies[-1] for r in runs[way]) for way in runs}
    noise = noise_of(runs)
    furthest = max((finals[way] - finals[COLOCATED] for way in runs), key=abs)
    ahead = {way: at[way][-1] - at[COLOCATED][-1] for way in runs if way in STALENESS}
    best = max(ahead, key=ahead.__getitem__)
    verdicts = [
        (
            f"after {num_steps} steps the accuracy of colocated, within noise",
            f"{furthest:+.3f} at most, noise {noise:.3f}",
            abs(furthest) <= noise,
        ),
        (
            "at equal wall time separate is more accurate than colocated",
            f"{ahead[best]:+.3f} after {times[-1]:.0f} s ({best})",
            ahead[best] > noise,
        ),
    ]
    lines = ["# Accuracy of each way to sample", "", _INTRODUCTION, ""]
    lines += [*fact_list(facts), "", *verdict_table(verdicts), ""]
    lines += [
        f"| way | {' | '.join(f'accuracy at {each:.0f} s' for each in times)} |",
        f"| --- | {' | '.join('---:' for _ in times)} |",
        *(f"| {way} | {' | '.join(f'{each:.3f}' for each in at[way])} |" for way in runs),
        "",
        "| way | held-out accuracy, at each eighth of the steps | seconds | step s | "
        "versions behind, mean (max) |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for way, found in runs.items():
        for each in found:
            accuracies = ", ".join(f"{value:.3f}" for value in each.accuracies)
            lines.append(
                f"| {way} | {accuracies} | {each.seconds[-1]:.0f} | {each.step_seconds:.2f} | "
                f"{each.staleness:.2f} ({each.staleness_max:.0f}) |"
            )
    return section(SECTION, lines)


_INTRODUCTION = f"""\
Generated by `benchmarks/way_accuracy.py`. The tiny checkpoint learns sums; a verifier pays an
answer after a time that is log-normal (median {MEDIAN_SECONDS:g} s, sigma {SPREAD:g}, at most
{MOST_SECONDS:g} s), as tests of code do. Lengths are even: with long answers they drift at random
in every way, so that seconds could not be compared. GRPO on {WORKLOAD.num_prompts_per_step} x
{WORKLOAD.num_samples_per_prompt} samples a step, AdamW at {WORKLOAD.learning_rate:g},
`--rl-mismatch-correction token_tis` in all ways, which take turns, each on two processes. Accuracy
is greedy, on {WORKLOAD.num_eval_prompts} held-out prompts. Seconds are those of steps, without
start and evaluations; between two evaluations accuracy is interpolated. Noise is two standard
errors of the difference, of prompts or of runs, whichever is larger."""


if __name__ == "__main__":
    sys.exit(main())
