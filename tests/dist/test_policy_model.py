"""The policy head on Megatron's model classes, against the full logits of the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.layouts import job_flags
from tests.rank_pool import RankPool

STACKS = {"gpt": "TransformerBlock", "hybrid": "TransformerStack"}


# Positions of two samples, in turns; more than a chunk of 7.
SCORED = [0, 5, *range(21, 40, 2), 50, 51]


@pytest.mark.parametrize("scored", [None, SCORED], ids=["all", "some"])
@pytest.mark.parametrize("split", ["tp1_pp1_ep1", "tp2_pp1_ep1"])
@pytest.mark.parametrize(("model_class", "stack"), STACKS.items())
def test_policy_equals_softmax_of_logits_in_value_and_gradient(
    model_class: str,
    stack: str,
    split: str,
    scored: list[int] | None,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
) -> None:
    results = ranks.run(
        "tests.dist.policy_jobs:policy_against_logits",
        world_size=2 if split.startswith("tp2") else 1,
        flags=job_flags(checkpoint_factory("qwen3"), split),
        model_class=model_class,
        scored=scored,
    )
    for result in results:
        assert result["stack"] == stack
        assert result["shape"] == [2, 32, 2] and result["dtype"] == "torch.float32"
        assert result["same_parameters"] and result["num_gradients"] > 10
        assert result["difference"] <= 1e-5
        # The reference's gradient of a TP shard goes through its own slice of the logits only,
        # which is what a vocabulary shard owns; float32 sums in another order.
        assert result["gradient"] > 0.1
        assert result["gradient_difference"] <= 2e-5 * max(1.0, result["gradient"])


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_nonfinite_loss_names_the_rank_that_it_comes_from(
    policy: str, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    more = ("--rl-on-nonfinite-grad", policy, "--lr", "1e-3")
    results = ranks.run(
        "tests.dist.policy_jobs:nonfinite_loss",
        world_size=2,
        flags=job_flags(checkpoint_factory("qwen3"), "tp1_pp1_ep1", *more),
        culprit=1,
    )
    for result in results:
        assert result["unchanged"]
        assert result["skipped"] == (policy == "skip")
        if policy == "stop":
            # The gradients, which both ranks have, are not finite on either.
            expected = "non-finite loss of the actor on rank 1, non-finite gradient of the actor in"
            assert result["error"].startswith(f"{expected} rank 0: "), result["error"]
            assert "on rank 0" not in result["error"]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_nonfinite_gradient_is_named_and_handled_on_all_ranks(
    policy: str, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    results = ranks.run(
        "tests.dist.policy_jobs:nonfinite_gradient",
        world_size=2,
        flags=job_flags(
            checkpoint_factory("qwen3"),
            "tp1_pp2_ep1",
            *("--rl-on-nonfinite-grad", policy, "--lr", "1e-3"),
        ),
        culprit=1,
    )
    for result in results:
        assert result["unchanged"] and result["finite"]
        assert not result["healthy_skipped"] and result["healthy_norm"] > 0
        if policy == "stop":
            assert f"rank 1: {results[1]['name']}" in result["error"]
            assert "--rl-on-nonfinite-grad skip" in result["error"]
        else:
            assert result["skipped"] and not result["error"]


def test_a_forks_spec_makes_the_layers_and_may_add_no_parameter(
    checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    """Every tensor of the checkpoint finds its parameter, or the start says which has none."""

    def built(name: str) -> dict:
        flags = ("--spec", "tests.dist.policy_jobs", name)
        (found,) = ranks.run(
            "tests.dist.policy_jobs:built_from_spec",
            world_size=1,
            flags=job_flags(checkpoint_factory("qwen3"), "tp1_pp1_ep1", *flags),
        )
        return found

    found = built("spec_of_fork")
    assert found["layers"] == ["LayerOfFork"] and found["count"] > 1
    error = built("spec_with_more")["error"]
    assert "parameter 'decoder.layers.0.gate_of_fork' [1] has no counterpart" in error
