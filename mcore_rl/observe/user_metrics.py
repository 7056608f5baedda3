"""User metrics: functions of a step's samples, recorded next to mcore_rl's metrics.

    from mcore_rl.api import ScoredRollout, metric

    @metric("digits")
    def digits(samples: Sequence[ScoredRollout]) -> float:
        return sum("1" in sample.rollout.text for sample in samples) / len(samples)

in a file of `--rl-import` records `user/digits` in metrics.jsonl and all other metric sinks.
Reward processes run that file, too, so this module imports nothing heavy.
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

METRICS: dict[str, MetricFunction] = {}
_logged: set[str] = set()  # metrics whose failure was logged


def metric(name: str) -> Callable[[MetricFunction], MetricFunction]:
    """Decorator: record the result of `function(samples)` for every step, as `user/<name>`.

    Each value of a mapping is recorded as `user/<name>/<key>`. `samples` are all samples of the
    step, also those without a reward (`is_valid`). The function is called on one rank, after the
    update, so it must not communicate. If it raises or returns anything but finite numbers, this is
    logged once and the step lacks the metric. Raises ValueError if the name is taken or empty.
    """

    def register(function: MetricFunction) -> MetricFunction:
        if not name or name in METRICS:
            raise ValueError(f"two metrics are called {name!r}; rename one")
        METRICS[name] = function
        return function

    return register


def has_metrics() -> bool:
    """Return whether any user metric is registered."""
    return bool(METRICS)


def user_metrics(samples: Sequence[ScoredRollout]) -> dict[str, float]:
    """Return a step's user metrics, by full name. Never raises."""
    metrics: dict[str, float] = {}
    for name, function in METRICS.items():
        try:
            value = function(samples)
            several = value.items() if isinstance(value, Mapping) else [("", value)]
            numbers = {f"user/{name}/{key}".rstrip("/"): float(number) for key, number in several}
            wrong = [key for key, number in numbers.items() if not math.isfinite(number)]
            if wrong:
                raise ValueError(f"{wrong[0]} is {numbers[wrong[0]]}")
        except Exception as error:  # from the user's function, which must not end the run
            if name not in _logged:
                _logged.add(name)
                logger.warning(
                    "metric %s is left out of this step: %s: %s; further failures are not logged",
                    name,
                    type(error).__name__,
                    error,
                )
            continue
        metrics |= numbers
    return metrics
