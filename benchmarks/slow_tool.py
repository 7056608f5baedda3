"""Slow tools for the rollout benchmarks. Their processes import only this module."""

from __future__ import annotations

import asyncio

from mcore_rl.api.environment import Environment, Response, StepResult
from mcore_rl.environments.calculator import Calculator

SECONDS = 0.2
OBSERVED = [7, 8, 9, 10]


class SlowTool(Environment):
    """Answer the first turn after a delay, and end with the second."""

    async def step(self, response: Response) -> StepResult:
        if response.turn == 2:
            return StepResult(reward=1.0, done=True)
        await asyncio.sleep(SECONDS)
        return StepResult(OBSERVED)


class SlowCalculator(Calculator):
    """Show results after a delay."""

    async def step(self, response: Response) -> StepResult:
        found = await super().step(response)
        if not found.done:
            await asyncio.sleep(SECONDS)
        return found
