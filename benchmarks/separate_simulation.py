"""The simulation of `mcore-rl plan --simulate` for the cases of `separate_engines.py`.

What it is given is measured in other runs than those that it predicts, by a user's means: the
engine by `mcore-rl plan --measure-engine`; responses, training and switches in a colocated run;
training and hand-overs of separate ranks in a short run with --rl-max-staleness 1, in which
trainers and engines compete for the machine as in longer ones.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks.processes import run_python, train  # noqa: E402
from benchmarks.separate_cases import (  # noqa: E402
    CASES,
    COLOCATED,
    NUM_PROCESSES,
    PARTIAL,
    STALENESS,
    WARM_UP,
    Case,
    Run,
    apart,
    flags_of,
)
from benchmarks.tail_tool import SECONDS as TOOL_SECONDS  # noqa: E402
from mcore_rl.planner import simulation  # noqa: E402
from mcore_rl.planner.simulated_engines import ResponseLengths, Workload  # noqa: E402
from mcore_rl.planner.simulation import Candidate, Speeds, simulate  # noqa: E402
from mcore_rl.tools.plan.recorded import (  # noqa: E402
    read_engine_speed,
    read_responses,
    read_run,
)

SEPARATE = "separate"
INPUTS = "inputs"  # the folder of what is measured for the simulation
SEED = 100  # of the runs that are measured for the simulation
SIMULATED_SEEDS = 10
SEPARATE_STEPS = 8
MOST_RUNNING = 128  # the default of --rl-rollout-max-num-seqs
AIM = 0.1  # relative errors, errors of idle shares, and absolute ones of a small staleness
_SMALL_STALENESS = 0.5  # below, the absolute error counts


@dataclass(frozen=True, slots=True)
class Row:
    """A way to run a case, measured and simulated."""

    case: str
    way: str
    measured: Run
    simulated: Run

    def speed(self, run: Run) -> float:
        """Tokens per second; with tools, whose seconds do not depend on tokens, samples."""
        has_tools = "--rl-environment" in CASES[self.case].flags
        return NUM_PROCESSES * run.samples_per_second if has_tools else run.tokens_per_second

    @property
    def errors(self) -> tuple[float, float, float, float]:
        """Errors of speed (relative), of the idle shares of trainers and engines, and of the mean
        staleness (relative, unless it is small)."""
        found, real = self.simulated, self.measured
        apart = found.staleness - real.staleness
        return (
            self.speed(found) / self.speed(real) - 1,
            found.idle_trainers - real.idle_trainers,
            found.idle_engines - real.idle_engines,
            apart if real.staleness < _SMALL_STALENESS else apart / real.staleness,
        )


def comparison(rows: Sequence[Row]) -> list[str]:
    """Return a table of the rows, measured / simulated, and how many numbers miss the aim."""
    lines = [
        "| case | way | tokens or samples/s | error | trainers idle | engines idle | versions |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    num_missed = num_compared = 0
    for row in rows:
        real, found = row.measured, row.simulated
        is_separate = row.way in STALENESS
        shown = [
            f"{row.speed(real):#.3g} / {row.speed(found):#.3g}",
            f"{real.idle_trainers:.0%} / {found.idle_trainers:.0%}" if is_separate else "",
            f"{real.idle_engines:.0%} / {found.idle_engines:.0%}" if is_separate else "",
            f"{real.staleness:.2f} / {found.staleness:.2f}",
        ]
        missed = [abs(error) > AIM for error in row.errors]
        num_missed += sum(missed)
        num_compared += len(missed) if is_separate else 2
        shown = [f"**{text}**" if miss else text for text, miss in zip(shown, missed, strict=True)]
        shown.insert(1, f"{row.errors[0]:+.0%}")
        lines.append(f"| {row.case} | {row.way} | {' | '.join(shown)} |")
    return [
        f"Measured / simulated; {num_compared - num_missed} of {num_compared} numbers are within "
        "the aim, the others are bold:",
        "",
        *lines,
    ]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the simulation is given for a case."""

    workload: Workload
    speeds: Speeds
    separate_speeds: Speeds
    switch_seconds: float
    transfer_seconds: float


def measure(case: Case, checkpoint: Path, folder: Path) -> None:
    """Measure what the simulation needs, into `folder`."""
    folder.mkdir(parents=True)
    flags = flags_of(case, checkpoint, folder / COLOCATED, SEED)
    launch = ["-m", "mcore_rl.launch", "--nproc-per-node", str(NUM_PROCESSES)]
    plan = ["-m", "mcore_rl.cli", "plan", "--measure-engine", str(folder / "speed.json")]
    run_python([*launch, *plan, *flags])
    train(NUM_PROCESSES, flags, folder / COLOCATED)
    short = replace(case, workload=replace(case.workload, num_steps=SEPARATE_STEPS))
    flags = flags_of(short, checkpoint, folder / SEPARATE, SEED)
    train(NUM_PROCESSES, [*flags, *apart(1)], folder / SEPARATE)


def read_inputs(case: Case, folder: Path) -> Inputs:
    """Read what `measure` has written."""
    run = read_run(folder / COLOCATED)
    sizes = case.workload
    responses = read_responses(folder / COLOCATED / "rollouts.jsonl")
    workload = Workload(
        groups_per_step=sizes.num_prompts_per_step,
        samples_per_group=sizes.num_samples_per_prompt,
        prompt_tokens=run.prompt_tokens,
        lengths=ResponseLengths(sizes.max_response_tokens, recorded=responses),
        tool_seconds=TOOL_SECONDS,
        reward_seconds=run.reward_seconds,
    )
    engine = read_engine_speed(folder / "speed.json")
    apart = read_run(folder / SEPARATE, is_separate=True)
    return Inputs(
        workload,
        Speeds(engine, run.train_rate, run.other_seconds),
        Speeds(engine, apart.train_rate, apart.other_seconds),
        run.switch_seconds,
        apart.switch_seconds,
    )


def simulated(case: Case, way: str, inputs: Inputs) -> Run:
    """Simulate the steps that count of the case's runs; the mean of several seeds."""
    candidate = Candidate(
        {COLOCATED: simulation.COLOCATED, PARTIAL: simulation.PARTIAL}.get(
            way, simulation.SEPARATE
        ),
        num_ranks=NUM_PROCESSES,
        num_trainers=1 if way in STALENESS else NUM_PROCESSES,
        num_engines=1 if way in STALENESS else NUM_PROCESSES,
        most_running=MOST_RUNNING,
        hand_over_seconds=inputs.transfer_seconds if way in STALENESS else inputs.switch_seconds,
        max_staleness=STALENESS.get(way, 0),
    )
    found = [
        simulate(
            candidate,
            replace(inputs.workload, seed=seed),
            inputs.separate_speeds if way in STALENESS else inputs.speeds,
            warm_up_steps=WARM_UP,
            steps=case.workload.num_steps - WARM_UP,
        )
        for seed in range(SIMULATED_SEEDS)
    ]

    def mean(name: str) -> float:
        return statistics.fmean(getattr(each, name) for each in found)

    seconds = mean("step_seconds")
    return Run(
        samples_per_second=case.workload.samples_per_step / seconds / NUM_PROCESSES,
        tokens_per_second=mean("tokens_per_second"),
        step_seconds=seconds,
        idle_trainers=mean("trainer_idle") if way in STALENESS else 0.0,
        idle_engines=mean("engine_idle") if way in STALENESS else 0.0,
        staleness=mean("staleness_mean"),
        staleness_max=max(each.staleness_max for each in found),
    )
