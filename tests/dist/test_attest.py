"""Real hand-overs with a fault in each: it is found, named, repaired, or the run is stopped."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.attest_jobs import CANARY_TOLERANCE, EXPERTS, TRAVELS
from tests.dist.layouts import SPLITS, job_flags
from tests.rank_pool import RankPool

SPLIT = "tp2_pp2_ep2"  # rollout: two engines of TP2, ranks 0 and 1, and 2 and 3
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(checkpoint_factory: Callable[..., Path], ranks: RankPool) -> Results:
    """One start of the engines, and all hand-overs one after another."""
    flags = job_flags(checkpoint_factory("deepseek_v3"), SPLIT, precision="bf16")
    return ranks.run(
        "tests.dist.attest_jobs:attested_hand_overs", world_size=SPLITS[SPLIT][3], flags=flags
    )


def of(results: Results, name: str) -> list[dict[str, Any]]:
    """Each rank's report of one hand-over; asserts that they agree."""
    found = [result[name] for result in results]
    for field in ("ok", "mismatches", "faults", "sentence", "repeated", "canary"):
        assert all(other[field] == found[0][field] for other in found), field
    assert len({other["raised"] is None for other in found}) == 1
    return found


def assert_repaired(found: list[dict[str, Any]]) -> None:
    """Found, repeated once by the plain gather, and the engine then has the right weights."""
    for one in found:
        assert one["ok"] == [False, True]
        assert one["repeated"] and one["invalidated"] == 1
        assert one["raised"] is None
        assert one["stored_equal"]


def tensors_of(found: list[dict[str, Any]], problem: str) -> set[str]:
    return {tensor for tensor, _, _, text in found[0]["mismatches"] if text.startswith(problem)}


@pytest.mark.parametrize("name", ["clean", "sampled", "few_rows", "canary", "clean_again"])
def test_a_good_hand_over_is_attested_and_not_repeated(results: Results, name: str) -> None:
    for one in of(results, name):
        assert one["ok"] == [True] and not one["repeated"] and one["invalidated"] == 0
        assert one["stored_equal"] and one["raised"] is None


def test_every_element_is_hashed_once_at_its_source_and_once_where_it_is_needed(
    results: Results,
) -> None:
    hashed = sum(one["hashed_bytes"] for one in of(results, "clean"))
    needed = sum(result["needed_bytes"] for result in results)
    assert hashed == results[0]["served_bytes"] + needed
    # A sample hashes less, though this model's tensors are mostly too small to be sampled.
    assert sum(one["hashed_bytes"] for one in of(results, "sampled")) < 0.5 * hashed
    assert sum(one["hashed_bytes"] for one in of(results, "few_rows")) < 0.1 * hashed


def test_a_flipped_bit_is_named(results: Results) -> None:
    found = of(results, "flipped_bit")
    assert_repaired(found)
    assert len(found[0]["mismatches"]) == 1
    tensor, sources, destination, problem = found[0]["mismatches"][0]
    assert (tensor, destination, problem) == (TRAVELS, 0, "differs")
    assert set(sources) <= {2, 3}, "the second stage holds it"
    sentence = f"{TRAVELS}[0:64, 0:256] of rank 2 differs on rank 0"
    hashes = r" \(its hash is (\w{16}) as held and (\w{16}) as loaded\)"
    both = re.search(re.escape(sentence) + hashes, found[0]["sentence"])
    assert both and both[1] != both[2]


@pytest.mark.parametrize("name", ["swapped_experts", "few_rows_swapped"])
def test_swapped_experts_are_named(results: Results, name: str) -> None:
    found = of(results, name)
    assert_repaired(found)
    expected = {
        expert + f"{kind}_proj.weight" for expert in EXPERTS for kind in ("gate", "up", "down")
    }
    assert tensors_of(found, "differs") == expected
    assert not found[0]["faults"][0], "the loaders themselves have nothing to complain of"


@pytest.mark.parametrize("name", ["skipped_tensor", "sampled_skipped"])
def test_a_skipped_tensor_is_named_on_the_rank_that_lacks_it(results: Results, name: str) -> None:
    found = of(results, name)
    assert_repaired(found)
    (mismatch,) = found[0]["mismatches"]  # the other ranks had it
    assert (mismatch[0], mismatch[2]) == (TRAVELS, 1)
    assert mismatch[3].startswith("was not loaded (0 of ")


def test_a_stale_plan_is_found(results: Results) -> None:
    found = of(results, "stale_plan")
    assert_repaired(found)
    # What belongs to the neighbour came, and each rank misses some of its own.
    missing = {m[2] for m in found[0]["mismatches"] if m[3].startswith("was not loaded")}
    assert missing == {0, 1, 2, 3}


def test_a_slice_that_the_loader_drops_is_named(results: Results) -> None:
    found = of(results, "dropped_slice")
    assert_repaired(found)
    assert ["model.norm.weight", 2, "was not loaded (32 of 64 elements were)"] in [
        [m[0], *m[2:]] for m in found[0]["mismatches"]
    ]


def test_what_the_plain_gather_cannot_repair_stops_all_ranks(results: Results) -> None:
    for one in of(results, "broken_everywhere"):
        assert one["ok"] == [False, False]
        assert TRAVELS in one["raised"] and "nor by the plain gather" in one["raised"]


def test_gather_receives_what_other_ranks_hold(results: Results) -> None:
    for rank, result in enumerate(results):
        assert of(results, "flipped_bit")[rank]["gathered_bytes"] == result["to_gather_bytes"]
        assert result["whole_tensors"]


def test_canaries_agree_with_the_right_weights(results: Results) -> None:
    means, ok = of(results, "canary")[0]["canary"]
    assert ok and len(means) == 4
    assert 0 < max(means) <= CANARY_TOLERANCE


def test_canaries_see_what_is_stored_in_the_wrong_place(results: Results) -> None:
    for one in of(results, "misplaced_once"):
        assert one["ok"] == [True, True], "all was read as it should be"
        assert one["repeated"] and one["stored_equal"] and one["raised"] is None
    for one in of(results, "misplaced"):
        assert one["repeated"] and not one["stored_equal"]
        assert "canary prompt" in one["raised"] and "did not change that" in one["raised"]
        assert "raise --rl-canary-tolerance" in one["raised"]
