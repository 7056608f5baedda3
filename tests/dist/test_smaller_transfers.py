"""A cast at the source, and sending changes only: the same weights arrive, with fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.layouts import SPLITS, job_flags
from tests.rank_pool import RankPool


@pytest.fixture(scope="module")
def results(checkpoint_factory: Callable[..., Path], ranks: RankPool) -> list[dict[str, Any]]:
    flags = job_flags(checkpoint_factory("deepseek_v3"), "tp2_pp2_ep2", "--lr", "1e-2")
    return ranks.run(
        "tests.dist.smaller_transfers_jobs:hand_overs",
        world_size=SPLITS["tp2_pp2_ep2"][3],
        flags=flags,
    )


def test_engine_stores_the_same_by_every_way(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["same_as_whole"] == [True] * 4
        assert result["attested"] == [True] * 4
        # Equal, one matrix changed, updated: three versions in five hand-overs.
        assert result["num_versions"] == [3]


def test_narrower_dtype_halves_what_is_received(results: list[dict[str, Any]]) -> None:
    for result in results:
        whole, narrow = result["whole_received"], result["bf16_received"]
        # Everything but the router, which stays in float32: 64 weights and a bias of 8 experts.
        router = 8 * (64 + 1) * 4
        assert [2 * n for n in narrow] == [pytest.approx(w, abs=router) for w in whole]
        assert [n + s for n, s in zip(narrow, result["bf16_saved"], strict=True)] == whole


def test_router_stays_in_float32(results: list[dict[str, Any]]) -> None:
    more = {2 * result["bf16_received"][0] - result["whole_received"][0] for result in results}
    assert more == {0, 8 * (64 + 1) * 4}, "ranks that have the router's layer, and those without"


def test_only_changes_travel(results: list[dict[str, Any]]) -> None:
    for result in results:
        whole, delta = result["whole_received"], result["delta_received"]
        first, unchanged, one_matrix, updated, full = delta
        assert whole[0] <= first < 1.01 * whole[0], "headers beside everything"
        assert unchanged < 0.01 * whole[0]
        assert unchanged < one_matrix < 0.5 * whole[0]
        assert one_matrix < updated
        assert whole[0] <= full < 1.01 * whole[0], "nothing changed, but it was the fourth since"
        assert [d + s for d, s in zip(delta, result["delta_saved"], strict=True)] == whole


def test_both_ways_add_up(results: list[dict[str, Any]]) -> None:
    for result in results:
        both = zip(result["both_received"], result["both_saved"], strict=True)
        assert [received + saved for received, saved in both] == result["whole_received"]
        assert result["both_received"][0] < 0.51 * result["whole_received"][0]
