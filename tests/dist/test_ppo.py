"""PPO's updates do not depend on the layouts of actor and critic, which may differ.

Where they share one, test_invariance.py compares more layouts, and packing, recompute and offload.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.checkpoints import tensors_of
from tests.dist.layouts import SPLITS, job_flags
from tests.dist.updates import PPO_JOB, TOLERANCE, Outcome, assert_alike, learned
from tests.rank_pool import RankPool

# As in test_invariance: every term is on, and the weights show the gradient. The rates are low
# enough that 8 updates do not blow up the rounding of the first.
PPO_FLAGS = tuple(
    "--rl-algorithm ppo --rl-num-samples-per-prompt 2 --rl-kl-reward-coef 0.05 --rl-kl-target 0.1 "
    "--rl-gae-lambda 0.9 --rl-gamma 0.99 --rl-value-clip-eps 0.5 --rl-num-epochs 2 --adam-eps 1.0 "
    "--lr 0.1 --rl-critic-lr 0.06".split()
)
PACKED = ("--rl-max-tokens-per-microbatch", "128")
# (split of the actor, further flags)
VARIANTS = {
    "tp2 pp2 ep2 packed": ("tp2_pp2_ep2", PACKED),
    # Tokens for the critic's experts are gathered from data-parallel ranks, those for the actor's
    # within a sample.
    "critic tp1 beside tp2 pp2 ep2": (
        "tp2_pp2_ep2",
        (
            *("--rl-critic-tp-size", "1"),
            *("--rl-critic-pp-size", "1"),
            *("--moe-token-dispatcher-type", "allgather"),
            *PACKED,
        ),
    ),
    "critic tp2 pp2 beside ep2": (
        "tp1_pp1_ep2",
        (*("--rl-critic-tp-size", "2"), *("--rl-critic-ep-size", "1")),
    ),
}


@pytest.fixture(scope="module")
def learn(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> Callable[..., Outcome]:
    def learn(split: str, *more: str) -> Outcome:
        checkpoint = checkpoint_factory("deepseek_v3")
        flags = job_flags(checkpoint, split, *PPO_FLAGS, *more, micro_batch_size=1)
        target = tmp_path_factory.mktemp("learned")
        return learned(ranks, flags, SPLITS[split][3], target, job=PPO_JOB)

    return learn


@pytest.fixture(scope="module")
def reference(learn: Callable[..., Outcome]) -> Outcome:
    """One process, whole models, samples padded one by one."""
    return learn("tp1_pp1_ep1")


def test_the_reference_learns(reference: Outcome, checkpoint_factory: Callable[..., Path]) -> None:
    found, weights = reference.found, reference.weights
    assert all(math.isfinite(value) for step in found["steps"] for value in step.values())
    before = tensors_of(checkpoint_factory("deepseek_v3"))
    for model in ("actor", "critic"):
        moved = [
            (weights[f"{model}/{name}"] - tensor.float()).abs().max()
            for name, tensor in before.items()
            if f"{model}/{name}" in weights
        ]
        assert max(moved) > 100 * TOLERANCE
    assert weights["critic/score.weight"].abs().max() > 100 * TOLERANCE
    assert "critic/lm_head.weight" not in weights
    # The second step sees values that are no longer 0.
    first, second = found["steps"]
    assert first["critic/value_mean"] == 0.0 != second["critic/value_mean"]
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ppo_update_is_the_same_for_layouts_of_actor_and_critic(
    variant: str, learn: Callable[..., Outcome], reference: Outcome
) -> None:
    split, more = VARIANTS[variant]
    assert_alike(learn(split, *more), reference)


def test_learning_rates_end_where_the_run_does(
    checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    """Two mini-batches and two epochs; the actor learns in two of three steps."""
    schedule = (
        *("--rl-num-steps", "3", "--rl-critic-warmup-steps", "1"),
        *("--lr-decay-style", "linear", "--lr-warmup-iters", "2", "--min-lr", "0"),
    )
    flags = job_flags(checkpoint_factory("deepseek_v3"), "tp1_pp1_ep1", *PPO_FLAGS, *schedule)
    (found,) = ranks.run("tests.dist.ppo_jobs:learning_rates", world_size=1, flags=flags)
    for name, highest, updates in (("actor", 0.1, 2 * 2 * 2), ("critic", 0.06, 3 * 2 * 2)):
        up = [highest * number / 2 for number in range(2)]
        down = [highest * left / (updates - 2) for left in range(updates - 2, -1, -1)]
        assert found[name] == pytest.approx([*up, *down], abs=1e-12), name
        assert len(found[name]) == updates + 1 and found[name][-1] == 0.0


def test_nonfinite_advantage_names_sample_and_rank(
    checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    errors = ranks.run(
        "tests.dist.ppo_jobs:refuses_a_reward",
        world_size=2,
        flags=job_flags(checkpoint_factory("deepseek_v3"), "tp1_pp1_ep2", *PPO_FLAGS),
        sample=5,
    )
    assert errors[0] == errors[1]
    assert "advantages of --rl-advantage gae are not finite" in errors[0]
    assert re.search(r"rank [01]: rewards of sample 5 of the step", errors[0])
