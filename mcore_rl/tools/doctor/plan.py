"""Batches, memory and traffic of a job with a valid layout, by the accounting and the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_rl.batching.accounting import describe
from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.errors import UsageError
from mcore_rl.planner.advice import Problem
from mcore_rl.planner.checks import host_needs
from mcore_rl.planner.host import HostPhase
from mcore_rl.planner.phases import ROLLOUT, START
from mcore_rl.planner.plan import Outcome, plan_case
from mcore_rl.planner.settings import GB
from mcore_rl.tools.doctor.finding import BATCHES, PLAN, Finding, green, red, refusal, yellow
from mcore_rl.tools.doctor.flags import ReadJob
from mcore_rl.tools.plan.command_line import read_command_line
from mcore_rl.trainer.case import has_slow_products

_GIB = 1 << 30
_MOST_REMEDIES = 3


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device, and the source of the figure; None: there is no device."""

    total_bytes: int | None
    reserved_bytes: int
    source: str


def check_batches(job: ReadJob) -> list[Finding]:
    """Return the lines that a start prints, for a job whose layout and batch are valid."""
    assert job.config is not None and job.shape is not None
    assert job.layout is not None and job.layers is not None
    batching = job.config.micro_batching(
        job.shape, job.layout, job.values, interleaved=len(job.layers[0]) > 1
    )
    critic = None
    if job.spec is not None and job.spec.critic is not None:
        model = job.spec.critic
        values = {**job.values, "pipeline_model_parallel_size": model.layout.pp_size}
        interleaved = len(model.layers[0]) > 1
        critic = (
            model.layout.dp_size,
            job.config.micro_batching(model.shape, model.layout, values, interleaved=interleaved),
        )
    accounting = job.config.accounting(actor=(job.layout.dp_size, batching), critic=critic)
    return [green(BATCHES, line) for line in describe(accounting)]


def make_plan(
    job: ReadJob, world_size: int, memory: DeviceMemory, host_bytes: int
) -> Outcome | Finding:
    """Return the plan of `mcore-rl plan` for this job, or its refusal."""
    tokens = ["--world-size", str(world_size), "--host-memory-gb", str(host_bytes / GB)]
    if memory.total_bytes is not None:
        tokens += ["--gpu-memory-gb", str(memory.total_bytes / GB)]
        tokens += ["--gpu-reserved-gb", str(memory.reserved_bytes / GB)]
    try:
        return plan_case(read_command_line([*tokens, *job.tokens]).case)
    except UsageError as error:
        return refusal(PLAN, error)


def check_plan(outcome: Outcome, memory: DeviceMemory) -> list[Finding]:
    """Report the plan's figures, or what does not fit."""
    traffic, phases = outcome.traffic, outcome.memory.phases
    received = shown_bytes(int(traffic.received.max()))
    hand_over = f"a hand-over brings a rank {received} at most"
    if memory.total_bytes is None:
        fullest = max(
            (phase for phase in phases if phase.name not in (START, ROLLOUT)),
            key=lambda phase: phase.total_bytes,
        )
        what = f"no device to compare with: {fullest.name} takes {_total(fullest.total_bytes)}"
        return [green(PLAN, f"{what}; {hand_over}")]
    fullest = max(phases, key=lambda phase: phase.total_bytes)
    size = f"{shown_bytes(memory.total_bytes)} ({memory.source})"
    if not outcome.fits:
        return [_problem(outcome, problem, size) for problem in outcome.problems]
    tokens = outcome.memory.kv_cache.tokens
    return [
        green(
            PLAN,
            f"fits into {size}: {fullest.name} takes {_total(fullest.total_bytes)}, the KV cache "
            f"has {tokens:,} tokens on a rank; {hand_over}, in some {outcome.seconds:.2f} s",
        )
    ]


def _total(num_bytes: int) -> str:
    return f"{shown_bytes(num_bytes)} of the fullest rank"


def _problem(outcome: Outcome, problem: Problem, size: str) -> Finding:
    """Report a problem: yellow if only formulas and reserves show it, when a start only warns."""
    surely = {phase.name: phase.surely_lacking_bytes for phase in outcome.memory.phases}
    is_sure = surely.get(problem.where, problem.lacking_bytes) > 0
    lacks = "lacks" if is_sure else "may lack"
    found = f"{problem.where} {lacks} {shown_bytes(problem.lacking_bytes)} on devices of {size}"
    ways = []
    for remedy in problem.remedies[:_MOST_REMEDIES]:
        left = remedy.lacking_bytes
        ways.append(f"{remedy.flags} ({f'lacks {shown_bytes(left)}' if left else 'fits'})")
    more = "take more GPUs, or try mcore-rl plan --search"
    level = red if is_sure else yellow
    return level(PLAN, found, "; or ".join(ways) if ways else more)


def fullest_on_host(
    job: ReadJob, outcome: Outcome, *, local_ranks: int, has_cuda: bool
) -> HostPhase:
    """Return the phase that needs most host memory on this machine."""
    assert job.config is not None
    case = outcome.case
    case = replace(case, machine=replace(case.machine, ranks_per_node=local_ranks))
    phase, _ = host_needs(
        case,
        memory=outcome.memory if has_cuda else None,
        kv_cache_bytes=int(job.config.engine.rollout_kv_cache_gib * _GIB),
        widens=has_slow_products(job.config.trainer.precision),
    )
    return phase


def checkpoint_bytes(outcome: Outcome, sizes: Sequence[int]) -> int:
    """Return the bytes of one checkpoint: weights, main parameters and moments. `sizes` are the
    parameters of each model, the actor's first."""
    return sum(
        size * (model.training.weight_bytes + model.training.optimizer_bytes)
        for size, model in zip(sizes, outcome.case.models, strict=True)
    )
