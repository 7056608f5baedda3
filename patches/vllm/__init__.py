"""Repairs of vLLM, applied by `register`, the entry point in group `vllm.general_plugins`.

vLLM calls it in its front end, engine core and workers. Most repairs are for the CPU build (one is
torch's) and are not applied on CUDA. Of the others, `loaders_without_a_name` is applied if a reload
uses names, `rank_map` if an engine is started with a rank map, and `answers_after_failure`,
`routers_in_float32`, `routes_on_every_rank`, `step_without_drafts`, `experts_one_by_one` and
`aborts_in_order` to the versions they name.
`VLLM_PLUGINS=` starts vLLM without them.
"""

from __future__ import annotations

from mcore_rl.patches.registry import Patch, apply_all


def patches() -> tuple[Patch, ...]:
    """Return all repairs of vLLM, in the order in which they are applied."""
    from mcore_rl.patches.torch import narrow_products
    from mcore_rl.patches.vllm import (
        aborts_in_order,
        answers_after_failure,
        constants_through_sleep,
        draft_kernels_on_cpu,
        expanded_sampling_options,
        expert_parallel_on_cpu,
        experts_one_by_one,
        kernels_beside_numba,
        loaders_without_a_name,
        mla_prefill_together,
        model_info_here,
        rank_map,
        repack_experts_on_reload,
        rotary_embedding_of_heads,
        routers_in_float32,
        routes_on_every_rank,
        seeds_of_cut_prompts,
        shared_memory_names,
        sigmoid_router_on_cpu,
        step_without_drafts,
        text_models_without_torchvision,
        wide_linear,
    )

    modules = (
        narrow_products,
        wide_linear,
        repack_experts_on_reload,
        expert_parallel_on_cpu,
        sigmoid_router_on_cpu,
        routers_in_float32,
        rotary_embedding_of_heads,
        mla_prefill_together,
        model_info_here,
        text_models_without_torchvision,
        draft_kernels_on_cpu,
        expanded_sampling_options,
        seeds_of_cut_prompts,
        kernels_beside_numba,
        shared_memory_names,
        loaders_without_a_name,
        rank_map,
        answers_after_failure,
        routes_on_every_rank,
        step_without_drafts,
        experts_one_by_one,
        aborts_in_order,
        constants_through_sleep,
    )
    return tuple(module.PATCH for module in modules)


def register() -> None:
    """Apply the missing repairs that this process needs. UsageError: an unknown version."""
    apply_all(patches())
