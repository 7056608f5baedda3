"""Environments with long tails: a tool, for `separate_engines.py`, and a verifier, for
`way_accuracy.py`. The processes of their samples import only this module and the reward's."""

from __future__ import annotations

import asyncio
import random

from mcore_rl.api.environment import Environment, EnvironmentPrompt, Response, StepResult
from mcore_rl.rewards.functions import arithmetic

SECONDS = 1.0
MEDIAN_CALLS, SIGMA, MOST_CALLS = 2.0, 0.7, 6
OBSERVED = [7, 8, 9, 10]
MEDIAN_SECONDS, SPREAD, MOST_SECONDS = 0.5, 1.0, 5.0  # of the verifier


class TailTool(Environment):
    """Answer after a second; the number of calls of a sample is log-normal."""

    async def start(self, prompt: EnvironmentPrompt) -> None:
        drawn = random.Random(prompt.seed)
        self._num_calls = min(MOST_CALLS, round(drawn.lognormvariate(0.0, SIGMA) * MEDIAN_CALLS))
        self._reward = float(drawn.random() < 0.5)

    def state(self) -> None:
        return None

    async def restore(self, prompt: EnvironmentPrompt, state: None) -> None:
        await self.start(prompt)

    async def step(self, response: Response) -> StepResult:
        if response.turn > self._num_calls:
            return StepResult(reward=self._reward, done=True)
        await asyncio.sleep(SECONDS)
        return StepResult(OBSERVED)


class TailVerifier(Environment):
    """Pay one answer by `arithmetic` after a time that is log-normal."""

    async def start(self, prompt: EnvironmentPrompt) -> None:
        self._prompt = prompt
        drawn = random.Random(prompt.seed).lognormvariate(0.0, SPREAD)
        self._seconds = min(MOST_SECONDS, drawn * MEDIAN_SECONDS)

    def state(self) -> None:
        return None

    async def restore(self, prompt: EnvironmentPrompt, state: None) -> None:
        await self.start(prompt)

    async def step(self, response: Response) -> StepResult:
        await asyncio.sleep(self._seconds)
        asked = self._prompt
        reward = arithmetic(prompt=asked.text, response=response.text, answer=asked.answer)
        return StepResult(reward=reward, done=True)
