"""Samples per second of a task of two turns, compared with TRL's tool loop.

    python benchmarks/rollout_trl.py [--record] [--repetitions 3] [--quick]

Needs the `bench` extra; ten minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import forward_seconds, records, rollout_trl_agent  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.pages import fact_list, paired_ratio, section  # noqa: E402
from benchmarks.processes import ENVIRONMENT, alternating, in_a_process, run_python, train  # noqa: E402
from benchmarks.rollout_trl_agent import MAX_TURNS, WORKLOAD  # noqa: E402
from benchmarks.separate_cases import apart  # noqa: E402
from benchmarks.slow_tool import SECONDS  # noqa: E402
from benchmarks.step_time_report import Run  # noqa: E402
from benchmarks.step_time_task import LEFT_OUT_STEPS, checkpoint_of  # noqa: E402

TEACHING_STEPS = 48
TEACHING_RATE = 3e-4
SECTION = "rollout_trl"
TRL = "trl"
FORWARD = "forward passes of vLLM"
# Processes, threads of each, and flags.
OURS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "mcore_rl, 1 process": (1, 1, ()),
    "mcore_rl, 1 process of 2 threads": (1, 2, ()),
    "mcore_rl, 2 processes": (2, 1, ()),
    "mcore_rl, engine apart, K=1": (2, 1, apart(1)),
    "mcore_rl, engine apart, K=2": (2, 1, apart(2)),
}
SLOW_STEPS = LEFT_OUT_STEPS + 4  # with a slow tool; one run each


def main(tokens: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    records.add_flag(parser)
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each, in turns")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of both")
    parser.add_argument("--quick", action="store_true", help="one repetition, few steps")
    options = parser.parse_args(tokens)
    fault = _fault(options)
    if fault:
        print(f"rollout_trl.py: {fault}", file=sys.stderr)
        return 2
    os.environ.update(ENVIRONMENT)
    started = time.monotonic()
    facts = facts_of_run("rollout_trl.py", tokens, ("trl", "accelerate"))
    num_steps = LEFT_OUT_STEPS + 1 if options.quick else WORKLOAD.num_steps
    with tempfile.TemporaryDirectory(prefix="mcore_rl_rollout_trl_") as folder:
        systems = {
            name: partial(ours, processes, options.precision, threads=threads, more=more)
            for name, (processes, threads, more) in OURS.items()
        }
        systems[TRL] = partial(trl, options.precision)
        slow_tool = ("--rl-environment", "benchmarks.slow_tool:SlowCalculator")
        slow = {
            f"{name}, slow tool": partial(of, more=(*OURS[name][2], *slow_tool))
            for name, of in systems.items()
            if name != TRL
        }
        slow[f"{TRL}, slow tool"] = partial(trl, options.precision, tool_seconds=SECONDS)
        taught, task = _taught(Path(folder), options.precision)
        runs: dict[str, list[Run]] = {name: [] for name in systems}
        for number in range(1 if options.quick else options.repetitions):
            for name in alternating(systems, number):
                run = systems[name](taught, task, Path(folder) / "run", number + 1, num_steps)
                print(f"{name}: {pace(run):.1f} samples/s, {json.dumps(run)}", flush=True)
                runs[name].append(run)
        for name, system in slow.items():
            runs[name] = [system(taught, task, Path(folder) / "run", 1, SLOW_STEPS)]
            print(f"{name}: {pace(runs[name][0]):.1f} samples/s", flush=True)
    facts["time"] = f"{(time.monotonic() - started) / 60:.0f} minutes in all"
    records.report(SECTION, part_of, facts, to=options.record, runs=runs)
    return 0


def _fault(options: argparse.Namespace) -> str:
    """Return what is wrong with the arguments or the environment, or ""."""
    if options.repetitions < 1:
        return f"--repetitions {options.repetitions} must be at least 1; raise it"
    if importlib.util.find_spec("trl") is None:
        return "trl is not installed; pip install .[bench]"
    return ""


# ------------------------------------------------------------------------------------- the systems


def _taught(folder: Path, precision: str) -> tuple[Path, Path]:
    """Return a checkpoint that a run of ours has trained on the task, and the task's prompts."""
    task, taught = folder / "task", folder / "taught"
    run_python([str(ROOT / "scripts" / "calculator_task.py"), str(task)])
    warmed = in_a_process(checkpoint_of, WORKLOAD)
    run = ours(
        2, precision, warmed, task, folder / "teaching", 1, TEACHING_STEPS,
        ("--lr", str(TEACHING_RATE), "--rl-export-hf", str(taught)),
    )  # fmt: skip
    print(f"taught: rewards {[round(each, 2) for each in run['rewards'][::8]]}", flush=True)
    return taught, task


def ours(
    processes: int,
    precision: str,
    checkpoint: Path,
    task: Path,
    run_dir: Path,
    seed: int,
    num_steps: int,
    more: Sequence[str] = (),
    threads: int = 1,
) -> dict[str, Any]:
    """Run mcore_rl; `more` flags take precedence."""
    flags = WORKLOAD.flags(checkpoint, run_dir, precision=precision, seed=seed)
    flags += (
        f"--rl-prompts {task}/train.jsonl --rl-environment calculator --rl-reward environment "
        f"--rl-max-turns {MAX_TURNS} --rl-num-steps {num_steps} --rl-eval-interval 0 "
        f"--rl-max-tokens-per-microbatch {WORKLOAD.packed_tokens} "
        f"--rl-num-logged-rollouts {WORKLOAD.samples_per_step}"
    ).split()
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OMP_NUM_THREADS": str(threads), forward_seconds.FOLDER: folder}
        flags += ["--rl-import", forward_seconds.__file__]
        lines = train(processes, [*flags, *more], run_dir, **environment)
        passes = forward_seconds.per_step(Path(folder), LEFT_OUT_STEPS)
    steps = [line for line in lines if "time/step_seconds" in line]
    texts = (run_dir / "rollouts.jsonl").read_text().splitlines()
    shutil.rmtree(run_dir)
    return {
        "step_seconds": [step["time/step_seconds"] for step in steps],
        "response_tokens": [step["response_tokens/mean"] for step in steps],
        # One line per turn; the file has all samples.
        "turns": [statistics.fmean(1 + json.loads(t)["response"].count("\n") for t in texts)],
        "parts": {**parts_of(steps[LEFT_OUT_STEPS:]), FORWARD: passes},
        "rewards": [step["reward/mean"] for step in steps],
        "setting": f"{processes} x {threads} thread{'s' * (threads > 1)}, {precision}",
    }


def trl(
    precision: str,
    checkpoint: Path,
    task: Path,
    out: Path,
    seed: int,
    num_steps: int,
    tool_seconds: float = 0.0,
) -> dict[str, Any]:
    """Run TRL, with a thread on each core."""
    script = str(Path(rollout_trl_agent.__file__))
    flags = ["--precision", precision, "--seed", str(seed), "--steps", str(num_steps)]
    flags += ["--tool-seconds", str(tool_seconds)]
    threads = str(len(os.sched_getaffinity(0)))
    output = run_python(
        [script, str(checkpoint), str(task / "train.jsonl"), str(out), *flags],
        OMP_NUM_THREADS=threads,
    )
    shutil.rmtree(out, ignore_errors=True)
    run: dict[str, Any] = json.loads(output.splitlines()[-1])
    run["setting"] = f"1 x {run['threads']} threads, {precision}"
    return run


# ---------------------------------------------------------------------------------------- the page


def parts_of(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return mean seconds of the parts of a step, named as in metrics.jsonl."""
    names = [name for name in steps[0] if name.startswith("time/")]
    return {name: statistics.fmean(step[name] for step in steps if name in step) for name in names}


def floor_of(parts: Mapping[str, float], theirs: Sequence[float]) -> str:
    """Return a sentence about what remains without anything of ours but vLLM's forward passes and
    Megatron's update, one after the other."""
    seconds = parts[FORWARD] + parts["time/train_seconds"]
    most = WORKLOAD.samples_per_step / seconds
    return (
        f" vLLM's forward passes and Megatron's update alone, one after the other: {seconds:.3f} "
        f"s, {most:.0f} samples/s, {most / statistics.fmean(theirs):.2f}x TRL's."
    )


def pace(run: Run) -> float:
    """Return samples per second of the mean step, without the first ones."""
    return WORKLOAD.samples_per_step / statistics.fmean(run["step_seconds"][LEFT_OUT_STEPS:])


def part_of(record: records.Record) -> str:
    """Return the section of a record."""
    return section_of(record["runs"], record["facts"])


def section_of(runs: Mapping[str, Sequence[Run]], facts: Mapping[str, str]) -> str:
    """Return the section of the page."""
    lines = ["# A task of two turns, measured beside TRL", "", _INTRODUCTION, ""]
    lines += fact_list(facts)
    lines += [
        "",
        "| system | samples/s (runs) | over TRL's | turns | tokens a sample | reward | setting |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, found in runs.items():
        theirs = [pace(run) for run in runs[f"{TRL}, slow tool" if "slow" in name else TRL]]
        paces = [pace(run) for run in found]
        cells = [
            name,
            f"{statistics.fmean(paces):.1f} ({', '.join(f'{each:.1f}' for each in paces)})",
            f"{paired_ratio(paces, theirs):.2f}x",
            *(
                f"{statistics.fmean(statistics.fmean(run[what]) for run in found):.2f}"
                for what in ("turns", "response_tokens", "rewards")
            ),
            found[0]["setting"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for name, found in runs.items():
        every = [run["parts"] for run in found if "parts" in run]
        if every:
            medians = {part: statistics.median(each[part] for each in every) for part in every[0]}
            parts = [f"{part.removeprefix('time/')} {value:.3f}" for part, value in medians.items()]
            lines += ["", f"Seconds of a step of {name}: {', '.join(parts)}."]
            if "slow" not in name and "apart" not in name:
                lines[-1] += floor_of(medians, [pace(run) for run in runs[TRL]])
    return section(SECTION, lines)


_INTRODUCTION = f"""\
Generated by `benchmarks/rollout_trl.py`. The task of `scripts/calculator_task.py` with the tiny
checkpoint, which a run of ours has taught it for {TEACHING_STEPS} steps, until nearly all samples
take two turns. Then both continue from there: the same prompts, 16 x 8 samples a step, at most
{WORKLOAD.max_response_tokens} tokens of turns and observations, at most {MAX_TURNS} turns, AdamW
at {WORKLOAD.learning_rate:g}, with which the policy stays as it is. Whole steps are measured:
rollout, tools, rewards, update. Runs take turns; start-up and the first {LEFT_OUT_STEPS} steps of
a run do not count; ratios are medians of those within a repetition. Reward is the mean of what a
sample is paid: 1.25 if it calls and then answers rightly.

- `trl`: `GRPOTrainer` with `environment_factory`, its own loop of tools, and `generate` of
  transformers (`benchmarks/step_time_trl.py` tells what else of TRL runs on a CPU). Around it is
  what a tokenizer of a published model would bring: a chat template that gives results the form
  of the task's, and a parser that says which turns are calls (`benchmarks/rollout_trl_agent.py`).
- The calculator's code is the same. TRL calls it in the trainer's process, without limits, one
  call after the other; ours has processes for the samples, whose time is in these figures.
- `slow tool`: a call takes {SECONDS:g} s. TRL makes the calls of different samples one after the
  other, async ones too. One run of {SLOW_STEPS} steps each."""


if __name__ == "__main__":
    sys.exit(main())
