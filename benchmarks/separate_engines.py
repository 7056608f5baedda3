"""Samples per second of engines on ranks of their own and of engines on the actor's ranks.

    python benchmarks/separate_engines.py [--markdown FILE] [--repeat 3] [--cases tools,even,tails]
        [--keep FOLDER]

Half an hour on 2 cores. --markdown replaces this benchmark's section of FILE. All ways have two
processes: two that train and sample in turn, or one of each. --keep leaves the run directories in
FOLDER/CASE/WAY/SEED.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.pages import (  # noqa: E402
    fact_list,
    paired_ratio,
    section,
    verdict_table,
    write_section,
)
from benchmarks.partial_accuracy import WORKLOAD as TAILS  # noqa: E402
from benchmarks.processes import ENVIRONMENT, alternating, in_a_process, train  # noqa: E402
from benchmarks.step_time_task import Workload, checkpoint_of  # noqa: E402

NUM_PROCESSES = 2
COLOCATED, PARTIAL = "colocated", "partial"
WARM_UP = 3  # steps that are not counted: pipelines fill
SECTION = "separate_engines"
FACTS = "facts.json"  # of kept runs
# Each published ratio is of another model, task and cluster.
PUBLISHED = """\
Theirs, on GPUs and other tasks: verl's fully asynchronous trainer 2.35x to 2.67x of colocated
(Qwen2.5-7B, 128 GPUs, its documentation); AReaL's documentation calls the synchronous setting
typically 2x slower."""


def apart(staleness: int) -> tuple[str, ...]:
    """Return the flags of engines on a rank of their own."""
    return ("--rl-rollout-ranks", "1", "--rl-max-staleness", str(staleness))


WAYS: dict[str, tuple[str, ...]] = {
    COLOCATED: (),
    PARTIAL: ("--rl-partial-rollouts",),
    **{f"separate, K={k}": apart(k) for k in (1, 2, 4)},
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
            num_steps=15,
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
        replace(TAILS, num_steps=40),
        ("--rl-reward", "benchmarks.step_time_task:reward"),
        tuple(WAYS),
        "separate",
        1.0,
    ),
    "even": Case(
        replace(TAILS, name="even", num_steps=30, max_response_tokens=8),
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
    step_seconds: float
    idle_trainers: float
    idle_engines: float
    staleness: float
    staleness_max: float


def main(tokens: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the section there")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each way, in turns")
    parser.add_argument("--cases", default=",".join(CASES), help="some of " + ", ".join(CASES))
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run directories")
    options = parser.parse_args(tokens)
    names = options.cases.split(",")
    if unknown := set(names) - CASES.keys():
        parser.error(f"--cases {options.cases}: {min(unknown)} is not one of {', '.join(CASES)}")
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat} must be at least 1; raise it")
    os.environ.update(ENVIRONMENT)
    started = time.monotonic()
    facts = facts_of_run("separate_engines.py", tokens, ())
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        (options.keep / FACTS).write_text(json.dumps(facts))
    checkpoint = in_a_process(checkpoint_of, TAILS)
    runs: dict[str, dict[str, list[Run]]] = {}
    with tempfile.TemporaryDirectory(prefix="mcore_rl_separate_engines_") as folder:
        kept = options.keep or Path(folder)
        for name in names:
            case = CASES[name]
            runs[name] = {way: [] for way in case.ways}
            for number in range(options.repeat):
                for way in alternating(case.ways, number):
                    run_dir = kept / name / way.replace(" ", "_") / str(number + 1)
                    found = run(case, way, checkpoint, run_dir, number + 1)
                    print(f"{name}, {way}: {found}", flush=True)
                    runs[name][way].append(found)
    facts["time"] = f"{(time.monotonic() - started) / 60:.0f} minutes in all"
    part = section_of(runs, facts)
    print(part)
    write_section(options.markdown, SECTION, part)
    return 0


def run(case: Case, way: str, checkpoint: Path, run_dir: Path, seed: int) -> Run:
    """Run a case on two processes."""
    prompts = checkpoint / "prompts"
    flags = case.workload.flags(checkpoint, run_dir, precision="fp32", seed=seed)
    flags += (
        f"--rl-prompts {prompts}/train.jsonl --rl-eval-interval 0 "
        f"--rl-num-steps {case.workload.num_steps} --rl-mismatch-correction token_tis "
        f"--rl-max-tokens-per-microbatch {case.workload.packed_tokens} "
        f"--rl-num-logged-rollouts {case.workload.samples_per_step}"
    ).split()
    lines = train(NUM_PROCESSES, [*flags, *case.flags, *WAYS[way]], run_dir)
    return run_of(lines, case.workload.samples_per_step)


def run_of(lines: Sequence[Mapping[str, float]], samples_per_step: int) -> Run:
    """Return the measurements in the lines of metrics.jsonl."""
    steps = [line for line in lines if "time/step_seconds" in line][WARM_UP:]

    def mean(name: str) -> float:
        return statistics.fmean(line.get(name, 0.0) for line in steps)

    seconds = mean("time/step_seconds")
    return Run(
        samples_per_second=samples_per_step / seconds / NUM_PROCESSES,
        step_seconds=seconds,
        idle_trainers=mean("idle/trainers"),
        idle_engines=mean("idle/engines"),
        staleness=mean("rollout/staleness_mean"),
        staleness_max=max(line.get("rollout/staleness_max", 0.0) for line in steps),
    )


def ratios_of(found: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Return the samples per second of each way over those of colocated engines, in one run."""
    pace = {way: [each.samples_per_second for each in some] for way, some in found.items()}
    return {way: paired_ratio(pace[way], pace[COLOCATED]) for way in pace}


def section_of(runs: Mapping[str, Mapping[str, Sequence[Run]]], facts: Mapping[str, str]) -> str:
    """Return the section of the page."""
    lines = ["# Engines on ranks of their own", "", _INTRODUCTION, "", *fact_list(facts), ""]
    verdicts = []
    for name, found in runs.items():
        case, ratios = CASES[name], ratios_of(found)
        fastest = max(ratio for way, ratio in ratios.items() if way.startswith("separate"))
        if case.best == "separate":
            target = f"{name}: separate {case.least_ratio:g}x the samples/s of colocated"
            verdicts.append((target, f"{fastest:.2f}x", fastest >= case.least_ratio))
        else:
            target = f"{name}: colocated is faster than separate"
            verdicts.append((target, f"{1 / fastest:.2f}x", fastest < 1.0))
    lines += [*verdict_table(verdicts), "", PUBLISHED, ""]
    lines += [
        "| case | way | samples/s of a process | over colocated | step s | idle trainers | "
        "idle engines | versions behind, mean (max) |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, found in runs.items():
        ratios = ratios_of(found)
        for way, some in found.items():
            mean = {
                each: statistics.fmean(getattr(one, each) for one in some)
                for each in Run.__dataclass_fields__
            }
            lines.append(
                f"| {name} | {way} | {mean['samples_per_second']:.2f} | {ratios[way]:.2f}x | "
                f"{mean['step_seconds']:.2f} | {mean['idle_trainers']:.0%} | "
                f"{mean['idle_engines']:.0%} | {mean['staleness']:.2f} "
                f"({mean['staleness_max']:.0f}) |"
            )
    return section(SECTION, lines)


_INTRODUCTION = f"""\
Generated by `benchmarks/separate_engines.py`, with the tiny checkpoint on two processes without a
GPU: both train and sample in turn, or one trains and one samples. `tools`: conversations with a
tool of one second, whose number of calls is log-normal (median 2, at most 10). `tails`: responses
of geometric length, a mean of {TAILS.mean_response_tokens:g} tokens, cut at
{TAILS.max_response_tokens}. `even`: responses of at most 8 tokens. Samples per second are divided
by the number of processes, and by the first {WARM_UP} steps nothing is counted. Ways take turns."""


if __name__ == "__main__":
    sys.exit(main())
