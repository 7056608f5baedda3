"""The program of reward workers, and the outcome of a sample.

Workers import only this module, its imports and what the user's functions import: all of these must
stay free of torch, Megatron, vLLM and numpy, except the user's own.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsFloat

from mcore_rl.common.readers import InvalidData, finite_number
from mcore_rl.common.user_code import import_user_file, source_hash
from mcore_rl.isolation.process import Service, awaited, guarded
from mcore_rl.isolation.wire import Failed, InvalidValue, as_text
from mcore_rl.rewards.functions import RewardFunction, resolve_reward, takes_row

Sample = tuple[str, str, Any, str]  # prompt, response, answer, row


class Outcome(NamedTuple):
    """The outcome of one sample; `kind` groups failures for counting and logging."""

    reward: float
    kind: str | None = None
    detail: str = ""

    @property
    def failure(self) -> str | None:
        """The reason of the failure, in words; None without one."""
        return None if self.kind is None else Failed(self.kind, self.detail).failure


def load(settings: dict[str, Any]) -> Callable[[], Service]:
    """Return what creates a worker of a `RewardPool`; see `run_zygote`."""
    # Workers import the user's modules, not the zygote: a module may start threads or initialize
    # CUDA, which a fork cannot use.
    return lambda: _RewardService(settings["specs"], settings["imports"])


class _RewardService:
    """A worker, which scores batches of samples."""

    def __init__(self, specs: Sequence[str], imports: Sequence[str]) -> None:
        self._specs, self._imports = specs, imports
        self._functions: dict[str, RewardFunction] = {}

    def answer(self, request: dict[str, Any] | None) -> object:
        """Resolve all functions and return their `source_hash` (None), or score `samples` by
        `spec`, with `seconds` for each.

        A sample that takes too long also loses the outcomes of the samples before it.
        """
        if request is None:
            for path in self._imports:
                import_user_file(path)
            self._functions = {spec: resolve_reward(spec) for spec in self._specs}
            return {spec: source_hash(each) for spec, each in self._functions.items()}
        started = time.perf_counter()
        function = self._functions[request["spec"]]
        gives_row = takes_row(function)
        outcomes = [
            score_sample(function, sample, request["seconds"], gives_row=gives_row)
            for sample in request["samples"]
        ]
        return [outcomes, time.perf_counter() - started]

    def close(self) -> None:
        """Functions have nothing to close."""


def score_sample(
    function: RewardFunction, sample: Sample, timeout_seconds: float, *, gives_row: bool
) -> Outcome:
    """Score one sample by one function. SIGALRM ends the process when the time is over.

    `gives_row` also passes all columns. Async results are awaited. Any fault of the reward function
    is part of the outcome; see `guarded`.
    """
    prompt, response, answer, row = sample
    given = {"row": json.loads(row)} if gives_row else {}

    def call() -> float:
        value = function(prompt=prompt, response=response, answer=answer, **given)
        return _checked(awaited(value))

    result = guarded(call, timeout_seconds)
    return (
        Outcome(0.0, result.kind, result.detail) if isinstance(result, Failed) else Outcome(result)
    )


def _checked(value: object) -> float:
    detail = "a reward is a finite number"
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        raise InvalidValue(f"returned {type(value).__name__}", detail)
    number = float(value)
    if not math.isfinite(number):
        raise InvalidValue(f"returned {number}", detail)
    return number


def as_sources(value: Any) -> dict[str, str]:
    """Return the hashes of functions' sources; none if a worker cannot have sent them."""
    is_right = isinstance(value, dict) and all(
        isinstance(each, str) and len(each) == 64 for each in value.values()
    )
    return dict(value) if is_right else {}


def as_outcomes(value: Any, num_samples: int) -> tuple[list[Outcome], float]:
    """Return the outcomes of a batch and their seconds; InvalidData if a worker cannot have sent
    them."""
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], list):
        raise InvalidData("it has other values than outcomes and seconds")
    seconds = finite_number(value[1])
    if seconds is None or seconds < 0:
        raise InvalidData("its seconds are not a number from 0 on")
    if len(value[0]) != num_samples:
        raise InvalidData(f"it does not have one outcome for each of {num_samples} samples")
    return [_as_outcome(parts) for parts in value[0]], seconds


def _as_outcome(parts: Any) -> Outcome:
    if not isinstance(parts, list) or len(parts) != len(Outcome._fields):
        raise InvalidData("an outcome has a reward, a kind and a detail")
    reward = finite_number(parts[0])
    if reward is None:
        raise InvalidData("a reward is a finite number")
    return Outcome(reward, None if parts[1] is None else as_text(parts[1]), as_text(parts[2]))
