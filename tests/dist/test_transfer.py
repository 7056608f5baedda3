"""Transfers over gloo: bit for bit, within the bucket, overlapped, without hangs."""

from __future__ import annotations

import pytest

from tests.rank_pool import RankPool

JOBS = "tests.dist.transfer_jobs"


@pytest.mark.parametrize("world_size", [2, 4])
def test_random_plans_arrive_bit_for_bit_through_any_bucket(
    ranks: RankPool, world_size: int
) -> None:
    results = ranks.run(f"{JOBS}:arrivals", world_size=world_size, num_plans=3)
    for result in results:
        assert result["runs"] == 3 * 4 * 2
    assert max(max(result["num_buckets"]) for result in results) > 100
    assert min(min(result["num_buckets"]) for result in results) <= 1


def test_memory_in_flight_stays_within_the_bucket(ranks: RankPool) -> None:
    sender, receiver = ranks.run(f"{JOBS}:bounded_memory", world_size=2)
    bucket = receiver["bucket_bytes"]
    assert receiver["received_bytes"] == receiver["total_bytes"] > 20 * bucket
    assert receiver["num_storages"] == 2  # all views of the two buffers that rotate
    assert receiver["storage_bytes"] == receiver["buffer_bytes"] <= bucket
    assert sender["buffer_bytes"] <= bucket
    for result in (sender, receiver):
        assert result["peak_extra_bytes"] < 2 * bucket


def test_delta_equals_the_values_in_every_version(ranks: RankPool) -> None:
    results = ranks.run(f"{JOBS}:delta_versions", world_size=3, num_plans=3)
    for result in results:
        for case in result:
            # The first, every fourth, and the one after a rank lost what it held.
            assert case["full"] == [True, False, False, False, True, False, True]
            assert case["frozen"] == [0]


def test_delta_sends_little_and_of_frozen_tensors_only_headers(ranks: RankPool) -> None:
    results = ranks.run(f"{JOBS}:delta_saves", world_size=3)
    for receiver in results[1:]:
        planned = receiver["planned_bytes"]
        first, sparse, nothing = receiver["rows"]
        assert first[:3] == [planned, 0, 0]
        assert sparse[0] + sparse[2] == planned
        assert sparse[0] < 0.06 * planned / 2  # of the one that is trained
        num_messages = nothing[3]
        assert nothing[:2] == [8 * num_messages, 8 * num_messages]
        assert num_messages < 20
    assert results[0]["rows"][1][0] == 0  # the source receives nothing


@pytest.mark.parametrize("with_delta", [False, True])
def test_failures_leave_nobody_hanging_and_the_next_run_whole(
    ranks: RankPool, with_delta: bool
) -> None:
    results = ranks.run(
        f"{JOBS}:failures", world_size=3, with_delta=with_delta, timeout_seconds=300
    )
    for result in results:
        assert f"rank 2 could not send {result['broken']}[" in result["error"]
        assert "the disk is on fire" in result["error"]
        assert "of torch.float64, expected" in result["wrong_dtype"]
        assert "--rl-reshard-bucket-mb" in result["too_small"]
        # Giving up costs nothing; after a fault nobody trusts what it holds.
        assert result["full"] == [not with_delta, True]
    assert "before the last one had ended" in results[1]["second_start"]


def test_next_bucket_travels_while_the_caller_works(ranks: RankPool) -> None:
    _, events = ranks.run(f"{JOBS}:overlap", world_size=2, with_delta=False)
    for number in range(6):
        at = events.index(["work", f"t{number}"])
        before, after = events[:at], events[at:]
        assert ["arrived", number] in before
        if number < 5:
            assert ["start", number + 1] in before
            assert ["arrived", number + 1] in after
        assert ["start", number + 2] not in before


def test_with_delta_sizes_go_ahead_of_the_next_bucket(ranks: RankPool) -> None:
    _, events = ranks.run(f"{JOBS}:overlap", world_size=2, with_delta=True)
    at = [events.index(["work", f"t{number}"]) for number in range(6)]
    started = [sum(what == "start" for what, _ in events[:i]) for i in at]
    arrived = [sum(what == "arrived" for what, _ in events[:i]) for i in at]
    # Sizes and contents each: while t0 is worked on, t1 and the sizes of t2 are on their way.
    assert started == [5, 7, 9, 11, 12, 12]
    assert arrived == [3, 5, 7, 9, 11, 12]


def test_one_group_serves_all_sets_but_those_that_have_one(ranks: RankPool) -> None:
    for rank, result in enumerate(ranks.run(f"{JOBS}:groups", world_size=4)):
        assert result["num_groups"] == result["made_here"] == 1
        assert result["left"] == 0
        assert result["as_planned"]
        assert result["num_known_groups"] == (rank < 3)
        assert result["peers"] == [other for other in range(4) if other != rank]
        assert result["received"] == result["planned"]
        assert result["spoken_to"] == [other for other in range(4) if other != rank]
