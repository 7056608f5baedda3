"""The draws of a run that samples ahead, shared by TP groups over the job's store.

The first rank of every TP group has a `SharedDraws`. One of them has the `Admission` and is the
coordinator:

    members ── started, finished ──► a list of events in the store ──► coordinator
    members ◄── limit, decisions ─── counters and keys in the store ◄─ coordinator

Members take draws below the limit from a counter. No call waits for another process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch.distributed as dist

from mcore_rl.rollout.admission import Admission

_DRAWN, _LIMIT, _NUM_EVENTS, _NUM_STOPS = "drawn", "limit", "num_events", "num_stops"


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The groups of a step, of all TP groups.

    Example: `StepDecision(taken=(96, 98), dropped=(97,))`.
    """

    taken: tuple[int, ...]  # draws, sorted
    dropped: tuple[int, ...]  # draws that were discarded since the last decision


class SharedDraws:
    """One TP group's access to the draws; local, and does not block."""

    def __init__(self, store: dist.Store, next_draw: int, admission: Admission | None) -> None:
        """`next_draw` is the first draw that has never been admitted, `admission` is given to the
        coordinator. `store` is for this run alone."""
        self._store, self._next_draw, self.admission = store, next_draw, admission
        self._held: int | None = None  # a draw that was taken from the counter and is not allowed
        self._events: list[tuple[str, int, int, str]] = []  # to be sent
        self._num_read = self._num_decided = self._num_stops = 0
        self._published = next_draw  # the limit in the store
        self._dropped: list[int] = []

    def next_draw(self) -> int | None:
        """Return a draw that starts here; None: none may start now."""
        if self._held is None:
            self._held = self._next_draw + self._store.add(_DRAWN, 1) - 1
        if self._held >= self._next_draw + self._store.add(_LIMIT, 0):
            return None
        draw, self._held = self._held, None
        return draw

    def start(self, draw: int, weight_version: int) -> None:
        """Record that a draw starts here."""
        self._events.append(("start", draw, weight_version, ""))

    def finish(self, draw: int, *, is_informative: bool, reason: str = "") -> None:
        """Record that a group has all responses and rewards, and why it is dropped."""
        self._events.append(("finish", draw, int(is_informative), reason))

    def flush(self) -> None:
        """Send what was recorded; the coordinator reads what others have sent."""
        if self._events:
            number = self._store.add(_NUM_EVENTS, 1)
            self._store.set(f"events/{number}", json.dumps(self._events))
            self._events = []
        if self.admission is not None:
            self._read_events(self.admission)

    def _read_events(self, admission: Admission) -> None:
        num_sent = self._store.add(_NUM_EVENTS, 0)
        while self._num_read < num_sent:
            key = f"events/{self._num_read + 1}"
            if not self._store.check([key]):
                break  # its sender has counted it and not yet written it
            self._num_read += 1
            for what, draw, value, reason in json.loads(self._store.get(key)):
                if what == "start":
                    admission.start(draw, value)
                elif not admission.finish(draw, is_informative=bool(value), reason=reason):
                    self._dropped.append(draw)
            self._store.delete_key(key)
        self._publish_limit(admission)

    def _publish_limit(self, admission: Admission) -> None:
        if admission.limit > self._published:
            self._store.add(_LIMIT, admission.limit - self._published)
            self._published = admission.limit

    def stop_all(self) -> None:
        """Make all TP groups stop sampling, because this one cannot continue without an update."""
        self._store.add(_NUM_STOPS, 1)

    def must_stop(self) -> bool:
        """Return whether a TP group has called `stop_all` since `forget_stops`."""
        return self._store.add(_NUM_STOPS, 0) > self._num_stops

    def forget_stops(self) -> None:
        """Begin to sample again; after all TP groups have stopped, and before any begins."""
        self._num_stops = self._store.add(_NUM_STOPS, 0)

    def begin_step(self, weight_version: int) -> tuple[int, ...]:
        """Begin a step once all TP groups have flushed; on the coordinator. Returns the draws whose
        groups are discarded because of their age; see `Admission.restarted`."""
        assert self.admission is not None, "not the coordinator"
        self.flush()
        stale = self.admission.begin_step(weight_version)
        self._publish_limit(self.admission)
        return stale

    def decision(self) -> StepDecision | None:
        """Return the groups of the step that began last; None: not yet decided. A decision is
        returned once."""
        self.flush()
        key = f"decisions/{self._num_decided + 1}"
        if self.admission is not None:
            taken = self.admission.decide()
            if taken is None:
                return None
            decision = StepDecision(taken, tuple(self._dropped))
            self._dropped = []
            self._store.set(key, json.dumps([decision.taken, decision.dropped]))
            if self._num_decided:  # all members have read it: they have been asked for this one
                self._store.delete_key(f"decisions/{self._num_decided}")
        elif self._store.check([key]):
            decision = StepDecision(*map(tuple, json.loads(self._store.get(key))))
        else:
            return None
        self._num_decided += 1
        return decision
