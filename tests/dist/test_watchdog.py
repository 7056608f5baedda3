"""A rank that is stuck ends the run in time, and everybody reads which one it is."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.observe import watchdog
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.watchdog import EXIT_STUCK, StageWatchdog, own_connection
from tests.processes import lives
from tests.rank_pool import RankPool

pytestmark = pytest.mark.timeout(200)

JOBS = "tests.dist.test_watchdog"


def one_is_stuck(stopped_rank: int | None) -> None:
    """Rank 1 sleeps in the reward, the others wait for it; one may be stopped by a signal."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dog = StageWatchdog(3.0, rank=rank, world_size=dist.get_world_size(), connect=own_connection)
    timers = StageTimers(dog)
    pids = objects.all_gather(os.getpid())
    with timers("reward"):
        if rank == stopped_rank:
            _be_killed_after([pid for pid in pids if pid != os.getpid()])
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1:
            a_reward_that_hangs()
        dist.barrier()


def _be_killed_after(others: list[int]) -> None:
    """As the launcher of a job kills what is left."""
    stopped = os.getpid()
    if os.fork():
        return
    while any(map(lives, others)):
        time.sleep(0.1)
    os.kill(stopped, signal.SIGKILL)
    os._exit(0)


def a_reward_that_hangs() -> None:
    time.sleep(600)


def holds_the_lock() -> None:
    """C code that lets no other thread run, so that only faulthandler is left."""
    watchdog._BACKSTOP_SECONDS = 2.0
    dog = StageWatchdog(1.0, rank=0, world_size=1)
    dog.enter("reward")
    len(str(9 ** (9**9)))


def said_by(ranks: RankPool, stopped_rank: int | None) -> tuple[list[int], str]:
    outcomes = ranks.run_raw(
        f"{JOBS}:one_is_stuck",
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
    (outcome,) = ranks.run_raw(f"{JOBS}:holds_the_lock", world_size=1, timeout_seconds=150)
    assert outcome.exit_code == 1
    assert "Timeout (0:00:03)!" in outcome.output and "in holds_the_lock" in outcome.output
