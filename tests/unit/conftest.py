"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from mcore_rl.algorithms import registry
from mcore_rl.algorithms.registry import find_policy_loss
from mcore_rl.rewards import functions as reward_functions


@pytest.fixture
def restored_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test imports from a user's file is known to no other test."""
    find_policy_loss("ppo_clip")  # the built-in ones come with the first look-up
    for module, table in (
        (registry, "_ESTIMATORS"),
        (registry, "_POLICY_LOSSES"),
        (registry, "_IMPORTED"),
        (reward_functions, "_BY_NAME"),
    ):
        monkeypatch.setattr(module, table, dict(getattr(module, table)))
