"""A tool that takes its time, for `rollout_worker.py`, of which its processes import nothing."""

from __future__ import annotations

import asyncio

from mcore_rl.api.environment import Environment, Response, StepResult

SECONDS = 0.2
OBSERVED = [7, 8, 9, 10]


class SlowTool(Environment):
    """Answers the first turn after a while, and ends with the second."""

    async def step(self, response: Response) -> StepResult:
        if response.turn == 2:
            return StepResult(reward=1.0, done=True)
        await asyncio.sleep(SECONDS)
        return StepResult(OBSERVED)
