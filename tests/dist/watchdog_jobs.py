"""What a rank does in `test_watchdog.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil
import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.observe import watchdog
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.watchdog import StageWatchdog, own_connection


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
    while any(_runs(pid) for pid in others):
        time.sleep(0.1)
    os.kill(stopped, signal.SIGKILL)
    os._exit(0)


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def a_reward_that_hangs() -> None:
    time.sleep(600)


def holds_the_lock() -> None:
    """C code that lets no other thread run, so that only faulthandler is left."""
    watchdog._BACKSTOP_SECONDS = 2.0
    dog = StageWatchdog(1.0, rank=0, world_size=1)
    dog.enter("reward")
    len(str(9 ** (9**9)))
