"""Has the first rank listen to a run's health, and all ranks act alike."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from mcore_rl.common import objects
from mcore_rl.flags.options import RLConfig
from mcore_rl.observe.alarms import Health

logger = logging.getLogger(__name__)

_OF_THE_MACHINE = ("memory/", "throughput/")


class HealthWatch:
    """The alarms of a run. Metrics with clocks in them differ between ranks, so one decides."""

    def __init__(self, config: RLConfig, earlier: Mapping[int, Mapping[str, float]] | None) -> None:
        """`earlier` are the metrics of the steps before by their number, in order, on the first
        rank, None on the others: a run that goes on goes on listening."""
        self._stops = config.on_alarm == "stop"
        self._health: Health | None = None
        if earlier is None:
            return
        thresholds = {
            spec.name: getattr(config, spec.name)
            for spec in dataclasses.fields(config)
            if spec.name.startswith("alarm_") and spec.name != "alarm_window"
        }
        self._health = Health(thresholds, window=config.alarm_window)
        for step, metrics in earlier.items():
            # What depends on the machine and the layout, which may be others now, begins anew.
            lasting = {k: v for k, v in metrics.items() if not k.startswith(_OF_THE_MACHINE)}
            self._health.observe(step, lasting)

    def observe(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether the run is to stop now. Collective; adds `health/alarms` on the first rank."""
        stop = [False]
        if self._health is not None:
            raised = self._health.observe(step, metrics)
            for alarm in raised:
                logger.warning("[Health] step %d, %s: %s", step, alarm.name, alarm.text)
            metrics["health/alarms"] = float(len(self._health.active))
            stop = [bool(raised) and self._stops]
        if self._stops:
            return objects.broadcast(stop[0])
        return stop[0]
