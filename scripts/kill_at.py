"""A file for --rl-import that kills ranks at a moment of a step; scripts/kill_test.py uses it.

MCORE_RL_KILL is a JSON object: `step` and `stage` (a stage's name in the metrics, "to_rollout" or
"to_train"), `delay_seconds` from the stage's beginning, `signal`, `ranks` (the first of them kills
all of them) and `time_file`, a file for the time of the kill.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any


class Killer:
    """Listener for every stage that begins on this rank, and every step that ends."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan, self._rank = plan, int(os.environ["RANK"])
        self._waits = self._rank == plan["ranks"][0]
        self.step = -1

    def begins(self, stage: str) -> None:
        if self._waits and (self.step, stage) == (self._plan["step"], self._plan["stage"]):
            self._waits = False
            threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self) -> None:
        import psutil

        time.sleep(self._plan["delay_seconds"])
        number = signal.Signals[self._plan["signal"]]
        pids = {}
        for process in psutil.Process(os.getppid()).children():
            if "RANK" in (environment := process.environ()):
                pids[int(environment["RANK"])] = process.pid
        Path(self._plan["time_file"]).write_text(str(time.time()), encoding="utf-8")
        for rank in reversed(self._plan["ranks"]):  # this rank comes last
            os.kill(pids[rank], number)


def watch(killer: Killer) -> None:
    """Notify the killer of stages and steps."""
    from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager as Manager
    from mcore_rl.observe.stage_timers import StageTimers
    from mcore_rl.train import Run

    def before(owner: type, name: str, notify: Any) -> None:
        real = getattr(owner, name)

        def notifying(self: Any, *args: Any, **keywords: Any) -> Any:
            notify(self, *args)
            return real(self, *args, **keywords)

        setattr(owner, name, notifying)

    def next_step(*_: Any) -> None:
        killer.step += 1

    before(Manager, "__enter__", lambda *_: killer.begins("to_rollout"))
    before(Manager, "__exit__", lambda *_: killer.begins("to_train"))
    before(StageTimers, "__call__", lambda _, stage: killer.begins(stage))
    before(StageTimers, "finish_step", next_step)
    init = Run.__init__

    def initialised(self: Any, *args: Any, **keywords: Any) -> None:
        init(self, *args, **keywords)
        killer.step = self.first_step

    Run.__init__ = initialised  # type: ignore[method-assign]


if "RANK" in os.environ:  # not in reward workers, which import this file as well
    watch(Killer(json.loads(os.environ["MCORE_RL_KILL"])))
