"""Accuracy of partial and whole rollouts after a hundred steps with long-tailed lengths.

    python benchmarks/partial_accuracy.py [--markdown FILE] [--steps 100] [--seeds 2]

Half an hour on 2 cores. --markdown replaces this benchmark's section of FILE.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.pages import fact_list, section, verdict_table, write_section  # noqa: E402
from benchmarks.processes import ENVIRONMENT, alternating, in_a_process, train  # noqa: E402
from benchmarks.step_time_task import Teaching, Workload, checkpoint_of  # noqa: E402

# The mean of an answer with its tail is 20 tokens; one in a hundred reaches the limit or nearly.
WORKLOAD = Workload(
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
WHOLE, PARTIAL = "whole", "partial"
WAYS = {WHOLE: (), PARTIAL: ("--rl-partial-rollouts",)}
SECTION = "partial_accuracy"


@dataclass(frozen=True, slots=True)
class Run:
    """Measurements of a run."""

    accuracies: list[float]  # greedy, held-out: before, at each quarter, and after
    reward: float  # of samples, in the last quarter
    step_seconds: float
    rollout_seconds: float
    response_tokens: float
    staleness: float  # in the mean, of samples
    staleness_max: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of rollout, since mean lengths drift at random."""
        return self.response_tokens * WORKLOAD.samples_per_step / self.rollout_seconds


def main(tokens: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the section there")
    parser.add_argument("--steps", type=int, default=WORKLOAD.num_steps, help="a multiple of 4")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each way, in turns")
    options = parser.parse_args(tokens)
    if options.steps < 4 or options.steps % 4:
        parser.error(f"--steps {options.steps} must be a multiple of 4; choose for example 100")
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds} must be at least 1; raise it")
    os.environ.update(ENVIRONMENT)
    started = time.monotonic()
    facts = facts_of_run("partial_accuracy.py", tokens, ())
    checkpoint = in_a_process(checkpoint_of, WORKLOAD)
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="mcore_rl_partial_accuracy_") as folder:
        for number in range(options.seeds):
            for way in alternating(WAYS, number):
                found = run(way, checkpoint, Path(folder) / "run", number + 1, options.steps)
                print(f"{way}: {found}", flush=True)
                runs[way].append(found)
    facts["time"] = f"{(time.monotonic() - started) / 60:.0f} minutes in all"
    part = section_of(runs, facts, options.steps)
    print(part)
    write_section(options.markdown, SECTION, part)
    return 0


def run(way: str, checkpoint: Path, run_dir: Path, seed: int, num_steps: int) -> Run:
    """Run on two processes, data parallel, with two engines."""
    prompts = checkpoint / "prompts"
    flags = WORKLOAD.flags(checkpoint, run_dir, precision="fp32", seed=seed)
    flags += (
        f"--rl-prompts {prompts}/train.jsonl --rl-eval-prompts {prompts}/heldout.jsonl "
        f"--rl-num-eval-prompts {WORKLOAD.num_eval_prompts} "
        "--rl-reward benchmarks.step_time_task:reward "
        f"--rl-num-steps {num_steps} --rl-eval-interval {num_steps // 4} "
        "--rl-mismatch-correction token_tis "
        f"--rl-max-tokens-per-microbatch {WORKLOAD.packed_tokens}"
    ).split()
    lines = train(2, [*flags, *WAYS[way]], run_dir)
    shutil.rmtree(run_dir)
    return run_of(lines)


def run_of(lines: Sequence[Mapping[str, float]]) -> Run:
    """Return the measurements in the lines of metrics.jsonl."""
    steps = [line for line in lines if "time/step_seconds" in line]

    def mean(name: str, of: Sequence[Mapping[str, float]] = steps) -> float:
        return statistics.fmean(line.get(name, 0.0) for line in of)

    return Run(
        accuracies=[line["eval/accuracy"] for line in lines if "eval/accuracy" in line],
        reward=mean("reward/mean", steps[-len(steps) // 4 :]),
        # Medians: an evaluation is in one step of a quarter.
        step_seconds=statistics.median(line["time/step_seconds"] for line in steps),
        rollout_seconds=mean("time/rollout_seconds"),
        response_tokens=mean("response_tokens/mean"),
        staleness=mean("rollout/staleness_mean"),
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


def section_of(runs: Mapping[str, Sequence[Run]], facts: Mapping[str, str], num_steps: int) -> str:
    """Return the section of the page."""
    apart = statistics.fmean(r.accuracies[-1] for r in runs[PARTIAL]) - statistics.fmean(
        r.accuracies[-1] for r in runs[WHOLE]
    )
    noise = noise_of(runs)
    paces = {
        way: statistics.fmean(each.tokens_per_second for each in found)
        for way, found in runs.items()
    }
    verdict = (
        f"after {num_steps} steps the same accuracy within noise",
        f"{apart:+.3f}, noise {noise:.3f}",
        abs(apart) <= noise,
    )
    lines = ["# What is learned from partial rollouts", "", _INTRODUCTION, ""]
    lines += [*fact_list(facts), "", *verdict_table([verdict])]
    lines += [
        "",
        f"Tokens a second in rollout: {paces[PARTIAL] / paces[WHOLE]:.2f}x those of whole ones.",
        "",
        "| way | held-out accuracy, at each quarter | reward, last quarter | step s | rollout s | "
        "tokens a sample | tokens/s in rollout | versions behind, mean (max) |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for way, found in runs.items():
        for each in found:
            accuracies = ", ".join(f"{value:.3f}" for value in each.accuracies)
            lines.append(
                f"| {way} | {accuracies} | {each.reward:.3f} | {each.step_seconds:.2f} | "
                f"{each.rollout_seconds:.2f} | {each.response_tokens:.1f} | "
                f"{each.tokens_per_second:.0f} | {each.staleness:.2f} ({each.staleness_max:.0f}) |"
            )
    return section(SECTION, lines)


_INTRODUCTION = f"""\
Generated by `benchmarks/partial_accuracy.py`. The tiny checkpoint, taught to go on after its answer
with full stops, and to end after each of them with the same probability: lengths are geometric,
with a mean of {WORKLOAD.mean_response_tokens:g} tokens at first, cut at
{WORKLOAD.max_response_tokens}. GRPO on {WORKLOAD.num_prompts_per_step} x
{WORKLOAD.num_samples_per_prompt} samples a step, two engines, AdamW at {WORKLOAD.learning_rate:g},
`--rl-mismatch-correction token_tis` in both ways, which take turns. `partial`:
`--rl-partial-rollouts` as it is by default. Accuracy is greedy, on {WORKLOAD.num_eval_prompts}
held-out prompts, and both ways have learned from as many samples. Noise is two standard errors of
the difference, of prompts or of runs, whichever are more apart. The reward does not see the tail,
so that lengths drift at random in either way, and seconds are not to be compared."""


if __name__ == "__main__":
    sys.exit(main())
