"""Rewards for tests, from the values of flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_rl.rewards.options import RewardOptions
from mcore_rl.rewards.specs import RewardSpec, parse_rewards


def rewards_of(names: str, *, imports: Sequence[str] = (), **options: Any) -> RewardSpec:
    """`parse_rewards` with these fields of RewardOptions."""
    return parse_rewards(names, RewardOptions(**options), imports)
