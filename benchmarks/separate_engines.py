"""Samples per second of engines on ranks of their own and of engines on the actor's ranks.

    python benchmarks/separate_engines.py [--record] [--repeat 3] [--cases tools,even,tails]
        [--keep FOLDER]

Half an hour on 2 cores. All ways have two processes: two that train and sample in turn, or one of
each.

--keep leaves the run directories in FOLDER/CASE/WAY/SEED. Runs that FOLDER holds already are read
and not repeated.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import records  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.pages import fact_list, paired_ratio, section, verdict_table  # noqa: E402
from benchmarks.processes import ENVIRONMENT, alternating, in_a_process  # noqa: E402
from benchmarks.separate_cases import (  # noqa: E402
    CASES,
    COLOCATED,
    TAILS,
    WARM_UP,
    Run,
    kept_run,
    mean_of,
    read_options,
    run,
)
from benchmarks.step_time_task import checkpoint_of  # noqa: E402

SECTION = "separate_engines"
COMMIT = "commit"  # the file with that of a case's kept runs
# Each published ratio is of another model, task and cluster.
PUBLISHED = """\
Theirs, on GPUs and other tasks: verl's fully asynchronous trainer 2.35x to 2.67x of colocated
(Qwen2.5-7B, 128 GPUs, its documentation); AReaL's documentation calls the synchronous setting
typically 2x slower."""


def main(tokens: Sequence[str] | None = None) -> int:
    options, names = read_options(tokens, __doc__, repeat=3)
    os.environ.update(ENVIRONMENT)
    started = time.monotonic()
    facts = facts_of_run("separate_engines.py", tokens, ())
    checkpoint = in_a_process(checkpoint_of, TAILS)
    runs: dict[str, dict[str, list[Run]]] = {}
    with tempfile.TemporaryDirectory(prefix="mcore_rl_separate_engines_") as temporary:
        folder = options.keep or Path(temporary)
        commits: dict[str, list[str]] = {}
        for name in names:
            case = CASES[name]
            commits.setdefault(_commit_of(folder / name / COMMIT, facts["commit"]), []).append(name)
            runs[name] = {way: [] for way in case.ways}
            for number in range(options.repeat):
                for way in alternating(case.ways, number):
                    run_dir = folder / name / way.replace(" ", "_") / str(number + 1)
                    found = kept_run(case, run_dir)
                    if found is None:
                        found = run(case, way, checkpoint, run_dir, number + 1)
                    print(f"{name}, {way}: {found}", flush=True)
                    runs[name][way].append(found)
    if commits.keys() != {facts["commit"]}:
        measured = [f"{commit} ({', '.join(some)})" for commit, some in commits.items()]
        facts["commit"] = ", ".join(measured)
    facts["time"] = f"{(time.monotonic() - started) / 60:.0f} minutes in all"
    records.report(SECTION, part_of, facts, to=options.record, runs=runs)
    return 0


def _commit_of(file: Path, commit: str) -> str:
    """Return the commit that the kept runs beside `file` were measured on; without any, this one,
    which is written."""
    if not file.exists():
        file.parent.mkdir(parents=True)
        file.write_text(commit)
    return file.read_text()


def ratios_of(found: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Return the samples per second of each way over those of colocated engines, in one run."""
    pace = {way: [each.samples_per_second for each in some] for way, some in found.items()}
    return {way: paired_ratio(pace[way], pace[COLOCATED]) for way in pace}


def part_of(record: records.Record) -> str:
    """Return the section of a record."""
    runs = {
        case: {way: [Run(**run) for run in some] for way, some in found.items()}
        for case, found in record["runs"].items()
    }
    return section_of(runs, record["facts"])


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
            mean = mean_of(some)
            lines.append(
                f"| {name} | {way} | {mean.samples_per_second:.2f} | {ratios[way]:.2f}x | "
                f"{mean.step_seconds:.2f} | {mean.idle_trainers:.0%} | "
                f"{mean.idle_engines:.0%} | {mean.staleness:.2f} "
                f"({mean.staleness_max:.0f}) |"
            )
    return section(SECTION, lines)


_INTRODUCTION = f"""\
Generated by `benchmarks/separate_engines.py`, with the tiny checkpoint on two processes without a
GPU: both train and sample in turn, or one trains and one samples. `tools`: conversations with a
tool of one second, whose number of calls is log-normal (median 2, at most 6; nearly every step has
a sample with 6, so that the steps of a run differ little). `tails`: responses of geometric length,
a mean of {TAILS.mean_response_tokens:g} tokens, cut at {TAILS.max_response_tokens}. `even`:
responses of at most 8 tokens. Samples per second are divided by the number of processes, and the
first {WARM_UP} steps are not counted. Ways take turns."""


if __name__ == "__main__":
    sys.exit(main())
