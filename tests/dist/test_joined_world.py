"""A world that joins several jobs, whose processes may end at any time."""

from __future__ import annotations

from tests.rank_pool import RankPool


def test_the_end_of_a_worker_ends_the_update_of_all_others(ranks: RankPool) -> None:
    # The world's timeout is longer than that of the job: nobody waits for it.
    outcomes = ranks.run_raw(
        "tests.dist.joined_world_jobs:worker_ends", world_size=4, timeout_seconds=120
    )
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0, 3], outcomes[0].output[-4000:]
    told = {outcome.result for outcome in outcomes[:3]}
    assert len(told) == 1  # the first failure
    assert "the connection broke" in told.pop()


def test_a_worker_that_hangs_ends_the_update_of_all_others_once_it_is_known(
    ranks: RankPool,
) -> None:
    # The worker hangs until the others have ended, in a world with a timeout of five minutes.
    outcomes = ranks.run_raw(
        "tests.dist.joined_world_jobs:worker_hangs", world_size=4, timeout_seconds=120
    )
    assert [outcome.exit_code for outcome in outcomes] == [0] * 4, outcomes[0].output[-4000:]
    for outcome in outcomes[:3]:  # the last one may find the messages of the others, and end well
        assert ["http://b does not answer" in told for told in outcome.result] == [True] * 2


def test_workers_receive_changes_only(ranks: RankPool) -> None:
    *trainers, first, second = ranks.run("tests.dist.joined_world_jobs:sends_changes", world_size=4)
    assert [each["received"] for each in trainers] == [[0, 0, 0]] * 2
    for worker in (first, second):
        whole, unchanged, changed = worker["received"]
        assert worker["equal"] and whole >= worker["needed"] == 2 << 16
        assert unchanged < changed < whole / 10


def test_a_wait_for_the_device_ends_with_its_messages_or_with_a_failure(ranks: RankPool) -> None:
    told, _ = ranks.run("tests.dist.joined_world_jobs:waits_for_kernels", world_size=2)
    assert told[0] == "no error"
    assert "the server refused the call" in told[1]
    assert "rank 1: its loader failed" in told[2]
