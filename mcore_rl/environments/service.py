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
    ToolCall,
    Turn,
    keeps_state,
    resolve_environment,
)
from mcore_rl.isolation.process import Service, awaited, guarded


def load(settings: dict[str, Any]) -> Callable[[], Service]:
    """Import the classes and return what creates an environment; see `run_zygote`."""
    classes = {
        name: resolve_environment(
            name, () if number else settings["imports"], needs_state=settings["needs_state"]
        )
        for number, name in enumerate(settings["specs"])
    }
    return lambda: _EnvironmentService(classes, settings["timeout_seconds"])


class _EnvironmentService:
    """One sample's environment."""

    def __init__(self, classes: Mapping[str, type], timeout_seconds: float) -> None:
        self._classes, self._timeout_seconds = classes, timeout_seconds
        self._environment: Any = None
        self._keeps_state = False

    def answer(self, request: dict[str, Any] | None) -> object:
        """Start an `environment` with a `prompt`, or restore it if `kept` is given, or take a step
        with a `response`."""
        if request is None:
            return None  # the zygote has imported the classes
        call = self._start if "prompt" in request else self._step
        return guarded(lambda: call(request), self._timeout_seconds)

    def _start(self, request: dict[str, Any]) -> list[Any]:
        fields, kept = request["prompt"], request.get("kept")
        # A restored environment draws other numbers than it drew before.
        _seed(fields["seed"] + (0 if kept is None else 1 + kept["num_turns"]))
        prompt = EnvironmentPrompt(**{**fields, "row": json.loads(fields["row"])})
        environment = self._classes.get(request["environment"], SingleTurn)
        self._environment, self._keeps_state = environment(), keeps_state(environment)
        if kept is not None:
            awaited(self._environment.restore(prompt, json.loads(kept["state"])))
            return [*wire.as_started(None), kept["state"], self._tools()]
        started = wire.as_started(awaited(self._environment.start(prompt)))
        return [*started, self._state(), self._tools()]

    def _tools(self) -> str | None:
        schemas = getattr(self._environment, "tool_schemas", ())
        return wire.checked_tools(wire.as_state(schemas)) if schemas else None

    def _step(self, request: dict[str, Any]) -> list[Any]:
        fields = request["response"]
        turn = fields["in_parts"]
        if turn is not None:
            turn = Turn(**{**turn, "calls": tuple(ToolCall(**each) for each in turn["calls"])})
        token_ids = tuple(fields["token_ids"])
        response = Response(**{**fields, "token_ids": token_ids, "in_parts": turn})
        stepped = wire.as_stepped(awaited(self._environment.step(response)))
        is_done = stepped[-1]
        return [*stepped, None if is_done else self._state()]

    def _state(self) -> str | None:
        if not self._keeps_state:
            return None
        return wire.as_state(awaited(self._environment.state()))

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
