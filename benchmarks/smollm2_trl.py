"""What SmolLM2-135M-Instruct learns with TRL and with mcore_rl, over samples and over minutes.

    python benchmarks/smollm2_trl.py --seeds 1 2 3 4 5   # runs of TRL, 11 minutes each, then draws
    python benchmarks/smollm2_trl.py                     # draws again, from the records alone

Needs the `bench` extra. Our runs are those of `smollm2.py`: the same model, prompts, reward, group
size, lengths and learning rate, by the defaults. TRL has its best settings (`step_time.TRL_BEST`).
The accuracy of a step is the share of right samples among those that it trains on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import records, smollm2  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.pages import fact_list, section, verdict_table, write_section  # noqa: E402
from benchmarks.records import Record, series  # noqa: E402
from benchmarks.step_time import TRL_BEST, trl  # noqa: E402
from benchmarks.step_time_task import WORKLOADS, checkpoint_of  # noqa: E402

RECORD = "smollm2_trl"
NUM_STEPS, WINDOW = 10, 2  # of TRL's runs; steps of a row of the table
NEEDED_RATIO = 3.0
_WORKLOAD = next(workload for workload in WORKLOADS if workload.is_published)

Curve = list[float]  # a value per step


def recorded(seed: int) -> dict[str, Any]:
    """Run TRL with a seed; return the rewards and seconds of its steps."""
    precision, *way = TRL_BEST
    with tempfile.TemporaryDirectory() as folder:
        run = trl(
            _WORKLOAD,
            checkpoint_of(_WORKLOAD),
            precision,
            [*way, "--steps", str(NUM_STEPS)],
            seed,
            Path(folder) / "trained",
        )
    kept = ("rewards", "step_seconds", "response_tokens")
    return {"seed": seed} | {name: [round(value, 4) for value in run[name]] for name in kept}


def page(ours: Record, theirs: Record) -> list[str]:
    """Return the section of benchmarks/RESULTS.md."""
    our_runs = [series(run, "reward")[1] for run in ours["runs"]]
    their_runs = [run["rewards"] for run in theirs["runs"]]
    our_seconds = _fastest([series(run, "seconds")[1] for run in ours["runs"]])
    their_seconds = _fastest([run["step_seconds"] for run in theirs["runs"]])
    lines = [
        "# What SmolLM2-135M-Instruct learns, beside TRL",
        "",
        f"Drawn by `benchmarks/smollm2_trl.py` from `benchmarks/records/{RECORD}.json` and",
        f"`benchmarks/records/{smollm2.RECORD}.json`. Share of right samples, means of {WINDOW}",
        "steps over seeds, with their standard deviations. Minutes are sums of each step's fastest",
        "seed, as other work ran beside some; of mcore_rl with the start and the first evaluation.",
        "",
        *fact_list(theirs["facts"]),
        f"- seeds: {len(our_runs)} of mcore_rl, {len(their_runs)} of TRL",
        "",
        "| samples | mcore_rl | min | TRL | min |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for end in range(WINDOW, NUM_STEPS + 1, WINDOW):
        cells = []
        for runs, seconds in ((our_runs, our_seconds), (their_runs, their_seconds)):
            mean, deviation = _window(runs, end)
            cells.append(f"{mean:.3f} ± {deviation:.3f} | {sum(seconds[:end]) / 60:.1f}")
        lines.append(f"| {end * _WORKLOAD.samples_per_step:,} | {' | '.join(cells)} |")
    return [*lines, "", *verdict_table(_verdicts(our_runs, their_runs, our_seconds, their_seconds))]


def _verdicts(
    ours: Sequence[Curve], theirs: Sequence[Curve], our_seconds: Curve, their_seconds: Curve
) -> list[tuple[str, str, bool]]:
    (mean, deviation), (other, other_deviation) = (
        _window(ours, NUM_STEPS),
        _window(theirs, NUM_STEPS),
    )
    error = (deviation**2 / len(ours) + other_deviation**2 / len(theirs)) ** 0.5
    difference = f"{mean - other:+.3f} with a standard error of {error:.3f}"
    # Minutes until the accuracy that TRL has in its last steps.
    num_steps = len(ours[0])
    ends = range(WINDOW, num_steps + 1)
    reached = next((end for end in ends if _window(ours, end)[0] >= other), None)
    verdicts = [
        ("accuracy over samples: no lower than TRL's", difference, mean > other - 2 * error)
    ]
    what = f"accuracy over minutes: {NEEDED_RATIO:g}x"
    if reached is None:
        return [*verdicts, (what, f"{other:.3f} is not reached in {num_steps} steps", False)]
    minutes = list(accumulate(our_seconds))[reached - 1] / 60
    their_minutes = sum(their_seconds) / 60
    ratio = their_minutes / minutes
    shown = f"{other:.3f} after {minutes:.1f} and {their_minutes:.1f} min: {ratio:.1f}x"
    return [*verdicts, (what, shown, ratio >= NEEDED_RATIO)]


def _window(runs: Sequence[Curve], end: int) -> tuple[float, float]:
    """Return mean and standard deviation over runs of the `WINDOW` steps before `end`."""
    means = [statistics.fmean(run[end - WINDOW : end]) for run in runs]
    return statistics.fmean(means), statistics.stdev(means) if len(means) > 1 else 0.0


def _fastest(runs: Sequence[Curve]) -> Curve:
    return [min(values) for values in zip(*runs, strict=True)]


def draw(ours: Record, theirs: Record) -> None:
    write_section(records.RESULTS, RECORD, section(RECORD, page(ours, theirs)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", help="run these; default: only draw")
    options = parser.parse_args(arguments)
    if options.seeds:
        facts = facts_of_run("smollm2_trl.py", arguments, ("trl",))
        runs = []
        for seed in options.seeds:  # written after each, as they take an hour
            runs.append(recorded(seed))
            records.write(RECORD, facts, runs=runs)
    draw(records.read(smollm2.RECORD), records.read(RECORD))
    return 0


if __name__ == "__main__":
    sys.exit(main())
