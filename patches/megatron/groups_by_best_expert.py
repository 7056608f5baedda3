"""Group-limited routing of DeepSeek-V2 ranks a group of experts by its best one.

Symptom: the large DeepSeek-V2 (160 experts in 8 groups, 3 of them for a token, 6 experts) is routed
to other groups than by transformers and vLLM; nothing warns, log-probs are off.

Cause: `group_limited_topk` ranks a group by the sum of its `topk // group_topk` best experts, 2 as
in DeepSeek-V3, whatever the score function is. V2 (arXiv 2405.04434, section 2.2.2) takes the
highest score in the group, and so do vLLM's and transformers' routers of softmax scores.

Why safe: only softmax scores without a bias and with groups are touched, which is V2's routing and
no other published model's. The experts are chosen here and handed to Megatron's own function
through `precomputed_indices`, its way for a caller who has chosen, so that weights, scaling and
replay stay its own. The fused router cannot be told and is refused.

Upstream: the docstring names V2 as a use case; no issue known.

Drop when: the number of experts that rank a group is a setting.

Versions: megatron-core 0.19.2.

Shape legend: t tokens, e experts, k experts a token.
"""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl.patches.registry import Patch, require_parameters

_PARAMETERS = (
    "logits",
    "topk",
    "use_pre_softmax",
    "num_groups",
    "group_topk",
    "scaling_factor",
    "score_function",
    "expert_bias",
    "fused",
    "router_replay",
    "dense_output",
    "precomputed_indices",
)


def topk_of_best_groups(
    scores: torch.Tensor, topk: int, num_groups: int, group_topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `topk` best experts within the `group_topk` groups with the best single experts.

    `scores` `[t, e]`; returns scores and numbers of the chosen, `[t, k]`.
    """
    by_group = scores.unflatten(-1, (num_groups, -1))
    groups = by_group.amax(dim=-1).topk(group_topk, dim=-1, sorted=False).indices
    is_open = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=scores.device)
    is_open.scatter_(1, groups, True)
    allowed = by_group.masked_fill(~is_open.unsqueeze(-1), float("-inf")).flatten(1)
    return allowed.topk(topk, dim=-1)


def needed() -> bool:
    """True everywhere; it is a fault of the routing, not of the machine."""
    return True


def apply() -> None:
    """Choose the experts of softmax routers with groups before Megatron weighs them."""
    from megatron.core.transformer.moe import router

    route = router.topk_routing_with_score_function
    require_parameters(route, *_PARAMETERS)

    def route_by_best_expert(*args: Any, **kwargs: Any) -> Any:
        call = dict(zip(_PARAMETERS, args, strict=False)) | kwargs
        num_groups, group_topk = call.get("num_groups"), call.get("group_topk")
        if (
            not group_topk
            or call.get("score_function", "softmax") != "softmax"
            or call.get("expert_bias") is not None
            or call.get("precomputed_indices") is not None
        ):
            return route(**call)
        if call.get("fused"):
            raise RuntimeError(
                "Transformer Engine's fused router ranks groups of experts by the sum of several; "
                "drop --moe-router-fusion"
            )
        # Softmax keeps the order, but ties of underflowing scores are broken as elsewhere.
        scores = torch.softmax(call["logits"], dim=-1, dtype=torch.float32)
        replay = call.pop("router_replay", None)
        if replay is None:
            _, chosen = topk_of_best_groups(scores, call["topk"], num_groups, group_topk)
        else:
            _, chosen = replay.get_replay_topk(
                scores, call["topk"], num_groups, group_topk, topk_of_best_groups
            )
        call |= {"num_groups": None, "group_topk": None, "precomputed_indices": chosen}
        return route(**call)

    router.topk_routing_with_score_function = route_by_best_expert


PATCH = Patch(
    name="megatron.groups_by_best_expert",
    package="megatron-core",
    versions=("0.19.2",),
    reason="DeepSeek-V2's router ranks a group of experts by its best one",
    needed=needed,
    apply=apply,
)
