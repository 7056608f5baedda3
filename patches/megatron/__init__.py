"""Repairs of Megatron for this machine; `apply` must precede the first `import megatron`."""

from __future__ import annotations

import sys

from mcore_rl.common.errors import UsageError
from mcore_rl.patches.megatron import (
    attention_variant_spec,
    background_saving,
    biased_experts,
    common_state_reading,
    cpu_torch,
    dataset_helpers,
    delta_net_norm,
    expert_bias_padding,
    expert_optimizer,
    fsdp_checkpoint,
    fsdp_on_cpu,
    fsdp_single_rank_groups,
    fused_adam_loading,
    groups_by_best_expert,
    late_wandb,
    local_delta_net,
    local_layers,
    local_mamba,
    local_sparse_attention,
    mla_direct_query,
    optimizer_in_pieces,
    packed_rope,
    rates_after_loading,
    streamed_saving,
    torch_adam_state,
    typing_override,
    uneven_all_gather,
    yarn_context_parallel,
)
from mcore_rl.patches.registry import applied_patches, apply_all
from mcore_rl.patches.torch import (
    checkpoint_reading,
    enum_pickles,
    loopback_stores,
    narrow_products,
)

# The order matters: later patches import Megatron, which requires the first three.
PATCHES = (
    narrow_products.PATCH,
    typing_override.PATCH,
    cpu_torch.PATCH,
    late_wandb.PATCH,  # before anything else imports Megatron
    dataset_helpers.PATCH,
    fsdp_single_rank_groups.PATCH,  # before the next, which changes a function that it checks
    fsdp_on_cpu.PATCH,
    local_layers.PATCH,
    local_delta_net.PATCH,
    delta_net_norm.PATCH,
    attention_variant_spec.PATCH,
    local_sparse_attention.PATCH,
    local_mamba.PATCH,
    biased_experts.PATCH,
    mla_direct_query.PATCH,
    groups_by_best_expert.PATCH,
    expert_bias_padding.PATCH,
    packed_rope.PATCH,
    yarn_context_parallel.PATCH,
    uneven_all_gather.PATCH,
    torch_adam_state.PATCH,
    fused_adam_loading.PATCH,
    expert_optimizer.PATCH,
    rates_after_loading.PATCH,
    optimizer_in_pieces.PATCH,
    streamed_saving.PATCH,
    background_saving.PATCH,
    fsdp_checkpoint.PATCH,
    checkpoint_reading.PATCH,
    enum_pickles.PATCH,
    common_state_reading.PATCH,
    loopback_stores.PATCH,
)


def apply() -> tuple[str, ...]:
    """Apply the patches needed here; idempotent. Returns the names of the patches applied now.

    Raises UsageError if Megatron is already imported: names that its modules have imported from
    torch, or from each other, would stay unpatched.
    """
    early = {"megatron.core", "megatron.training"} & sys.modules.keys()
    if early and not any(patch.name in applied_patches() for patch in PATCHES):
        raise UsageError(
            "Megatron was imported before mcore_rl.prepare(), which repairs it for this machine",
            remedy="call it before the first import of Megatron",
        )
    names: tuple[str, ...] = apply_all(PATCHES)
    return names
