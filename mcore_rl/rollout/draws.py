"""The draws of a run or an evaluation, shared by TP groups over a store.

The first rank of every TP group has a `Draws`. One of them has the `Admission` and is the
coordinator:

    members ── started, finished ──► a list of events in the store ──► coordinator
    members ◄── limit, decisions ─── counters and keys in the store ◄─ coordinator

Members take draws below the limit from a counter. No call waits for another process. A TP group
that decides alone, as with --rl-deterministic, has a store of its own and is its coordinator.

If engines stop at a decision, the draws of each step are numbered from 0. Each TP group begins with
a share of them, assigned round-robin, so that the first caller does not take all draws that it has
room for. Later draws come from the counter, so their assignment depends on speed. Tokens do not
depend on it, except where kernels return other bits for batches of another size.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist

from mcore_rl.rollout.admission import Admission, Finished, StepDecision

_NUM_EVENTS, _NUM_STOPS = "num_events", "num_stops"


@dataclass(frozen=True, slots=True)
class StepStart:
    """The beginning of a step, as the coordinator decides it.

    Example: of two groups of a resumed run one starts again, and the step has draws from 96 on:
    `StepStart(stale=(90, 91), restarted=(90,), first=96, num_first=15)`.
    """

    stale: tuple[int, ...]  # draws whose groups are discarded because of their age
    restarted: tuple[int, ...]  # see `Admission.restarted`
    first: int  # the first draw that may start
    num_first: int  # draws that may start at once


class Draws:
    """One TP group's access to the draws; local, and does not block."""

    def __init__(
        self,
        store: dist.Store,
        next_draw: int,
        admission: Admission | None,
        *,
        member: int = 0,
        num_members: int = 1,
        stride: int = 1,
    ) -> None:
        """`next_draw` is the first draw that has never been admitted, `admission` is given to the
        coordinator. `store` is for these `num_members` alone. Every `stride`-th draw is theirs."""
        self._store, self.admission = store, admission
        self._member, self._num_members, self._stride = member, num_members, stride
        self._events: list[tuple[str, int, list[int | str]]] = []  # to be sent
        self._num_read = self._num_decided = self._num_stops = 0
        self._dropped: list[int] = []
        # Numbers of draws, see `restart`.
        self._first, self._order = next_draw, cast("Sequence[int]", ())
        self._num_first = self._num_round_robin = self._num_mine = self._num_restarts = 0
        self._held: int | None = None  # a number that was taken and is not allowed
        self._is_last = False
        self._published = next_draw  # the limit that members know

    def restart(
        self,
        start: StepStart,
        *,
        order: Sequence[int] = (),
        num_round_robin: int = 0,
        is_last: bool,
    ) -> None:
        """Number the draws of a step from 0, before any of it starts; on all members.

        `order` is that of its first draws, later draws keep their order. Each member begins with
        `num_round_robin` draws. `is_last`: no draw is admitted after the first ones.
        """
        if self.admission is not None:
            self._store.delete_key(self._drawn_key)
            self._store.delete_key(self._limit_key)
        self._num_restarts += 1
        self._first, self._num_first, self._order = start.first, start.num_first, order
        self._num_round_robin, self._is_last = num_round_robin, is_last
        self._held, self._num_mine = None, 0
        self._published = start.first + start.num_first * self._stride

    @property
    def _drawn_key(self) -> str:
        """The counter of numbers that members have taken."""
        return f"drawn/{self._num_restarts}"

    @property
    def _limit_key(self) -> str:
        """The counter of draws below the limit, after the first ones."""
        return f"limit/{self._num_restarts}"

    def next_draw(self) -> int | None:
        """Return a draw that starts here; None: none may start now."""
        if self._held is None:
            self._held = self._take_number()
        if self._held >= self._num_first and (
            self._is_last or self._held >= self._num_first + self._store.add(self._limit_key, 0)
        ):
            return None
        number, self._held = self._held, None
        place = self._order[number] if number < len(self._order) else number
        return self._first + place * self._stride

    def _take_number(self) -> int:
        if self._num_mine < self._num_round_robin:
            self._num_mine += 1
            return self._member + (self._num_mine - 1) * self._num_members
        dealt = self._num_round_robin * self._num_members
        return dealt + self._store.add(self._drawn_key, 1) - 1

    @property
    def is_exhausted(self) -> bool:
        """Whether no draw will start here before the next step, as far as known."""
        return self._is_last and self._held is not None

    def start(self, draw: int, weight_version: int) -> None:
        """Record that a draw starts here."""
        self._events.append(("start", draw, [weight_version]))

    def finish(self, draw: int, group: Finished) -> None:
        """Record that a group has all its responses and rewards."""
        self._events.append(("finish", draw, [*dataclasses.astuple(group)]))

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
            for what, draw, values in json.loads(self._store.get(key)):
                if what == "start":
                    admission.start(draw, *values)
                elif not admission.finish(draw, Finished(*values)):
                    self._dropped.append(draw)
            self._store.delete_key(key)
        self._publish_limit(admission)

    def _publish_limit(self, admission: Admission) -> None:
        if admission.limit > self._published:
            amount = (admission.limit - self._published) // self._stride
            self._store.add(self._limit_key, amount)
            self._published = admission.limit

    def stop_all(self) -> None:
        """Make all members stop sampling, because this one has failed or needs an update."""
        self._store.add(_NUM_STOPS, 1)

    def must_stop(self) -> bool:
        """Return whether a member has called `stop_all` since `forget_stops`."""
        return self._store.add(_NUM_STOPS, 0) > self._num_stops

    def forget_stops(self) -> None:
        """Begin to sample again; after all TP groups have stopped, and before any begins."""
        self._num_stops = self._store.add(_NUM_STOPS, 0)

    def begin_step(
        self,
        weight_version: int,
        *,
        num_groups: int | None = None,
        sizes: Sequence[int] = (),
        next_draw: int | None = None,
    ) -> StepStart:
        """Begin a step, once all members have flushed; on the coordinator. If engines stop, all
        members `restart` then."""
        assert self.admission is not None, "not the coordinator"
        self.flush()
        first = self.admission.limit if next_draw is None else next_draw
        stale = self.admission.begin_step(
            weight_version, num_groups=num_groups, sizes=sizes, next_draw=next_draw
        )
        self._publish_limit(self.admission)
        return StepStart(stale, self.admission.restarted, first, self.admission.num_unstarted)

    def decision(self) -> StepDecision | None:
        """Return the groups of the step that began last; None: not yet decided. A decision is
        returned once."""
        self.flush()
        key = f"decisions/{self._num_decided + 1}"
        if self.admission is not None:
            decision = self.admission.decide()
            if decision is None:
                return None
            dropped = (*decision.dropped, *self._dropped)
            decision, self._dropped = dataclasses.replace(decision, dropped=dropped), []
            self._store.set(key, json.dumps([decision.taken, decision.dropped]))
            if self._num_decided:  # all members have read it: they have been asked for this one
                self._store.delete_key(f"decisions/{self._num_decided}")
        elif self._store.check([key]):
            decision = StepDecision(*map(tuple, json.loads(self._store.get(key))))
        else:
            return None
        self._num_decided += 1
        return decision
