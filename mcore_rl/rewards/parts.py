"""The combination of a sample's rewards: weighted sum, failures and metrics.

    reward = sum over the parts of weight x value

A sample with a failed part has no reward, only the reason in `failure`: a sum without that part
would be on another scale than the rest of its group.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Rollout, ScoredRollout
from mcore_rl.rewards.functions import NO_FUNCTIONS
from mcore_rl.rewards.worker import Outcome

logger = logging.getLogger(__name__)

_HELD_UP_SECONDS, _HELD_UP_SHARE = 0.5, 0.1  # of a step, beyond which its rewards are too slow


def weighed(
    rollouts: Sequence[Rollout],
    outcomes: Mapping[str, Sequence[Outcome]],
    weights: Mapping[str, float],
) -> list[ScoredRollout]:
    """Return each rollout with the weighted sum of its parts, in order.

    `outcomes` maps each reward's name to the outcomes of all rollouts, `weights` to its weight. A
    sample's failure is the failure of its first failed part, which it names if there are several.
    """
    assert list(outcomes) == list(weights), f"{list(outcomes)} and {list(weights)} differ"
    return [
        _weighed_sample(rollout, dict(zip(outcomes, parts, strict=True)), weights)
        for rollout, *parts in zip(rollouts, *outcomes.values(), strict=True)
    ]


def _weighed_sample(
    rollout: Rollout, outcomes: Mapping[str, Outcome], weights: Mapping[str, float]
) -> ScoredRollout:
    parts = {name: outcome.reward for name, outcome in outcomes.items() if outcome.kind is None}
    for name, outcome in outcomes.items():
        if outcome.kind is not None:
            failure = outcome.failure if len(outcomes) == 1 else f"{name}: {outcome.failure}"
            return ScoredRollout(rollout, 0.0, failure, parts=parts)
    total = sum(weights[name] * value for name, value in parts.items())
    if not math.isfinite(total):
        return ScoredRollout(
            rollout, 0.0, f"the weighted sum of its rewards is {total}", parts=parts
        )
    return ScoredRollout(rollout, float(total), parts=parts)


def part_metrics(
    table: SampleTable,
    names: Sequence[str],
    is_used: Callable[[str], np.ndarray] | None = None,
) -> dict[str, float]:
    """Return `reward/<name>/mean` and `reward/<name>/failures` of each part, before its weight.

    The mean covers the samples on which the part did not fail, and is omitted if it failed on all;
    failures are counted in samples. `is_used` returns for which samples, `[n]` bool, a part is
    computed; None: for all.
    """
    metrics: dict[str, float] = {}
    for name in names:
        values = table.parts.get(name, np.full(len(table), np.nan))
        if is_used is not None:
            values = values[is_used(name)]
        valid = values[~np.isnan(values)]
        if len(valid):
            metrics[f"reward/{name}/mean"] = math.fsum(v / len(valid) for v in valid.tolist())
        metrics[f"reward/{name}/failures"] = float(len(values) - len(valid))
    return metrics


class WaitLog:
    """Log lines for steps that reward functions hold up: the first, and those that wait twice as
    long as the last one that was logged."""

    def __init__(self, names: Sequence[str]) -> None:
        self._has_functions = any(name not in NO_FUNCTIONS for name in names)
        self._logged_seconds = 0.0

    def line(self, reward_seconds: float, step_seconds: float) -> str | None:
        """Return the line for a step that waited for rewards after its last token, if any."""
        is_held_up = (
            reward_seconds > _HELD_UP_SECONDS and reward_seconds > _HELD_UP_SHARE * step_seconds
        )
        if not is_held_up or not self._has_functions or reward_seconds < 2 * self._logged_seconds:
            return None
        self._logged_seconds = reward_seconds
        return (
            f"rewards hold up the step: {reward_seconds:.1f} of {step_seconds:.1f} s were spent on "
            "them after the last token; raise --rl-reward-workers if cores are free, or make the "
            "reward faster"
        )


class FailureLog:
    """The failure counts of one reward by kind; the first failure of each kind is logged."""

    def __init__(self, name: str) -> None:
        self.counts: Counter[str] = Counter()
        self._name = name

    def note(self, outcomes: Sequence[Outcome]) -> None:
        """Count the failures among some outcomes."""
        for outcome in outcomes:
            if outcome.kind is None:
                continue
            if outcome.kind not in self.counts:
                logger.warning(
                    "reward %s failed on a sample, which has no reward; the first failure of this "
                    "kind: %s",
                    self._name,
                    outcome.failure,
                )
            self.counts[outcome.kind] += 1
