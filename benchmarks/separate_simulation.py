"""`mcore-rl plan --simulate` beside runs, whose computations take steady times (`paced.py`).

    python benchmarks/separate_simulation.py [--record] [--repeat 1] [--cases tools,even]
        [--keep FOLDER]

An hour on 2 cores. Cases and ways are those of `separate_engines.py`. What the simulation is given
is measured in other runs than those that it predicts, by a user's means: the engine by
`mcore-rl plan --measure-engine`; responses, training and switches in a colocated run; training and
hand-overs of separate ranks in a short run with --rl-max-staleness 0, in which trainers do not wait
for engines that sample.

--keep leaves the run directories in FOLDER/CASE/WAY/SEED. Runs that FOLDER holds already are read
and not repeated.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import paced, records  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.pages import fact_list, section  # noqa: E402
from benchmarks.processes import ENVIRONMENT, in_a_process, run_python, train  # noqa: E402
from benchmarks.separate_cases import (  # noqa: E402
    CASES,
    COLOCATED,
    NUM_PROCESSES,
    PARTIAL,
    PARTIAL_STALENESS,
    STALENESS,
    TAILS,
    WARM_UP,
    Case,
    Run,
    apart,
    flags_of,
    kept_run,
    mean_of,
    read_options,
    run,
)
from benchmarks.step_time_task import checkpoint_of  # noqa: E402
from mcore_rl.planner import simulation  # noqa: E402
from mcore_rl.planner.simulated_workload import ResponseLengths, Workload  # noqa: E402
from mcore_rl.planner.simulation import Candidate, Speeds, simulate  # noqa: E402
from mcore_rl.tools.plan.recorded import (  # noqa: E402
    read_engine_speed,
    read_responses,
    read_run,
)

SECTION = "separate_simulation"
NUM_STEPS = {"tools": 27, "tails": 34, "even": 32}
PACES = "paces"  # the folder of files that `paced` writes
SEPARATE = "separate"
INPUTS, SPEED = "inputs", "speed.json"  # the folder of what is measured for the simulation
SEED = 100  # of the runs that are measured for the simulation
SIMULATED_SEEDS = 10
SEPARATE_STEPS = 8
MOST_RUNNING = 128  # the default of --rl-rollout-max-num-seqs
AIM = 0.1  # relative errors, errors of idle shares, and absolute ones of a small staleness
MOST_LATE, MOST_RUNS = 0.06, 3
_SMALL_STALENESS = 0.5  # below, the absolute error counts


def main(tokens: Sequence[str] | None = None) -> int:
    options, names = read_options(tokens, __doc__, repeat=1)
    os.environ.update(ENVIRONMENT)
    started = time.monotonic()
    facts = facts_of_run("separate_simulation.py", tokens, ())
    checkpoint = in_a_process(checkpoint_of, TAILS)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="mcore_rl_separate_simulation_") as temporary:
        for name in names:
            rows += rows_of(
                name, checkpoint, (options.keep or Path(temporary)) / name, options.repeat
            )
    facts["time"] = f"{(time.monotonic() - started) / 60:.0f} minutes in all"
    records.report(SECTION, part_of, facts, to=options.record, rows=rows)
    return 0


def part_of(record: records.Record) -> str:
    """Return the section of a record."""
    rows = [
        Row(**(row | {name: Run(**row[name]) for name in ("measured", "simulated")}))
        for row in record["rows"]
    ]
    facts = fact_list(record["facts"])
    lines = ["# Simulated and measured runs", "", _INTRODUCTION, "", *facts, ""]
    return section(SECTION, [*lines, *comparison(rows)])


def rows_of(name: str, checkpoint: Path, folder: Path, repeat: int) -> list[Row]:
    """Run and simulate all ways of a case."""
    case = paced_case(CASES[name])
    measure(case, checkpoint, folder / INPUTS)
    inputs = read_inputs(case, folder / INPUTS)
    rows = []
    for way in case.ways:
        found, late = [], []
        for seed in range(1, repeat + 1):
            run_dir = folder / way.replace(" ", "_") / str(seed)
            measured, late_share = paced_run(case, way, checkpoint, run_dir, seed)
            print(f"{name}, {way}: {measured}, late {late_share:.1%}", flush=True)
            found.append(measured)
            late.append(late_share)
        rows.append(Row(name, way, mean_of(found), simulated(case, way, inputs), max(late)))
    return rows


def paced_run(
    case: Case, way: str, checkpoint: Path, run_dir: Path, seed: int
) -> tuple[Run, float]:
    """Run a case, unless it is kept; return also the share of the time by which computations took
    longer than given. A run with too large a share is repeated."""
    pace = run_dir.parent / PACES / str(seed)
    for _ in range(MOST_RUNS):
        measured = kept_run(case, run_dir)
        if measured is None:
            environment = {paced.FOLDER: str(pace)}
            measured = run(case, way, checkpoint, run_dir, seed, **environment)
        late = paced.seconds_late(pace) / (case.workload.num_steps * measured.step_seconds)
        if late <= MOST_LATE:
            return measured, late
        print(f"repeated, as computations took {late:.0%} longer than given", flush=True)
        shutil.rmtree(run_dir)
    raise RuntimeError("the machine is too busy: computations take longer than given in each run")


def paced_case(case: Case) -> Case:
    """Return the case with steady seconds, and fewer steps."""
    workload = replace(case.workload, num_steps=NUM_STEPS[case.workload.name])
    flags = (*case.flags, "--rl-import", str(Path(paced.__file__).relative_to(ROOT)))
    return replace(case, workload=workload, flags=flags)


@dataclass(frozen=True, slots=True)
class Row:
    """A way to run a case, measured and simulated."""

    case: str
    way: str
    measured: Run
    simulated: Run
    late: float = 0.0  # share of the measured time by which computations took longer than given

    def speed(self, run: Run) -> float:
        """Tokens per second; with tools, whose seconds do not depend on tokens, samples."""
        if has_tools(CASES[self.case]):
            return NUM_PROCESSES * run.samples_per_second
        return run.tokens_per_second

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


def has_tools(case: Case) -> bool:
    return "--rl-environment" in case.flags


def comparison(rows: Sequence[Row]) -> list[str]:
    """Return a table of the rows, measured / simulated, and how many numbers miss the aim."""
    lines = [
        "| case | way | tokens or samples/s | error | trainers idle | engines idle | versions | "
        "late |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
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
        shown.append(f"{row.late:.1%}")
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
    """Measure what the simulation needs, into `folder`, unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    pace = {paced.FOLDER: str(folder / PACES)}
    flags = flags_of(case, checkpoint, folder / COLOCATED, SEED)
    if not (folder / SPEED).exists():
        launch = ["-m", "mcore_rl.launch", "--nproc-per-node", str(NUM_PROCESSES)]
        plan = ["-m", "mcore_rl.cli", "plan", "--measure-engine", str(folder / SPEED)]
        run_python([*launch, *plan, *flags], **pace)
    if kept_run(case, folder / COLOCATED) is None:
        train(NUM_PROCESSES, flags, folder / COLOCATED, **pace)
    short = replace(case, workload=replace(case.workload, num_steps=SEPARATE_STEPS))
    if kept_run(short, folder / SEPARATE) is None:
        flags = flags_of(short, checkpoint, folder / SEPARATE, SEED)
        train(NUM_PROCESSES, [*flags, *apart(0)], folder / SEPARATE, **pace)


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
        tool_seconds=paced.TOOL if has_tools(case) else 0.0,
        environment_seconds=paced.ENVIRONMENT_START if has_tools(case) else 0.0,
        reward_seconds=run.reward_seconds,
    )
    engine = read_engine_speed(folder / SPEED)
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
        max_staleness=PARTIAL_STALENESS if way == PARTIAL else STALENESS.get(way, 0),
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


_INTRODUCTION = f"""\
Generated by `benchmarks/separate_simulation.py`, with the cases and ways of `separate_engines.py`:
two processes train and sample in turn, or one trains and one samples. `benchmarks/paced.py` gives
computations a least time, about twice what this machine needs, so that its speed, which changes,
hardly matters: an engine's step {paced.STEP * 1000:g} ms, {paced.PER_SEQUENCE * 1000:g} ms more for
each sequence and {paced.PER_PREFILL_TOKEN * 1000:g} ms for each token of a prefill; an update
{paced.UPDATE:g} s and {paced.PER_TRAINED_TOKEN * 1000:g} ms for each of a rank's tokens; a
hand-over {paced.HAND_OVER:g} s; an environment's start {paced.ENVIRONMENT_START:g} s and a tool's
answer {paced.TOOL:g} s. All else is the product. `late` is the share of a run's time by which
computations took longer nevertheless; runs with more than {MOST_LATE:.0%} are repeated. The
simulation's inputs are measured in other runs, with another seed: the engine by `--measure-engine`;
responses, training and switches in a colocated run (`--from-run`); training and hand-overs of
separate ranks in {SEPARATE_STEPS} steps with K=0 (`--from-separate-run`). The first {WARM_UP} steps
do not count; the others are simulated with {SIMULATED_SEEDS} seeds. The aim is a relative error of
10 % for speed, 10 percentage points for idle shares, and for staleness 10 % (or 0.1 versions where
the mean is below 0.5). Speed is in tokens per second, as lengths differ between runs, but with
tools, whose seconds do not depend on tokens, in samples per second."""


if __name__ == "__main__":
    sys.exit(main())
