"""An environment that does what its row says; made in processes of its own by tests."""

from __future__ import annotations

import os
import random
import time

from mcore_rl.environments.interface import (
    Environment,
    EnvironmentPrompt,
    Response,
    StepResult,
)


class Counting(Environment):
    """Three turns, counted by a state; slow if its row says so."""

    def start(self, prompt: EnvironmentPrompt) -> None:
        self._prompt, self._count = prompt, 0

    def state(self) -> dict[str, int]:
        return {"count": self._count}

    def restore(self, prompt: EnvironmentPrompt, state: dict[str, int]) -> None:
        self._prompt, self._count = prompt, state["count"]

    def step(self, response: Response) -> StepResult:
        if self._prompt.row.get("how") == "slow":
            time.sleep(0.3)
        self._count += 1
        assert self._count == response.turn
        return StepResult("sum " + "b" * self._count, self._count, done=self._count == 3)


class Misbehaving(Environment):
    """Three turns where it is good."""

    def start(self, prompt: EnvironmentPrompt) -> None:
        self.how = prompt.row["how"]

    def step(self, response: Response) -> StepResult:
        if self.how == "hesitates":
            time.sleep(random.random() / 20)  # of a seed that is the sample's
        if self.how == "hangs":
            time.sleep(3600)
        if self.how == "dies":
            os._exit(3)
        if self.how == "floods":
            return StepResult("x" * (8 << 20))
        if self.how == "nonsense":
            return None  # type: ignore[return-value]
        if self.how == "raises":
            raise KeyError("nothing there")
        paid = {1: 0.25, 2: 0.5, 3: 1.0}[response.turn]
        return StepResult(f"sum {response.turn}", paid, done=response.turn == 3)
