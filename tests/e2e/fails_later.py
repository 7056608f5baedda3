"""Imported by `--rl-import`: an async reward that raises from the third step on, as long as a file
is there. The trainer's first rank makes the file; its processes for rewards see it."""

import asyncio
import os
from pathlib import Path

from mcore_rl.rewards.functions import reward

FAILS = Path(os.environ["MCORE_RL_TEST_REWARD_FAILS"])
FIRST_TO_FAIL = 2


@reward("fails_later")
async def fails_later(*, prompt: str, response: str, answer: str) -> float:
    await asyncio.sleep(0)
    if FAILS.exists():
        raise ConnectionError("the judge is away")
    return len(response) % 7 / 7


def make_the_file_in_the_third_step() -> None:
    from mcore_rl.train import Run

    collect, calls = Run.collect, []

    def collect_and_fail(self, *args):
        calls.append(None)
        if len(calls) == FIRST_TO_FAIL + 1 and "MCORE_RL_TEST_REWARD_STAYS" not in os.environ:
            FAILS.touch()
        return collect(self, *args)

    Run.collect = collect_and_fail


if "RANK" in os.environ:  # not in the workers of rewards, which import this as well
    make_the_file_in_the_third_step()
