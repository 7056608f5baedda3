"""Megatron's router with our patch against transformers' router of DeepSeek-V2, in float32."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

from mcore_rl.megatron import adapter  # noqa: F401  (applies the patch)

from megatron.core.transformer.moe import moe_utils, router  # isort: skip

TOKENS, EXPERTS, GROUPS, OPEN_GROUPS, TOPK, SCALE = 512, 160, 8, 3, 6, 16.0  # DeepSeek-V2's


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3))


def routed(function, logits: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor]:
    settings = dict(
        use_pre_softmax=True, num_groups=GROUPS, group_topk=OPEN_GROUPS, scaling_factor=SCALE
    )
    return function(logits, TOPK, **settings | options)


def transformers_weights(logits: torch.Tensor) -> torch.Tensor:
    """Dense `[t, e]` weights by transformers; its router is given the identity as its weight."""
    config = DeepseekV2Config(
        hidden_size=EXPERTS, n_routed_experts=EXPERTS, n_group=GROUPS, topk_group=OPEN_GROUPS,
        num_experts_per_tok=TOPK, routed_scaling_factor=SCALE, topk_method="group_limited_greedy",
    )  # fmt: skip
    theirs = DeepseekV2TopkRouter(config)
    theirs.weight.data.copy_(torch.eye(EXPERTS))
    _, weights, chosen = theirs(logits)
    return torch.zeros_like(logits).scatter(1, chosen, weights)


def test_weights_and_experts_equal_transformers(logits: torch.Tensor) -> None:
    weights, chosen = routed(router.topk_routing_with_score_function, logits)
    expected = transformers_weights(logits)
    assert torch.equal(chosen, expected > 0)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)  # float32 rounding


def test_upstream_without_patch_chooses_other_experts(logits: torch.Tensor) -> None:
    _, chosen = routed(moe_utils.topk_routing_with_score_function, logits)
    assert (chosen != (transformers_weights(logits) > 0)).any(dim=1).float().mean() > 0.1


def test_gradient_of_logits_equals_transformers(logits: torch.Tensor) -> None:
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    factors = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(4))
    (routed(router.topk_routing_with_score_function, ours)[0] * factors).sum().backward()
    (transformers_weights(theirs) * factors).sum().backward()
    assert theirs.grad.abs().sum() > 1
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"score_function": "sigmoid", "expert_bias": torch.arange(EXPERTS) * 1e-3},  # V3
        {"num_groups": None, "group_topk": None},  # V2-Lite
    ],
)
def test_other_routing_equals_upstream(options: dict, logits: torch.Tensor) -> None:
    patched = routed(router.topk_routing_with_score_function, logits, **options)
    upstream = routed(moe_utils.topk_routing_with_score_function, logits, **options)
    assert all(torch.equal(a, b) for a, b in zip(patched, upstream, strict=True))


def test_recorded_experts_are_replayed(logits: torch.Tensor) -> None:
    replay = router.RouterReplay()
    try:
        replay.set_router_replay_action(router_replay_action("RECORD"))
        recorded = routed(router.topk_routing_with_score_function, logits, router_replay=replay)
        replay.set_target_indices(replay.get_recorded_indices())
        replay.set_router_replay_action(router_replay_action("REPLAY_FORWARD"))
        other = logits.flip(0)
        _, chosen = routed(router.topk_routing_with_score_function, other, router_replay=replay)
        assert torch.equal(chosen, recorded[1])
    finally:
        router.RouterReplay.global_router_replay_instances.remove(replay)


def router_replay_action(name: str):
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    return RouterReplayAction[name]


def test_fused_router_is_refused(logits: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="drop --moe-router-fusion"):
        routed(router.topk_routing_with_score_function, logits, fused=True)
