"""Engines that sample ahead, on real engines whose weights change under their responses.

What the ranks do is in `ahead_jobs`; it runs once a case, and each test looks at a part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.ahead_jobs import NUM_GROUPS, NUM_SAMPLES, NUM_STEPS
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

CASES: dict[str, dict[str, Any]] = {
    "TP1": {"tp_size": 1, "staleness": 2, "spoils": True},
    "kept KV": {"arch": "qwen3", "staleness": 2, "kv": "keep", "scale": 7},
    "TP2": {"tp_size": 2, "staleness": 1},
    "environment": {"tp_size": 2, "staleness": 2, "has_environments": True},
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(
    case: str,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    arguments = dict(CASES[case])
    checkpoint = checkpoint_factory(arguments.pop("arch", "deepseek_v3"))
    work = tmp_path_factory.mktemp("ahead")
    job = "tests.dist.ahead_jobs:sample_ahead"
    return ranks.run(job, world_size=2, checkpoint=checkpoint, work=work, **arguments)


def test_every_part_of_a_response_has_the_log_probs_of_the_weights_of_its_version(
    case: str, run: list[dict[str, Any]]
) -> None:
    assert sum(of_rank["mixed"] for of_rank in run) >= 4
    for of_rank in run:
        if case != "kept KV":  # keys and values of earlier weights
            assert of_rank["own"] < 1e-3 < 0.02 < of_rank["others"]


def test_every_draw_is_trained_once_and_none_is_older_than_it_may_be(
    case: str, run: list[dict[str, Any]]
) -> None:
    steps = run[0]["steps"]
    assert [step["draws"] for step in steps] == [step["draws"] for step in run[1]["steps"]]
    for step in steps:
        assert len(step["draws"]) == NUM_GROUPS and step["rewarded"]
        assert step["num_samples"] == NUM_GROUPS * NUM_SAMPLES
        assert 0 <= step["metrics"]["rollout/staleness_max"] <= CASES[case]["staleness"]
    assert max(step["metrics"]["rollout/staleness_max"] for step in steps) > 0
    draws = [draw for step in steps for draw in step["draws"]]
    end = json.loads(Path(run[0]["end"]).read_text())
    known = {*draws, *map(int, end["outstanding"])}
    assert len(draws) == len(set(draws)) == NUM_GROUPS * NUM_STEPS
    assert len(known) == len(draws) + len(end["outstanding"])
    assert known == set(range(end["next_draw"]))


def test_metrics_count_every_started_group_once_across_the_resumption(
    case: str, run: list[dict[str, Any]]
) -> None:
    end = json.loads(Path(run[0]["end"]).read_text())
    counted = sum(step["metrics"]["rollout/started_groups"] for step in run[0]["steps"])
    assert counted + end["uncounted"].get("started_groups", 0) == end["next_draw"]


def test_groups_that_finished_after_the_checkpoint_are_not_sampled_again(
    case: str, run: list[dict[str, Any]]
) -> None:
    if case == "environment":
        pytest.skip("its bank is removed")
    assert run[0]["num_banked"] >= NUM_GROUPS
    num_banked, num_skipped = run[0]["of_another"]  # that began with another model
    assert num_banked == 0 and num_skipped > 0
    lost = {draw for step in run[0]["lost"] for draw in step["draws"]}
    again = {draw for step in run[0]["steps"] for draw in step["draws"]}
    assert lost <= again
    if "spoils" in CASES[case]:
        (said,) = run[0]["skipped"]
        assert ".bank: record at byte" in said and "its checksum differs" in said
    else:
        assert not run[0]["skipped"]


def test_groups_of_a_colocated_run_without_tokens_or_of_another_size_are_sampled(
    case: str, run: list[dict[str, Any]]
) -> None:
    if "spoils" not in CASES[case]:
        pytest.skip("one case suffices")
    before, after = (json.loads(Path(each).read_text()) for each in run[0]["colocated"])
    assert before["outstanding"] == {"4": NUM_STEPS, "5": NUM_STEPS}
    step = run[0]["colocated_step"]
    assert step["rewarded"] and step["metrics"]["rollout/stale_groups"] == 0
    known = {*step["draws"], *map(int, after["outstanding"])}
    assert known == {4, 5, *range(8, after["next_draw"])}


def test_resumed_run_continues_the_conversations_of_its_checkpoint(
    case: str, run: list[dict[str, Any]]
) -> None:
    if case != "environment":
        pytest.skip("nothing answers")
    assert run[0]["restored"] and max(run[0]["restored"]) > 0  # some had turns behind them
    assert not run[0]["failures"] and set(run[0]["turns"]) == {3}


def test_no_request_finds_keys_of_weights_that_it_has_not_begun_with(
    case: str, run: list[dict[str, Any]]
) -> None:
    """Engines on CPU have blocks of 32 positions, and none of MLA that may be shared."""
    if case != "kept KV":
        pytest.skip("nothing is kept")
    continuing = 0
    for of_rank in run:
        known: set[tuple[int, str]] = set()
        for each in of_rank["begun"]:
            length, key = len(each["tokens"]), (each["version"], str(each["tokens"][:140]))
            if length == 140 and key not in known:
                assert each["cached"] == 0  # though the prompt was there, of other weights
            if length == 140:
                known.add(key)
            elif each["cached"] > 128:
                assert each["cached"] == (length - 1) // 32 * 32
                continuing += 1
    assert continuing > 4
    assert max(of_rank["own"] for of_rank in run) > 1e-3  # what was kept is of earlier weights
