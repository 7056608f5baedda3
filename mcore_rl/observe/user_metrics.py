"""Metrics of a user's own: functions of a step's samples, recorded beside ours.

    from mcore_rl.api import ScoredRollout, metric

    @metric("digits")
    def digits(samples: Sequence[ScoredRollout]) -> float:
        return sum("1" in sample.rollout.text for sample in samples) / len(samples)

stands in a file of `--rl-import` and gives `user/digits` in metrics.jsonl and wherever metrics go.
Reward processes run that file, too: nothing heavy is imported here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_rl.batching.types import ScoredRollout

logger = logging.getLogger(__name__)

MetricFunction = Callable[["Sequence[ScoredRollout]"], float | Mapping[str, float]]

_METRICS: dict[str, MetricFunction] = {}
_told: set[str] = set()  # whose failure was said: once is enough


def metric(name: str) -> Callable[[MetricFunction], MetricFunction]:
    """Decorator: record what `function(samples)` returns of every step, as `user/<name>`.

    Of a mapping each value is recorded as `user/<name>/<key>`. `samples` are all of the step, those
    without a reward included (`is_valid`). It is called on one rank, after the update, so it must
    not communicate. A function that raises, or returns something else than finite numbers, is said
    in the log once, and its step has no such metric. ValueError: the name is taken, or empty.
    """

    def register(function: MetricFunction) -> MetricFunction:
        if not name or name in _METRICS:
            raise ValueError(f"two metrics are called {name!r}; rename one")
        _METRICS[name] = function
        return function

    return register


def has_metrics() -> bool:
    """Whether there is any."""
    return bool(_METRICS)


def user_metrics(samples: Sequence[ScoredRollout]) -> dict[str, float]:
    """Those of a step, by full name. Never raises."""
    found: dict[str, float] = {}
    for name, function in _METRICS.items():
        try:
            value = function(samples)
            several = value.items() if isinstance(value, Mapping) else [("", value)]
            numbers = {f"user/{name}/{key}".rstrip("/"): float(number) for key, number in several}
            wrong = [key for key, number in numbers.items() if not math.isfinite(number)]
            if wrong:
                raise ValueError(f"{wrong[0]} is {numbers[wrong[0]]}")
        except Exception as error:  # the user's, which ends no run
            if name not in _told:
                _told.add(name)
                logger.warning(
                    "metric %s is left out of steps like this one: %s: %s; it is said once",
                    name,
                    type(error).__name__,
                    error,
                )
            continue
        found |= numbers
    return found
