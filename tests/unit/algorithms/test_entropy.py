"""Adaptive entropy control against the recurrence of its paper."""

from __future__ import annotations

import math

import pytest

from mcore_rl.algorithms.entropy import EntropyController


def test_weights_follow_the_recurrence() -> None:
    """arXiv 2505.22312: alpha_k = c_k 1{e_k <= target}; c_{k+1} = c_k + d if e_k < target, c_k - d
    if e_k > target. Here e_k is known one step later, and c is not negative."""
    entropies = [0.5, 0.15, 0.1, 0.18, 0.2, 0.25, 0.3, 0.19, 0.4, 0.4, 0.4, 0.1]
    target, step, c = 0.2, 0.005, 0.002
    expected, found = [], []
    controller = EntropyController(c, target, step)
    for before, entropy in zip([0.0, *entropies], entropies, strict=False):
        expected.append(c if before <= target else 0.0)
        found.append(controller.weight)
        controller.update(entropy)
        c = c + step if entropy < target else c - step if entropy > target else c
        c = max(c, 0.0)
    assert found == pytest.approx(expected)
    assert 0.0 in found and max(found) >= 3 * step


def test_weight_is_constant_without_target() -> None:
    controller = EntropyController(0.01)
    controller.update(0.5)
    assert controller.weight == 0.01 and controller.state_dict() == {}


def test_state_resumes_from_checkpoint() -> None:
    first = EntropyController(0.0, target=0.2)
    for entropy in (0.1, math.nan, 0.15):
        first.update(entropy)
    second = EntropyController(0.0, target=0.2)
    second.load_state_dict(first.state_dict())
    assert second == first and second.weight == 0.01
    fixed = EntropyController(0.3)
    fixed.load_state_dict(first.state_dict())  # the flag decides
    assert fixed.weight == 0.3
    second.load_state_dict({})  # the run began without a target
    assert second == first
