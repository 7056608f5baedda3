"""Responses that continue under later weights, and groups that come too late, on real engines.

What the ranks do is in `partial_jobs`; it runs once a layout, and each test looks at a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.partial_jobs import LIMIT, NUM_GROUPS, NUM_SAMPLES
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

Steps = list[dict[str, Any]]


def run(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, **arguments: Any
) -> list[dict[str, Any]]:
    checkpoint = checkpoint_factory(arguments.pop("arch", "deepseek_v3"))
    return ranks.run(
        "tests.dist.partial_jobs:partial_rollouts", world_size=2, checkpoint=checkpoint, **arguments
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["TP1", "TP2"])
def kept(
    request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> list[dict[str, Any]]:
    return run(checkpoint_factory, ranks, tp_size=request.param, keeps=True)


def test_every_token_has_the_log_prob_of_the_weights_that_sampled_it(
    kept: list[dict[str, Any]],
) -> None:
    for of_rank in kept:
        assert of_rank["own"] < 1e-3 < 0.02 < of_rank["others"]
    assert sum(of_rank["mixed"] for of_rank in kept) >= 4


def test_no_group_is_lost_and_none_older_than_it_may_be(kept: list[dict[str, Any]]) -> None:
    steps: Steps = kept[0]["steps"]
    for step, other in zip(steps, kept[1]["steps"], strict=True):  # which all ranks are told alike
        assert step | {"cached": None} == other | {"cached": None}
    pending, draws = 0, []
    for step in steps:
        started, pending_before = step["metrics"]["rollout/started_groups"], pending
        pending = step["metrics"]["rollout/pending_groups"]
        assert step["metrics"]["rollout/dropped_groups"] == 0
        assert pending_before + started == NUM_GROUPS + pending
        assert len(step["draws"]) == NUM_GROUPS * NUM_SAMPLES and step["rewards"]
        assert max(step["staleness"]) <= LIMIT
        draws += sorted(set(step["draws"]))
    assert len(draws) == len(set(draws)) == NUM_GROUPS * len(steps)
    assert max(max(step["staleness"]) for step in steps) > 0


def test_without_continuing_what_comes_too_late_is_dropped_and_counted(
    checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    found = run(checkpoint_factory, ranks, keeps=False)
    steps: Steps = found[0]["steps"]
    left = 0
    for step in steps:
        dropped = step["metrics"]["rollout/dropped_groups"]
        assert step["metrics"]["rollout/started_groups"] == NUM_GROUPS + dropped
        assert "rollout/pending_groups" not in step["metrics"]
        assert not any(step["staleness"])
        left += dropped
    assert left > 0
    assert all(of_rank["own"] < 1e-3 for of_rank in found)


def test_keys_and_values_are_kept_where_they_are_to_be(
    checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    """Engines on CPU have blocks of 32 positions, and none of MLA that may be shared."""
    found = run(checkpoint_factory, ranks, arch="qwen3", keeps=True, scale=7, kv="keep")
    steps = [step for of_rank in found for step in of_rank["steps"][1:]]
    continuing = [each for step in steps for each in step["cached"]["continuing"]]
    beginning = [each for step in steps for each in step["cached"]["beginning"]]
    # All whole blocks but one that would leave nothing to compute; the prompt has one of them.
    assert all(cached == (length - 1) // 32 * 32 for length, cached in continuing)
    assert max(cached for _, cached in continuing) > 128
    assert beginning and not any(beginning)  # though the prompt was there, of other weights
    assert max(of_rank["own"] for of_rank in found) > 1e-3  # what was kept is of earlier ones
