"""Group-limited routing of DeepSeek-V2 ranks a group of experts by its best one.

Symptom: for the large DeepSeek-V2 (160 experts in 8 groups, 3 groups and 6 experts per token)
Megatron chooses other groups than transformers and vLLM; nothing warns, log-probs are wrong.

Cause: `group_limited_topk` ranks a group by the sum of its `topk // group_topk` best experts, 2 as
in DeepSeek-V3, for any score function. V2 (arXiv 2405.04434, section 2.2.2) uses the highest score
in the group, and so do vLLM's and transformers' routers for softmax scores.

Why safe: only softmax scores without a bias and with groups change, which only V2 uses among
published models. Megatron's own function still routes them, but calls our function for the best
experts within groups, so that weights, scaling and replay stay its own. The fused router does not
call it and is refused.

Upstream: the docstring names V2 as a use case; no issue known.

Drop when: the number of experts that rank a group is a setting.

Versions: megatron-core 0.18 to 0.20.

Shape legend: t tokens, e experts, k experts a token.
"""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl.patches.registry import (
    Patch,
    parameters_of,
    require_parameters,
    require_source,
)

_PARAMETERS = (
    "logits topk use_pre_softmax num_groups group_topk scaling_factor score_function expert_bias "
    "fused router_replay dense_output"
)
_CHOSEN_BEFORE = "precomputed_indices"  # from 0.19 on


def topk_of_best_groups(
    scores: torch.Tensor, topk: int, num_groups: int, group_topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `topk` best experts within the `group_topk` groups with the best single experts.

    `scores` is `[t, e]`; returns scores and numbers of the chosen experts, `[t, k]` each.
    """
    by_group = scores.unflatten(-1, (num_groups, -1))
    groups = by_group.amax(dim=-1).topk(group_topk, dim=-1, sorted=False).indices
    is_open = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=scores.device)
    is_open.scatter_(1, groups, True)
    allowed = by_group.masked_fill(~is_open.unsqueeze(-1), float("-inf")).flatten(1)
    best: tuple[torch.Tensor, torch.Tensor] = allowed.topk(topk, dim=-1)
    return best


def apply() -> None:
    """Make softmax routers with groups choose within the groups that have the best experts."""
    from megatron.core.transformer.moe import moe_utils, router

    route, limited = router.topk_routing_with_score_function, moe_utils.group_limited_topk
    may_be_chosen = _CHOSEN_BEFORE in parameters_of(route)
    parameters = f"{_PARAMETERS} {_CHOSEN_BEFORE}" if may_be_chosen else _PARAMETERS
    require_parameters(route, parameters)
    require_source(route, "return group_limited_topk(scores=scores, topk=topk,")
    require_parameters(limited, "scores topk num_tokens num_experts num_groups group_topk")
    # The probabilities used by the current call of `route`, if its model is like V2.
    by_best: list[torch.Tensor] = []

    def limited_by_best(
        scores: Any, topk: Any, num_tokens: Any, num_experts: Any, num_groups: Any, group_topk: Any
    ) -> Any:
        if not by_best:
            return limited(scores, topk, num_tokens, num_experts, num_groups, group_topk)
        _, chosen = topk_of_best_groups(by_best[-1], topk, num_groups, group_topk)
        return scores.gather(1, chosen), chosen

    def route_by_best_expert(*args: Any, **kwargs: Any) -> Any:
        call = dict(zip(parameters.split(), args, strict=False)) | kwargs
        if (
            not call.get("group_topk")
            or call.get("score_function", "softmax") != "softmax"
            or call.get("expert_bias") is not None
            or call.get(_CHOSEN_BEFORE) is not None
        ):
            return route(**call)
        if call.get("fused"):
            raise RuntimeError(
                "Transformer Engine's fused router ranks groups of experts by the sum of several; "
                "drop --moe-router-fusion"
            )
        # Softmax keeps the order, but breaks ties of underflowing scores as other routers do.
        by_best.append(torch.softmax(call["logits"], dim=-1, dtype=torch.float32))
        try:
            return route(**call)
        finally:
            by_best.pop()

    moe_utils.group_limited_topk = limited_by_best
    router.topk_routing_with_score_function = route_by_best_expert


PATCH = Patch(
    "megatron.groups_by_best_expert",
    "DeepSeek-V2's router ranks a group of experts by its best one",
    apply,
)
