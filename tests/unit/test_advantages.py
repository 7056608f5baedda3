"""Advantages against the formulas, written out with Python's `statistics`."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mcore_rl.advantages import grpo_advantages

GROUPS = {0: [1.0, 0.0, 0.0, 1.0, 0.0], 7: [0.25, -1.0], 3: [2.0, 2.5, 2.25]}


def reference(normalize_std: bool, eps: float) -> list[float]:
    advantages = []
    for rewards in GROUPS.values():
        mean, std = statistics.mean(rewards), statistics.stdev(rewards)
        scale = std + eps if normalize_std else 1.0
        advantages += [(reward - mean) / scale for reward in rewards]
    return advantages


def flattened() -> tuple[np.ndarray, np.ndarray]:
    rewards = [reward for group in GROUPS.values() for reward in group]
    group_ids = [group for group, members in GROUPS.items() for _ in members]
    return np.array(rewards), np.array(group_ids)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_grpo_advantages_equals_formula(normalize_std: bool, eps: float) -> None:
    rewards, group_ids = flattened()
    advantages = grpo_advantages(rewards, group_ids, normalize_std=normalize_std, eps=eps)
    assert advantages.dtype == np.float32
    # Computed in float64, so float32 rounding of the result (2^-24) is all that may differ.
    np.testing.assert_allclose(advantages, reference(normalize_std, eps), rtol=1e-7, atol=0)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize(
    "rewards", [[0.1] * 3, [0.1] * 10, [1 / 3] * 7, [5.0]], ids=["0.1x3", "0.1x10", "1/3x7", "one"]
)
def test_grpo_advantages_is_exactly_zero_for_equal_rewards(
    rewards: list[float], normalize_std: bool
) -> None:
    advantages = grpo_advantages(
        rewards, np.zeros(len(rewards), dtype=int), normalize_std=normalize_std
    )
    assert advantages.tolist() == [0.0] * len(rewards)


# Rewards of very different sizes make every order of summing give another float64.
REWARDS = st.one_of(st.floats(-10, 10), st.floats(-1e17, 1e17))


@given(
    rewards=st.lists(REWARDS, min_size=1, max_size=24),
    num_groups=st.integers(1, 4),
    normalize_std=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(rewards=[1e17, 1.0, -1e17, 3.0], num_groups=1, normalize_std=False, seed=0)
def test_grpo_advantages_does_not_depend_on_sample_order_in_any_bit(
    rewards: list[float], num_groups: int, normalize_std: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    group_ids = rng.integers(0, num_groups, len(rewards))
    order = rng.permutation(len(rewards))
    expected = grpo_advantages(rewards, group_ids, normalize_std=normalize_std)[order]
    shuffled = grpo_advantages(
        np.array(rewards)[order], group_ids[order], normalize_std=normalize_std
    )
    assert shuffled.tobytes() == expected.tobytes()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_grpo_advantages_names_the_sample_whose_reward_is_not_finite(bad: float) -> None:
    with pytest.raises(RuntimeError, match=r"of sample 2 \(group 9\) is not finite"):
        grpo_advantages([0.0, 1.0, bad], [4, 4, 9])
