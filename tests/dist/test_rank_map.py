"""Rank maps in vLLM's groups, and engines that hold a model only, on four gloo ranks.

What the ranks do is in `rank_map_jobs`; it runs once, and each test looks at one part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.checkpoints import NO_WEIGHT
from tests.rank_pool import RankPool

# case -> (TP, DP, rank map): what `rank_map_jobs.run` starts.
HELD = {
    "v3 TP2 EP2": (2, 1, (0, 1, 2, 3)),
    "v3 TP2 EP2 mapped": (2, 1, (2, 0, 1, 3)),
    "v3 TP2 x DP2 EP4": (2, 2, (0, 1, 2, 3)),
    "v3 TP2 x DP2 EP4 mapped": (2, 2, (3, 1, 2, 0)),
    "v3 TP1 x DP2 EP2": (1, 2, (0, 1, 2, 3)),
    "v3 TP4": (4, 1, (0, 1, 2, 3)),
    "v3 TP4 mapped": (4, 1, (0, 2, 1, 3)),
    "qwen3_moe TP1 x DP4 EP4": (1, 4, (0, 1, 2, 3)),
    "qwen3 TP2": (2, 1, (0, 1, 2, 3)),
    "qwen3 TP2 mapped": (2, 1, (0, 2, 1, 3)),
}
pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


@pytest.fixture(scope="module")
def results(checkpoint_factory: Callable[..., Path], ranks: RankPool) -> list[dict[str, Any]]:
    """What each of the four ranks saw."""
    names = ("deepseek_v3", "qwen3_moe", "qwen3")
    return ranks.run(
        "tests.dist.rank_map_jobs:run",
        world_size=4,
        checkpoints={name: str(checkpoint_factory(name)) for name in names},
    )


def _by_slot(results: list[dict[str, Any]], part: str, case: str) -> list[dict[str, Any]]:
    """What the ranks saw in one case, in the order of the slots they say they play."""
    found = sorted((rank[part][case] for rank in results), key=lambda r: r["place"]["slot"])
    assert [r["place"]["slot"] for r in found] == [0, 1, 2, 3]
    return found


def _expected_place(rank: int, tp_size: int, dp_size: int, rank_map: tuple[int, ...]) -> dict:
    slot = rank_map.index(rank)
    first = slot - slot % tp_size
    return {
        "slot": slot,
        "tp_rank": slot % tp_size,
        "dp_rank": slot // tp_size % dp_size,
        "engine_index": slot // (tp_size * dp_size),
        "num_engines": 4 // (tp_size * dp_size),
        "tp_group": list(rank_map[first : first + tp_size]),
    }


@pytest.mark.parametrize("case", HELD)
def test_ranks_play_the_slots_of_the_rank_map(results, case):
    tp_size, dp_size, rank_map = HELD[case]
    for rank, found in enumerate(results):
        found_place = dict(found["hold"][case]["place"])
        slot = rank_map.index(rank)
        expert_parallel = "EP" in case
        assert found_place.pop("ep_size") == (tp_size * dp_size if expert_parallel else 1)
        assert found_place.pop("ep_rank") == (slot % (tp_size * dp_size) if expert_parallel else 0)
        assert found_place == _expected_place(rank, tp_size, dp_size, rank_map)


def test_engines_that_generate_play_the_slots_too(results):
    for case, tp_size, rank_map in (("mapped", 2, (2, 0, 1, 3)), ("tp1", 1, (1, 3, 0, 2))):
        for rank, found in enumerate(results):
            found_place = dict(found["generate"][case]["place"])
            assert found_place.pop("ep_rank") == found_place["tp_rank"]
            assert found_place.pop("ep_size") == tp_size
            assert found_place == _expected_place(rank, tp_size, 1, rank_map)


def test_generation_under_a_rank_map_equals_that_under_the_identity(results):
    identity = _by_slot(results, "generate", "identity")
    mapped = _by_slot(results, "generate", "mapped")
    for there, here in zip(identity, mapped, strict=True):
        assert here["rollouts"] == there["rollouts"]
        assert here["scores"] == there["scores"]
    # The seeds are those of the engines.
    assert mapped[0]["rollouts"] == mapped[1]["rollouts"] != mapped[2]["rollouts"]
    assert mapped[2]["rollouts"] == mapped[3]["rollouts"]


def test_engines_of_one_rank_generate_under_a_rank_map(results):
    by_slot = _by_slot(results, "generate", "tp1")
    assert all(found["scores"] == by_slot[0]["scores"] for found in by_slot)
    rollouts = [found["rollouts"] for found in by_slot]
    assert all(rollouts[a] != rollouts[b] for a in range(4) for b in range(a))


@pytest.mark.parametrize(
    ("part", "identity", "mapped"),
    [
        ("generate", "identity", "mapped"),
        ("hold", "v3 TP2 EP2", "v3 TP2 EP2 mapped"),
        ("hold", "v3 TP2 x DP2 EP4", "v3 TP2 x DP2 EP4 mapped"),
        ("hold", "v3 TP4", "v3 TP4 mapped"),
        ("hold", "qwen3 TP2", "qwen3 TP2 mapped"),
    ],
)
def test_each_rank_needs_and_stores_the_shard_of_its_slot(results, part, identity, mapped):
    at_slots = _by_slot(results, part, identity)
    assert at_slots[0]["stored"] != at_slots[1]["stored"]
    for there, here in zip(at_slots, _by_slot(results, part, mapped), strict=True):
        assert here["stored"] == there["stored"]
        assert here["needs"] == there["needs"]


@pytest.mark.parametrize(
    ("generating", "held"), [("identity", "v3 TP2 EP2"), ("mapped", "v3 TP2 EP2 mapped")]
)
def test_a_model_only_needs_and_stores_what_an_engine_that_generates_does(
    results, generating, held
):
    for rank in results:
        assert rank["hold"][held]["stored"] == rank["generate"][generating]["stored"]
        assert rank["hold"][held]["needs"] == rank["generate"][generating]["needs"]


@pytest.mark.parametrize("case", HELD)
def test_slices_leave_what_the_own_loader_leaves_bit_for_bit(results, case):
    for rank in results:
        found = rank["hold"][case]
        assert len(found["stored"]) > 20
        assert [n for n in found["same_as_zeros"] if not NO_WEIGHT.search(n)] == []
        assert found["changed_by_slices"] == []


@pytest.mark.parametrize("case", HELD)
def test_a_closed_engine_frees_its_model(results, case):
    assert all(rank["hold"][case]["freed"] for rank in results)


def test_the_patch_is_applied_for_a_rank_map_only(results):
    assert all(rank["patched"] == [False, True] for rank in results)


def test_process_groups_keep_the_order_of_their_ranks(results):
    for rank in (0, 2, 3):
        for by_argument in ("True", "False"):
            assert results[rank]["order"][by_argument] == [[2, 0, 3], [2, 0, 3], [0, 2, 3]]


def test_own_all_reduce_gets_the_handles_of_ascending_ranks_only(results):
    """Why `all_reduce_obstacle` finds ranks in another order; drop that once vLLM is corrected."""
    for rank in (0, 2, 3):
        assert results[rank]["handles"]["[0, 2, 3]"] == [[0], [2], [3]]
        assert None in results[rank]["handles"]["[2, 0, 3]"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("tp", "UsageError: .*of 3 does not divide the world of 4 processes"),
        ("dp", "UsageError: .*2 x 4 data-parallel ranks = 8 does not divide the world of 4"),
        ("twice", "UsageError: the rank map 0,1,1,3 does not name each of the 4 ranks exactly"),
        ("short", "UsageError: the rank map 1,0 does not name each of the 4 ranks exactly once"),
        ("nodes", "UsageError: .*ranks 0,2 into one rollout TP group, .* 2 nodes of 2 ranks"),
        ("nodes kept", "no error"),
        ("cannot run", "UsageError: vLLM on CPU cannot run experts over 2 data-parallel ranks"),
        ("sleep twice", "RuntimeError: the engine already sleeps"),
        ("reload asleep", "RuntimeError: .*call wake_weights first"),
        ("wake twice", "RuntimeError: weights does not sleep"),
        ("reload", "no error"),
    ],
)
def test_impossible_placements_are_refused(results, case, words):
    for rank in results:
        assert re.match(words, rank["refusals"][case])
