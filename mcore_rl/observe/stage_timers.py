"""Timers of a step's stages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from mcore_rl.common.spans import STAGE, span
from mcore_rl.observe.watchdog import StageWatchdog

STAGES = (
    *("data", "rollout", "reward", "log_probs", "advantages", "train", "checkpoint", "eval"),
    *("reshard_to_rollout", "reshard_to_train"),
)


class StageTimers:
    """Seconds spent in each stage of a step; `--rl-trace` records them as spans as well.

    A `watchdog` is notified of each stage, too. Each of `on_stage_end` is called with a stage, and
    its begin and end in seconds of time.time().
    """

    def __init__(self, watchdog: StageWatchdog | None = None) -> None:
        self._watchdog = watchdog
        self.on_stage_end: list[Callable[[str, float, float], object]] = []
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time of a `with` block to `stage`; a stage may be entered several times."""
        started = time.perf_counter()
        if self._watchdog is not None:
            self._watchdog.enter(stage)
        try:
            with span(stage, STAGE):
                yield
        finally:
            if self._watchdog is not None:
                self._watchdog.leave()
        seconds, end = time.perf_counter() - started, time.time()
        self.add(stage, seconds)
        for observe in self.on_stage_end:
            observe(stage, end - seconds, end)

    def add(self, stage: str, seconds: float) -> None:
        """Add seconds, which may be negative, to a stage, which may still be running."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def __getitem__(self, stage: str) -> float:
        return self._seconds.get(stage, 0.0)

    def finish_step(self) -> dict[str, float]:
        """Return `time/<stage>_seconds` of the step that ends here, and start the next."""
        now = time.perf_counter()
        metrics = {f"time/{stage}_seconds": self._seconds.get(stage, 0.0) for stage in STAGES}
        for stage in set(self._seconds) - set(STAGES):
            metrics[f"time/{stage}_seconds"] = self._seconds[stage]
        metrics["time/step_seconds"] = now - self._started
        self._seconds.clear()
        self._started = now
        return metrics
