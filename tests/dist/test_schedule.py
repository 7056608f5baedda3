"""Two TP ranks schedule random rollouts alike, whatever ends them, and continue after a sleep.

With the external launcher each rank has its own scheduler, and nothing tells it what the others
do. The device is played, so that what runs on CUDA alone runs here: vLLM's scheduler of steps ahead
of their results, and its connector that reports experts. See `schedule_device`, which compares the
ranks at every step, and `schedule_jobs`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.schedule_jobs import ENDINGS
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

MODEL_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}  # which alone reports experts, on CUDA
AHEAD = {"ahead, many blocks": (True, 200), "ahead, few blocks": (True, 13)}
CASES = {**AHEAD, "not ahead, few blocks": (False, 13)}


@pytest.fixture(scope="module", params=CASES)
def found(
    request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> dict[str, Any]:
    ahead, num_blocks = CASES[request.param]
    of_ranks = ranks.run(
        "tests.dist.schedule_jobs:scheduled",
        world_size=2,
        environment=MODEL_RUNNER,
        checkpoint=checkpoint_factory("qwen3_moe"),
        ahead=ahead,
        num_blocks=num_blocks,
        seeds=list(range(60)),
    )
    for rank in of_ranks:
        for rollout in rank["rollouts"]:
            assert len(set(rollout["answered"])) == len(rollout["answered"]), "answered twice"
    assert of_ranks[0] == of_ranks[1]
    return {"case": request.param, **of_ranks[0]}


def test_tokens_and_experts_of_every_rollout_are_those_of_the_device(found: dict[str, Any]) -> None:
    assert [each["wrong"] for each in found["rollouts"]] == [[]] * 60


def test_rollouts_end_in_every_way(found: dict[str, Any]) -> None:
    """So that the ranks were compared where they could differ."""
    assert {each["ending"] for each in found["rollouts"]} == set(ENDINGS)
    assert {reason for each in found["rollouts"] for reason in each["reasons"]} == {
        "length",
        "stop",
    }
    assert found["num_hits"] > 20
    if found["case"].endswith("few blocks"):
        assert found["num_preempted"] > 5 and found["num_evicted"] > 100
    steps_left = sum(each["steps_left"] for each in found["rollouts"])
    assert steps_left > 30 if found["case"] in AHEAD else steps_left == 0


def test_ranks_differ_without_the_patch(
    checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    outcomes = ranks.run_raw(
        "tests.dist.schedule_jobs:scheduled",
        world_size=2,
        environment=MODEL_RUNNER,
        checkpoint=checkpoint_factory("qwen3_moe"),
        ahead=True,
        num_blocks=13,
        seeds=list(range(60)),
        without_patch="vllm.aborts_in_order",
    )
    for outcome in outcomes:
        assert re.search(r"step \d+: (free|tables|new) differ by rank", outcome.output)
