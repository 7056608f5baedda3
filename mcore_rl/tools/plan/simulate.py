"""`mcore-rl plan --simulate`: flags and files to the simulation's inputs."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.common.errors import UsageError, as_flag
from mcore_rl.planner.comparison import Comparison, compare, planned_speeds
from mcore_rl.planner.layouts import with_engines_apart
from mcore_rl.planner.links import traffic_of
from mcore_rl.planner.memory import Memory, adapters_of, memory_of, placement_of, resident_of
from mcore_rl.planner.phases import Case
from mcore_rl.planner.plan import Outcome
from mcore_rl.planner.settings import GB
from mcore_rl.planner.simulated_workload import ResponseLengths, Workload
from mcore_rl.planner.simulation import COLOCATED, PARTIAL, SEPARATE, Candidate, Speeds
from mcore_rl.tools.plan.recorded import RecordedRun, read_engine_speed, read_responses, read_run

if TYPE_CHECKING:
    from mcore_rl.config import RLConfig
    from mcore_rl.tools.plan.command_line import PlanRequest

STALENESS = (0, 1, 2, 4)
_MOST_SHARE = 0.9  # of a device, for engines on ranks of their own
_SPLITS = 8  # shares of the ranks that are tried, in eighths
_SIGMA = 0.8

MAY_BE_0 = (
    *("length_sigma", "tool_seconds", "environment_seconds", "reward_seconds"),
    *("switch_seconds", "transfer_seconds"),
)
_NEEDS_SIMULATE = (
    *("lengths", "length_mean", "prompt_mean", "turns", "engine_speed"),
    *("train_tokens_per_second", "from_run", "from_separate_run", *MAY_BE_0),
)


def add_simulation_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of --simulate and --measure-engine."""
    add = parser.add_argument
    add("--simulate", action="store_true", help="compare colocated engines, partial rollouts and "
        "engines on ranks of their own")  # fmt: skip
    add("--lengths", metavar="FILE", help="with --simulate, the rollouts.jsonl of a run, for the "
        "lengths of responses")  # fmt: skip
    add("--length-mean", type=float, help="or their mean, in tokens; default: a quarter of "
        "--rl-max-response-tokens")  # fmt: skip
    add("--length-sigma", type=float, help="standard deviation of the logarithm of lengths; "
        f"default: {_SIGMA}")  # fmt: skip
    add("--prompt-mean", type=float, help="mean tokens of a prompt; default: that of "
        "--from-run, or half of --rl-max-prompt-tokens")  # fmt: skip
    add("--turns", type=int, help="parts of a response, with a tool between two; default: those of "
        "--lengths or --from-run, else 1")  # fmt: skip
    add("--tool-seconds", type=float, help="of a tool's answer; default: 0")
    add("--environment-seconds", type=float, help="until the environment of a response has "
        "started; default: 0")  # fmt: skip
    add("--reward-seconds", type=float, help="of a response's reward; default: 0")
    add("--engine-speed", metavar="FILE", help="written by --measure-engine; default: by formula")
    add("--train-tokens-per-second", type=float, help="of a rank, log-probs included; default: by "
        "formula, or that of --from-run")  # fmt: skip
    add("--from-run", metavar="DIR", help="directory of a colocated run, for what is not given: "
        "lengths, training, rewards, switches")  # fmt: skip
    add("--from-separate-run", metavar="DIR", help="directory of a run with --rl-rollout-ranks, "
        "for training and hand-overs of separate ranks")  # fmt: skip
    add("--switch-seconds", type=float, help="both switches of a colocated step; default: the "
        "planned hand-over")  # fmt: skip
    add("--transfer-seconds", type=float, help="of a hand-over between separate ranks; default: as "
        "planned")  # fmt: skip
    add("--measure-engine", metavar="FILE", help="start the job's engine here, measure it, write "
        "its speed, and do nothing else; for several ranks under mcore_rl.launch")  # fmt: skip


def check_simulation_flags(options: argparse.Namespace) -> None:
    """Refuse flags that have no effect, or exclude each other."""
    given = {name: getattr(options, name) for name in _NEEDS_SIMULATE}
    for name, value in given.items():
        if value is not None and not options.simulate:
            raise UsageError(
                "has no effect without --simulate",
                flag=as_flag(name, value),
                remedy="add that, or drop it",
            )
    if options.lengths is not None and options.length_mean is not None:
        raise UsageError(
            f"excludes --length-mean {options.length_mean:g}",
            flag=f"--lengths {options.lengths}",
            remedy="drop one of the two",
        )


def simulate_job(
    request: PlanRequest, options: argparse.Namespace, outcome: Outcome
) -> tuple[Comparison, list[str]]:
    """Return the simulated ways to run the job, and notes on what was assumed. Raises
    UsageError."""
    case = request.case
    notes = list(request.not_simulated)
    run = None if options.from_run is None else read_run(Path(options.from_run))
    apart = options.from_separate_run
    apart = None if apart is None else read_run(Path(apart), is_separate=True)
    lengths = _lengths(options, run, case.engine.max_response_tokens, notes)
    longest_prompt = case.engine.max_model_tokens - case.engine.max_response_tokens
    workload = Workload(
        groups_per_step=request.prompts_per_step,
        samples_per_group=round(request.step.samples / request.prompts_per_step),
        prompt_tokens=_first(options.prompt_mean, run and run.prompt_tokens, longest_prompt / 2),
        lengths=lengths,
        tool_seconds=options.tool_seconds or 0.0,
        environment_seconds=options.environment_seconds or 0.0,
        reward_seconds=_first(options.reward_seconds, run and run.reward_seconds, 0.0),
    )
    mean = lengths.mean_tokens
    speeds = planned_speeds(case, outcome.memory, request.step, workload.prompt_tokens + mean / 2)
    if options.engine_speed is None:
        notes.append("the engine's speed is by formula: measure it by --measure-engine")
    else:
        speeds = replace(speeds, engine=read_engine_speed(Path(options.engine_speed)))
    rate = _first(options.train_tokens_per_second, run and run.train_rate, None)
    if rate is None:
        others = ", without critic and teachers" if case.critic or case.teachers else ""
        notes.append(f"the speed of training is by formula{others}: give --from-run, or measure it")
    else:
        speeds = replace(speeds, train_rate=rate)
    if run is not None:
        speeds = replace(speeds, other_seconds=run.other_seconds)
    switch = _first(options.switch_seconds, run and run.switch_seconds, outcome.seconds)
    transfer = _first(options.transfer_seconds, apart and apart.switch_seconds)
    candidates, left_out = _candidates(case, outcome.memory, workload, switch, transfer, mean)
    separate = speeds
    if apart is not None:
        separate = Speeds(speeds.engine, apart.train_rate, apart.other_seconds)
        if apart.max_staleness:
            notes.append(
                "the seconds of --from-separate-run contain waits for engines that sample, which "
                "the simulation adds: give a run with --rl-max-staleness 0"
            )
    return (
        compare(candidates, workload, speeds, separate_speeds=separate, left_out=left_out),
        notes,
    )


def _first(*values: Any) -> Any:
    """Return the first value that is not None; None if there is none."""
    return next((value for value in values if value is not None), None)


def _candidates(
    case: Case,
    memory: Memory,
    workload: Workload,
    switch_seconds: float,
    transfer_seconds: float | None,
    mean_tokens: float,
) -> tuple[list[Candidate], list[str]]:
    """Return all ways that fit, and a line for each that does not."""
    world, rollout = case.train.world_size, case.rollout
    sequence = workload.prompt_tokens + mean_tokens
    candidates, left_out = [], []
    if lacks := _lacks(case, memory):
        left_out.append(f"colocated, partial rollouts: {lacks}")
    else:
        running = _most_running(case, memory, sequence)
        candidates += [
            Candidate(
                PARTIAL if max_staleness else COLOCATED,
                num_ranks=world,
                num_trainers=world,
                num_engines=rollout.num_tp_groups,
                most_running=running,
                hand_over_seconds=switch_seconds,
                max_staleness=max_staleness,
            )
            for max_staleness in STALENESS
        ]
    possible, impossible = splits(case)
    left_out += impossible
    for other in possible:
        other, planned = with_useful_share(other)
        num_trainers = other.train.world_size
        if lacks := _lacks(other, planned):
            left_out.append(f"{num_trainers} + {world - num_trainers}: {lacks}")
            continue
        if transfer_seconds is None:  # takes seconds to plan, and splits hardly differ in it
            moved = adapters_of(other) or placement_of(other)
            traffic = traffic_of(moved, (), other.machine, is_separate=True)
            transfer_seconds = traffic.seconds(other.machine)
        candidates += [
            Candidate(
                SEPARATE,
                num_ranks=world,
                num_trainers=num_trainers,
                num_engines=other.rollout.num_tp_groups,
                most_running=_most_running(other, planned, sequence),
                hand_over_seconds=transfer_seconds,
                max_staleness=max_staleness,
                memory_share=other.engine.gpu_memory_utilization,
            )
            for max_staleness in STALENESS
        ]
    return candidates, left_out


def with_useful_share(case: Case) -> tuple[Case, Memory]:
    """Return a case with engines on ranks of their own that take as much of a device as fits, and
    its memory."""
    memory = memory_of(case, resident_of(case))
    useful = math.floor(min(memory.kv_cache.useful_utilization, _MOST_SHARE) * 100) / 100
    engine = replace(case.engine, gpu_memory_utilization=max(0.01, useful))
    case = replace(case, engine=engine)
    return case, memory_of(case, resident_of(case))


def splits(case: Case) -> tuple[list[Case], list[str]]:
    """Return the case with engines on about 1/8, 2/8, ... 7/8 of the ranks, where both sides divide
    into their layouts, and a line for each of these shares of which the nearest whole engines are
    not such a split."""
    world, size = case.train.world_size, case.rollout.slots_per_engine
    possible: dict[int, Case] = {}
    impossible: dict[int, str] = {}
    for count in range(size, world, size):
        try:
            possible[count] = with_engines_apart(case, count)
        except UsageError as error:
            impossible[count] = f"{world - count} + {count}: {error.fault}"
    wanted = [world * part / _SPLITS for part in range(1, _SPLITS)]

    def nearest(counts: Collection[int]) -> set[int]:
        return (
            {min(counts, key=lambda count: abs(count - at)) for at in wanted} if counts else set()
        )

    chosen, asked = nearest(possible), nearest({**possible, **impossible})
    left_out = [impossible[count] for count in sorted(asked & impossible.keys())]
    return [possible[count] for count in sorted(chosen)], left_out


def not_simulated(config: RLConfig) -> Iterator[str]:
    """Yield what a job does that its simulation ignores."""
    recipe, num_samples = config.recipe, config.recipe.num_samples_per_prompt
    if recipe.needs_greedy_baseline:
        yield (
            f"the greedy response to each prompt of --rl-advantage {recipe.advantage} is not "
            f"simulated: engines sample {num_samples + 1} responses to a prompt, not {num_samples}"
        )
    if recipe.replaces_groups:
        flag = "--rl-dynamic-sampling" if recipe.dynamic_sampling else "--rl-group-filter"
        yield f"{flag} is not simulated: engines also sample the groups that are replaced"
    if config.data.eval_prompts is not None and config.evaluation.eval_interval:
        yield "evaluations are not simulated"
    if config.environments.environment is not None:
        most = config.environments.max_environments
        yield f"--rl-max-environments {most} is not simulated: any number of environments runs"


def _most_running(case: Case, memory: Memory, sequence_tokens: float) -> int:
    """Return how many sequences of average length an engine's TP group can run at once."""
    fitting = int(memory.kv_cache.tokens / sequence_tokens)
    return max(1, min(case.engine.max_num_seqs, fitting))


def _lacks(case: Case, memory: Memory) -> str:
    """Return what does not fit; empty if all does."""
    for phase in memory.phases:
        if phase.lacking_bytes:
            return f"phase {phase.name} lacks {phase.lacking_bytes / GB:.2f} GB"
    lacking = memory.host_total_bytes - case.machine.host_bytes
    return f"host memory lacks {lacking / GB:.2f} GB" if lacking > 0 else ""


def _lengths(
    options: argparse.Namespace, run: RecordedRun | None, most: int, notes: list[str]
) -> ResponseLengths:
    sigma = _SIGMA if options.length_sigma is None else options.length_sigma
    turns = options.turns
    if options.lengths is not None:
        return ResponseLengths(most, recorded=read_responses(Path(options.lengths), turns))
    if options.length_mean is not None:
        return ResponseLengths(most, options.length_mean, sigma, turns or 1)
    if run is not None:
        with contextlib.suppress(UsageError):  # written by an earlier version
            recorded = read_responses(run.folder / "rollouts.jsonl", turns)
            return ResponseLengths(most, recorded=recorded)
        return ResponseLengths(most, run.mean_tokens, sigma, turns or 1)
    notes.append(
        f"lengths are assumed as log-normal with mean {most / 4:g} and sigma {sigma:g}: give "
        "--lengths, or --length-mean and --length-sigma"
    )
    return ResponseLengths(most, most / 4, sigma, turns or 1)
