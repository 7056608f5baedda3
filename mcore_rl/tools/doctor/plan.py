"""Batches, memory and traffic of a job with a valid layout, by the accounting and the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mcore_rl.batching.accounting import describe
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.config import RLConfig
from mcore_rl.job.facts import Facts
from mcore_rl.planner.advice import Problem
from mcore_rl.planner.checks import MOST_REMEDIES, host_needs
from mcore_rl.planner.host import HostPhase
from mcore_rl.planner.phases import ROLLOUT, START, UPDATE
from mcore_rl.planner.plan import Outcome, plan_case
from mcore_rl.planner.settings import GB
from mcore_rl.spec import LaidOut
from mcore_rl.tools.doctor.finding import BATCHES, PLAN, Finding, green, red, yellow
from mcore_rl.tools.plan.command_line import read_command_line
from mcore_rl.trainer.plan_inputs import has_slow_products

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device, and the source of the figure; None: there is no device."""

    total_bytes: int | None
    reserved_bytes: int
    source: str


def check_batches(facts: Facts) -> Iterator[Finding]:
    """Yield the lines that a start prints, for a job whose layout and batch are valid."""
    assert facts.config and facts.actor
    config = facts.config

    def divided(model: LaidOut) -> tuple[int, MicroBatching]:
        batching = config.micro_batching(
            model.shape, model.layout, model.values, interleaved=len(model.layers[0]) > 1
        )
        return model.layout.dp_size, batching

    critic = None if facts.critic is None else divided(facts.critic)
    for line in describe(config.accounting(actor=divided(facts.actor), critic=critic)):
        yield green(BATCHES, line)


def make_plan(
    tokens: Sequence[str], world_size: int, memory: DeviceMemory, host_bytes: int
) -> Outcome:
    """Return the plan of `mcore-rl plan` for the job's flags. Raises UsageError."""
    own = ["--world-size", str(world_size), "--host-memory-gb", str(host_bytes / GB)]
    if memory.total_bytes is not None:
        own += ["--gpu-memory-gb", str(memory.total_bytes / GB)]
        own += ["--gpu-reserved-gb", str(memory.reserved_bytes / GB)]
    return plan_case(read_command_line([*own, *tokens]).case)


def check_plan(outcome: Outcome, memory: DeviceMemory) -> Iterator[Finding]:
    """Report the plan's figures, or what does not fit."""
    phases = outcome.memory.phases
    if memory.total_bytes is None:  # without a device, there is no share of it for an engine
        phases = tuple(phase for phase in phases if phase.name not in (START, ROLLOUT, UPDATE))
    fullest = max(phases, key=lambda phase: phase.total_bytes)
    takes = f"{fullest.name} needs {shown_bytes(fullest.total_bytes)} on the fullest rank"
    hand_over, cache, seconds = "the job runs no engine", "", ""
    if outcome.usual_traffic is not None:
        received = shown_bytes(int(outcome.usual_traffic.received.max()))
        hand_over = f"a hand-over sends a rank at most {received}"
        cache = f", the KV cache has {outcome.memory.kv_cache.tokens:,} tokens on a rank"
        seconds = f", in about {outcome.seconds:.2f} s"
    if memory.total_bytes is None:
        yield green(PLAN, f"no device memory to fit into: {takes}; {hand_over}")
        return
    size = f"{shown_bytes(memory.total_bytes)} ({memory.source})"
    for problem in outcome.problems:
        yield _problem(outcome, problem, size)
    if outcome.fits:
        yield green(PLAN, f"fits into {size}: {takes}{cache}; {hand_over}{seconds}")


def _problem(outcome: Outcome, problem: Problem, size: str) -> Finding:
    """Report a problem: yellow if only formulas and reserves show it, when a start only warns."""
    surely = {phase.name: phase.surely_lacking_bytes for phase in outcome.memory.phases}
    is_sure = surely.get(problem.where, problem.lacking_bytes) > 0
    make, lacks = (red, "lacks") if is_sure else (yellow, "may lack")
    what = f"{problem.where} {lacks} {shown_bytes(problem.lacking_bytes)} on devices of {size}"
    ways = []
    for way in problem.remedies[:MOST_REMEDIES]:
        then = f"lacks {shown_bytes(way.lacking_bytes)}" if way.lacking_bytes else "fits"
        ways.append(f"{way.flags} ({then})")
    more = "use more GPUs, or search for a layout by mcore-rl plan --search"
    return make(PLAN, what, "; or ".join(ways) or more)


def fullest_on_host(
    config: RLConfig, outcome: Outcome, *, local_ranks: int, has_cuda: bool
) -> HostPhase:
    """Return the phase that needs most host memory on a machine of `local_ranks`."""
    machine = replace(outcome.case.machine, ranks_per_node=local_ranks)
    phase, _ = host_needs(
        replace(outcome.case, machine=machine),
        memory=outcome.memory if has_cuda else None,
        kv_cache_bytes=int(config.engine.rollout_kv_cache_gib * _GIB),
        widens=has_slow_products(config.trainer.precision),
    )
    return phase


def checkpoint_bytes(outcome: Outcome, sizes: Sequence[int]) -> int:
    """Return the bytes of one checkpoint: weights, main parameters and moments. `sizes` are the
    parameters of each model, the actor's first."""
    return sum(
        size * (model.training.weight_bytes + model.training.optimizer_bytes)
        for size, model in zip(sizes, outcome.case.models, strict=True)
    )
