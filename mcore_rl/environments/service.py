"""The program of environments' processes: it runs a user's class for the trainer, turn by turn.

It, and whatever it imports, must stay free of torch, Megatron, vLLM and numpy.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mcore_rl.environments import wire
from mcore_rl.environments.interface import (
    EnvironmentPrompt,
    Response,
    SingleTurn,
    resolve_environment,
)
from mcore_rl.isolation.process import Service, awaited, guarded
from mcore_rl.isolation.zygote import run_zygote


def main(control: int, parent: int) -> None:
    """Run the zygote of an `EnvironmentPool`; see `zygote_process.start_process`."""
    run_zygote(control, parent, _load)


def _load(settings: dict[str, Any]) -> Callable[[], Service]:
    classes = {
        name: resolve_environment(name, () if number else settings["imports"])
        for number, name in enumerate(settings["specs"])
    }
    return lambda: _EnvironmentService(classes, settings["timeout_seconds"])


class _EnvironmentService:
    """One sample's environment."""

    def __init__(self, classes: Mapping[str, type], timeout_seconds: float) -> None:
        self._classes, self._timeout_seconds = classes, timeout_seconds
        self._environment: Any = None

    def answer(self, request: dict[str, Any] | None) -> object:
        """Start an `environment` with a `prompt`, or take a step with a `response`."""
        if request is None:
            return None  # the zygote has imported the classes
        call = self._start if "prompt" in request else self._step
        return guarded(lambda: call(request), self._timeout_seconds)

    def _start(self, request: dict[str, Any]) -> list[Any]:
        fields = request["prompt"]
        _seed(fields["seed"])
        prompt = EnvironmentPrompt(**{**fields, "row": json.loads(fields["row"])})
        self._environment = self._classes.get(request["environment"], SingleTurn)()
        return wire.as_started(awaited(self._environment.start(prompt)))

    def _step(self, request: dict[str, Any]) -> list[Any]:
        fields = request["response"]
        response = Response(**{**fields, "token_ids": tuple(fields["token_ids"])})
        return wire.as_stepped(awaited(self._environment.step(response)))

    def close(self) -> None:
        """Call the environment's `close`, if it has one."""
        close = getattr(self._environment, "close", None)
        if close is not None:
            guarded(lambda: awaited(close()), self._timeout_seconds)


def _seed(seed: int) -> None:
    """Seed the random generators, whose state forks share."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
