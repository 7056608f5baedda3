"""Watchdog that ends a run whose stage takes too long, and reports which rank is stuck where.

If a rank is slow or stuck, the others wait in a collective until `--distributed-timeout-minutes`,
and fail without naming it. So each rank of the actor watches its own stages. When one takes longer
than `--rl-stage-timeout-seconds`, all ranks, also those of other roles, send the stacks of their
main threads to the job's store, over separate connections. One rank prints them, grouped by
identical stack, with the ranks that did not answer, which the launcher repeats in its last line,
and all ranks exit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

from mcore_rl.common.agreement import leave_reason
from mcore_rl.common.kills import note_stage

EXIT_STUCK = 1
_POLL_SECONDS = 0.2
# Interval of checks whether another rank has timed out, and the time limit for answers.
ASK_SECONDS = 5.0
ANSWER_SECONDS = 10.0
# For C code that holds the GIL, so that not even the watching thread runs.
_BACKSTOP_SECONDS = 30.0
_KEY = "mcore_rl/stuck"


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank was doing at the time limit."""

    stage: str  # "" outside the stages, as on the ranks of other roles than the actor
    seconds: float
    stack: tuple[str, ...]  # "file:line in function", the outermost first


class StageWatchdog:
    """Tracks this rank's stages and limits their time, unless `limit_seconds` is 0."""

    def __init__(
        self,
        limit_seconds: float,
        *,
        rank: int,
        world_size: int,
        connect: Callable[[], Any] | None = None,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        """Start watching. `connect` opens a connection to the job's store that nothing else uses,
        or is None for a single rank. `leave` ends the process."""
        self._limit, self._rank, self._world_size = limit_seconds, rank, world_size
        self._leave, self._since = leave, 0.0
        self._stages: list[str] = []
        self._lock = threading.Lock()
        self._main = threading.get_ident()
        self._closed = threading.Event()
        self._store = connect() if connect is not None and limit_seconds > 0 else None
        self._thread = threading.Thread(target=self._watch, name="stage watchdog", daemon=True)
        if limit_seconds > 0:
            self._thread.start()

    def enter(self, stage: str) -> None:
        """Begin a stage, which may be nested in another."""
        with self._lock:
            self._stages.append(stage)
            self._begin()

    def leave(self) -> None:
        """End the innermost stage, and restart the clock of the stage around it."""
        with self._lock:
            self._stages.pop()
            self._begin()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._closed.set()
        if self._limit > 0:
            faulthandler.cancel_dump_traceback_later()

    def _begin(self) -> None:
        note_stage(self._stages[-1] if self._stages else "between stages")
        self._since = time.monotonic()
        if not self._limit > 0:
            return
        if not self._stages:
            faulthandler.cancel_dump_traceback_later()
            return
        with contextlib.suppress(ValueError, OSError):  # a stderr that is not a file
            faulthandler.dump_traceback_later(self._limit + _BACKSTOP_SECONDS, exit=True)

    def _watch(self) -> None:
        asked_at = time.monotonic()
        while not self._closed.wait(_POLL_SECONDS):
            with self._lock:
                stage = self._stages[-1] if self._stages else None
                seconds = time.monotonic() - self._since
            late = stage is not None and seconds > self._limit
            if not late and time.monotonic() - asked_at > ASK_SECONDS:
                asked_at = time.monotonic()
                late = self._is_asked()
            if late:
                stack = stack_of(sys._current_frames().get(self._main))
                self._end(Report(stage or "", seconds, stack))
                return

    def _is_asked(self) -> bool:
        """Return whether another rank has asked for reports."""
        with contextlib.suppress(Exception):  # the store ends with the run
            return self._store is not None and self._store.check([f"{_KEY}/printing"])
        return False

    def _end(self, mine: Report) -> None:
        reports: dict[int, Report] = {self._rank: mine}
        prints = True
        if self._store is not None:
            try:
                reports, prints = self._exchange(self._store, mine)
            except Exception as error:  # the store is gone: every rank prints its own report
                print(f"mcore_rl: the other ranks cannot be asked ({error!r})", file=sys.stderr)
        if prints:
            report = describe(reports, self._world_size, self._limit)
            print(report, file=sys.stderr, flush=True)
            if silent := _silent(reports, self._world_size):
                limit = f"a stage took longer than --rl-stage-timeout-seconds {self._limit:g}"
                leave_reason(f"{limit}, and {silent}")
        self._leave(EXIT_STUCK)

    def _exchange(self, store: Any, mine: Report) -> tuple[dict[int, Report], bool]:
        """Send this rank's report. Return whether this rank prints, and if so all reports."""
        prints = store.add(f"{_KEY}/printing", 1) == 1
        # This must be the last access: the printing rank may host the store, and ends when it has
        # all reports.
        store.set(f"{_KEY}/{self._rank}", json.dumps([mine.stage, mine.seconds, mine.stack]))
        if not prints:
            # The launcher ends all ranks after the first one, so wait for the printing.
            self._closed.wait(2 * ANSWER_SECONDS)
            return {}, False
        deadline = time.monotonic() + ANSWER_SECONDS
        missing = set(range(self._world_size))
        while missing and time.monotonic() < deadline:
            missing = {rank for rank in missing if not store.check([f"{_KEY}/{rank}"])}
            time.sleep(_POLL_SECONDS)
        reports = {}
        for rank in set(range(self._world_size)) - missing:
            stage, seconds, stack = json.loads(store.get(f"{_KEY}/{rank}"))
            reports[rank] = Report(stage, seconds, tuple(stack))
        return reports, True


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """Return the stack that ends in a frame, the outermost call first."""
    entries = traceback.extract_stack(frame) if frame is not None else []
    return tuple(f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in entries)


def describe(reports: Mapping[int, Report], world_size: int, limit_seconds: float) -> str:
    """Describe which ranks are stuck where: grouped by identical stack, smallest group first."""
    together: dict[tuple[str, ...], list[int]] = {}
    for rank, report in sorted(reports.items()):
        together.setdefault((report.stage, *report.stack), []).append(rank)
    lines = [
        f"mcore_rl: error: a stage took longer than --rl-stage-timeout-seconds {limit_seconds:g}; "
        "raise it if the stage is expected to take this long"
    ]
    if silent := _silent(reports, world_size):
        lines.append(silent)
    # Other roles' ranks come last: most of them wait for a call.
    groups = sorted(together.items(), key=lambda item: (not item[0][0], len(item[1])))
    for (stage, *stack), ranks in groups:
        seconds = max(reports[rank].seconds for rank in ranks)
        where = f"{seconds:.0f} s in {stage}" if stage else "outside the stages"
        lines.append(f"{_ranks(ranks)}, {where}:")
        lines += [f"    {entry}" for entry in stack]
    return "\n".join(lines)


def _silent(reports: Mapping[int, Report], world_size: int) -> str:
    """Return which ranks have sent no report; "" if all have."""
    silent = [rank for rank in range(world_size) if rank not in reports]
    if not silent:
        return ""
    return f"{_ranks(silent)} gave no answer: ended, stopped, or deep in other code"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def own_connection() -> Any:
    """Open a second connection to the job's store, which a hang of the first does not block."""
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives an attempt
    return PrefixStore(f"mcore_rl/watchdog/{attempt}", store)
