"""A tool of one second with a long-tailed number of calls, for `separate_engines.py`. The processes
of its samples import only this module."""

from __future__ import annotations

import asyncio
import random

from mcore_rl.api.environment import Environment, EnvironmentPrompt, Response, StepResult

SECONDS = 1.0
MEDIAN_CALLS, SIGMA, MOST_CALLS = 2.0, 0.7, 10
OBSERVED = [7, 8, 9, 10]


class TailTool(Environment):
    """Answer after a second; the number of calls of a sample is log-normal."""

    async def start(self, prompt: EnvironmentPrompt) -> None:
        drawn = random.Random(prompt.seed)
        self._num_calls = min(MOST_CALLS, round(drawn.lognormvariate(0.0, SIGMA) * MEDIAN_CALLS))
        self._reward = float(drawn.random() < 0.5)

    async def step(self, response: Response) -> StepResult:
        if response.turn > self._num_calls:
            return StepResult(reward=self._reward, done=True)
        await asyncio.sleep(SECONDS)
        return StepResult(OBSERVED)
