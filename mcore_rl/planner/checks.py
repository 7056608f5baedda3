"""The checks that a run fits its devices and the host memory of its machines, before models exist.

A run is refused if parts of exact size alone do not fit: a device with nothing reserved, or the
limit of a machine or of its cgroup. If it may not fit by formula, or in the host memory that is
free now (other programs may end), there is only a warning.
"""

from __future__ import annotations

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.errors import UsageError
from mcore_rl.common.machine import MachineMemory
from mcore_rl.planner.advice import Problem, problems_of
from mcore_rl.planner.host import HostPhase, host_phases
from mcore_rl.planner.memory import Memory, memory_of, resident_of
from mcore_rl.planner.phases import (
    BUILD,
    CANARY,
    FIRST_SWITCH,
    GRAPHS,
    NCCL,
    ROLLOUT,
    START,
    UPDATE,
    Case,
    Phase,
)

MOST_REMEDIES = 3
# Phases of mcore_rl.verify, which updates nothing.
_SCORING = (BUILD, START, CANARY, FIRST_SWITCH, ROLLOUT)
# Parts of a node's host memory, with GPUs, that are exact and exist at the same time.
_HELD_TOGETHER = ("offloaded", "optimizer of", "reference policy", "teacher's weights")
_WITH_GPUS = "take fewer ranks on a machine, or drop kinds from --rl-offload"
_WITHOUT = (
    "take fewer ranks on a machine, a smaller --rl-rollout-kv-cache-gib, or machines with more"
)


def check_device(case: Case, *, scores_only: bool = False) -> tuple[str, ...]:
    """Refuse a case with a phase that cannot fit `case.machine.gpu_bytes`.

    Returns a line for each phase that may not fit. UsageError names the phase, what it holds on its
    fullest rank, the missing bytes and remedies.
    """
    resident = resident_of(case)
    memory = memory_of(case, resident)
    phases = {p.name: p for p in memory.phases if not scores_only or p.name in _SCORING}
    for problem in problems_of(case, memory, resident, 0, surely=True):
        if problem.where in phases:
            raise _refusal(case, phases[problem.where], problem)
    return tuple(
        f"phase {phase.name} may lack {shown_bytes(phase.lacking_bytes)} of device memory on rank "
        f"{phase.rank}, by the planner's estimate: mcore-rl plan with the same flags shows its "
        "parts and tries other flags"
        for phase in phases.values()
        if phase.lacking_bytes
    )


def _refusal(case: Case, phase: Phase, problem: Problem) -> UsageError:
    size = shown_bytes(case.machine.gpu_bytes)
    with_engine = phase.name in (START, ROLLOUT, UPDATE)
    engine = {"rollout weights", "activations", GRAPHS, "KV cache"} if with_engine else set()
    held = [
        f"{part} {shown_bytes(num_bytes)}"
        for part, num_bytes in phase.parts.items()
        if num_bytes and part not in {*engine, NCCL}
    ]
    if with_engine:
        utilization = case.engine.gpu_memory_utilization
        share = f"vLLM's share {shown_bytes(case.share_bytes)}"
        held.append(f"{share} (--rl-rollout-gpu-memory-utilization {utilization:g})")
        weights = phase.parts["rollout weights"]
        if weights > case.share_bytes:
            held[-1] += f", of which its weights alone take {shown_bytes(weights)}"
    ways = [
        remedy.flags + ("" if not remedy.lacking_bytes else " (which is not enough by itself)")
        for remedy in problem.remedies[:MOST_REMEDIES]
    ]
    return UsageError(
        f"phase {phase.name} does not fit a device of {size}: rank {phase.rank} would hold "
        f"{', '.join(held)}, and lacks {shown_bytes(problem.lacking_bytes)} at least",
        remedy=f"give {', or '.join(ways)}" if ways else "take more GPUs, or larger ones",
    )


def check_host(
    case: Case,
    machine: MachineMemory,
    *,
    memory: Memory | None,
    kv_cache_bytes: int,
    widens: bool,
) -> tuple[str, ...]:
    """Return a line on what may not fit. `memory` is the plan on GPUs, None without them.

    UsageError names the phase, what a node would hold in it, and the limit.
    """
    fullest, remedy = host_needs(case, memory=memory, kv_cache_bytes=kv_cache_bytes, widens=widens)
    ranks = min(case.machine.ranks_per_node, case.train.world_size)
    if fullest.exact_bytes > machine.limit_bytes:
        raise UsageError(
            f"phase {fullest.name} does not fit the host memory: {ranks} ranks of a machine would "
            f"hold {fullest.described}, {shown_bytes(fullest.exact_bytes)} at least, and "
            f"{machine.source} is {shown_bytes(machine.limit_bytes)}",
            remedy=remedy,
        )
    needed = f"phase {fullest.name} needs some {shown_bytes(fullest.total_bytes)} of host memory"
    if fullest.total_bytes > machine.limit_bytes:
        return (
            f"{needed} for the {ranks} ranks of a machine, by the planner's estimate, and "
            f"{machine.source} is {shown_bytes(machine.limit_bytes)}: {remedy}",
        )
    if fullest.total_bytes > machine.available_bytes:
        return (
            f"{needed} for the {ranks} ranks of a machine, and only "
            f"{shown_bytes(machine.available_bytes)} of {shown_bytes(machine.limit_bytes)} are "
            "free now: end other programs, or the kernel may end a rank",
        )
    return ()


def host_needs(
    case: Case,
    *,
    memory: Memory | None,
    kv_cache_bytes: int,
    widens: bool,
) -> tuple[HostPhase, str]:
    """Return the phase with most host memory on a node, and the remedy; see `host_phases`."""
    if memory is None:
        phases = host_phases(case, kv_cache_bytes=kv_cache_bytes, widens=widens)
        return max(phases, key=lambda phase: phase.total_bytes), _WITHOUT
    exact = sum(
        size for part, size in memory.host_bytes.items() if any(k in part for k in _HELD_TOGETHER)
    )
    return HostPhase("rollout", memory.host_bytes, exact), _WITH_GPUS
