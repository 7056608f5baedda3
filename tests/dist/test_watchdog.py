"""A rank that is stuck ends the run in time, and everybody reads which one it is."""

from __future__ import annotations

import re

import pytest

from mcore_rl.observe.watchdog import EXIT_STUCK
from tests.rank_pool import RankPool

pytestmark = pytest.mark.timeout(200)


def said_by(ranks: RankPool, stopped_rank: int | None) -> tuple[list[int], str]:
    outcomes = ranks.run_raw(
        "tests.dist.watchdog_jobs:one_is_stuck",
        world_size=3,
        stopped_rank=stopped_rank,
        timeout_seconds=150,
    )
    return [o.exit_code for o in outcomes], "".join(o.output for o in outcomes)


def test_the_stuck_rank_is_named_with_its_stack(ranks: RankPool) -> None:
    codes, said = said_by(ranks, stopped_rank=None)
    assert codes == [EXIT_STUCK] * 3
    assert said.count("--rl-stage-timeout-seconds 3;") == 1
    assert re.search(r"rank 1, \d+ s in reward:\n(    .*\n)*    .* in a_reward_that_hangs\n", said)
    assert re.search(r"ranks 0, 2, \d+ s in reward:\n(    .*\n)*    .* in barrier\n", said)


def test_a_rank_that_is_stopped_is_named_too(ranks: RankPool) -> None:
    codes, said = said_by(ranks, stopped_rank=2)
    assert codes[:2] == [EXIT_STUCK] * 2  # the launcher of a job kills the third
    assert "rank 2 gave no answer" in said
    assert "in a_reward_that_hangs" in said


def test_a_rank_that_lets_no_thread_run_is_ended_too(ranks: RankPool) -> None:
    (outcome,) = ranks.run_raw(
        "tests.dist.watchdog_jobs:holds_the_lock", world_size=1, timeout_seconds=150
    )
    assert outcome.exit_code == 1
    assert "Timeout (0:00:03)!" in outcome.output and "in holds_the_lock" in outcome.output
