"""The check that a run fits the host memory of its machines, before a model is built.

With GPUs, this is the planner's host memory of a node; without them, all phases of a run. A run is
refused if parts of exact size alone exceed the limit of the machine or of its cgroup. There is only
a warning if it may not fit by formula, or in the memory that is free now: other programs may end.
"""

from __future__ import annotations

from collections.abc import Mapping

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.errors import UsageError
from mcore_rl.common.machine_memory import MachineMemory
from mcore_rl.planner.host import HostPhase, host_phases
from mcore_rl.planner.memory import Memory
from mcore_rl.planner.phases import Case

# Parts of a node's host memory, with GPUs, that are exact and exist at the same time.
_HELD_TOGETHER = ("offloaded", "optimizer of", "reference policy")
_WITH_GPUS = "take fewer ranks on a machine, or drop kinds from --rl-offload"
_WITHOUT = (
    "take fewer ranks on a machine, a smaller --rl-rollout-kv-cache-gib, or machines with more"
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
            f"hold {_listed(fullest.parts)}, {shown_bytes(fullest.exact_bytes)} at least, and "
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
    """Return the phase with most host memory on a node, and the remedy. `widens`: see
    `host_phases`."""
    if memory is None:
        phases = host_phases(case, kv_cache_bytes=kv_cache_bytes, widens=widens)
        return max(phases, key=lambda phase: phase.total_bytes), _WITHOUT
    exact = sum(
        size for part, size in memory.host_bytes.items() if any(k in part for k in _HELD_TOGETHER)
    )
    return HostPhase("rollout", memory.host_bytes, exact), _WITH_GPUS


def has_slow_products(precision: str) -> bool:
    """Return whether this CPU lacks matrix products for `precision` (bf16, fp16 or fp32)."""
    import torch

    from mcore_rl.patches.torch.narrow_products import slow_dtypes

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision) in slow_dtypes()


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {shown_bytes(size)}" for part, size in parts.items())
