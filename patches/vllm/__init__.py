"""Repairs of vLLM, applied by `register`, the entry point in group `vllm.general_plugins`.

vLLM calls it in its front end, engine core and workers. All repairs concern the CPU build; on CUDA
(vLLM 0.26 to 0.33) none is needed and none is applied. `VLLM_PLUGINS=` starts vLLM without them.
"""

from __future__ import annotations

from mcore_rl.patches.registry import Patch, apply_all


def patches() -> tuple[Patch, ...]:
    """All repairs of vLLM, in the order in which they are applied."""
    from mcore_rl.patches.vllm import (
        expert_parallel_on_cpu,
        repack_experts_on_reload,
        repack_tied_weights_on_reload,
        rotary_embedding_of_heads,
        shared_memory_names,
    )

    modules = (
        repack_experts_on_reload,
        repack_tied_weights_on_reload,
        expert_parallel_on_cpu,
        rotary_embedding_of_heads,
        shared_memory_names,
    )
    return tuple(module.PATCH for module in modules)


def register() -> None:
    """Apply what this process needs and has not got. Raises UsageError on an unknown version."""
    apply_all(patches())
