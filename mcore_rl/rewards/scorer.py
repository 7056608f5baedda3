"""The base of all scorers: rollouts enter one by one, and outcomes leave as soon as they are known.

    ticket = scorer.begin(rollout)                  # whenever there is one
    for ticket, outcomes in scorer.finished():      # now and then
        ...                                         # outcomes[name] is that reward's outcome

This module keeps track of tickets and their outcomes. Scoring itself is in `pool` (functions),
`servers` and, for all rewards of a run together, `stack`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Self

from mcore_rl.batching.types import Rollout
from mcore_rl.rewards.parts import FailureLog
from mcore_rl.rewards.worker import Outcome

Finished = tuple[int, dict[str, Outcome]]  # a ticket, and the outcome of each reward

# Poll interval while somebody waits, for events without notification, such as a silent worker.
_LOOK_SECONDS = 1.0


class Wake:
    """An event that any thread sets, or a descriptor that is readable."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self.watch(self._event)

    def watch(self, descriptor: int) -> None:
        """Count this descriptor as the event while it is readable."""
        self._poll.register(descriptor, select.POLLIN)

    def set(self) -> None:
        """Let `wait` return until `clear` is called."""
        os.eventfd_write(self._event, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def wait(self, seconds: float) -> None:
        """Block until the event, at most so long."""
        self._poll.poll(1000 * seconds)

    def close(self) -> None:
        os.close(self._event)


class Scorer(ABC):
    """A scorer of rollouts by the rewards `names`, while more of them arrive; `with` closes it.

    Not collective, and used by one thread at once. Work runs in other processes and threads, but
    only `finished`, `wait` and `outcomes` send begun rollouts to them: call `finished` often. Their
    exceptions end all scoring in progress; later calls start afresh.
    """

    def __init__(self, names: Sequence[str], wake: Wake | None = None) -> None:
        self.names = tuple(names)
        self._logs = {name: FailureLog(name) for name in names}
        self._wake = Wake() if wake is None else wake  # `_advance` has something to do
        self._owns_wake = wake is None
        self._num_begun = 0
        self._open: dict[int, dict[str, Outcome]] = {}
        self._complete: dict[int, dict[str, Outcome]] = {}
        self._closed = False

    def begin(self, rollout: Rollout) -> int:
        """Accept a rollout and return its ticket. Sends nothing yet, so never blocks.

        Tickets count the calls: 0, 1, 2, ...
        """
        self._refuse_if_closed()
        ticket = self._num_begun
        self._num_begun += 1
        (self._open if self.names else self._complete)[ticket] = {}
        self._accept(ticket, rollout)
        return ticket

    def finished(self) -> list[Finished]:
        """Return the tickets completed since the last call; does not block.

        A ticket is complete when each reward has a value or a failure. Each comes once, in order of
        completion. The first failure of each kind is logged. Raises the subclass's errors.
        """
        self._refuse_if_closed()
        found = self.collect()
        self._note([outcomes for _, outcomes in found])
        return found

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until every ticket is complete, so that `finished` returns it; False after
        `timeout_seconds`. Raises the errors of `finished`."""
        self._refuse_if_closed()
        return self._wait_until(lambda: not self._open, timeout_seconds)

    def abandon(self, tickets: Iterable[int]) -> None:
        """Withdraw tickets: none of their outcomes is returned, counted or logged.

        Work that has not begun never begins; other work continues to its end or its time limit.
        Unknown tickets are ignored.
        """
        tickets = list(tickets)
        for ticket in tickets:
            self._open.pop(ticket, None)
            self._complete.pop(ticket, None)
        self._drop(tickets)

    def outcomes(self, rollouts: Sequence[Rollout]) -> dict[str, list[Outcome]]:
        """Score all rollouts; blocks until each has a value or a failure of every reward.

        Returns the outcomes of each reward in the order of the rollouts. The first failure of each
        kind is logged. Raises the errors of `finished`. Other tickets stay open.
        """
        self._refuse_if_closed()
        tickets = [self.begin(rollout) for rollout in rollouts]
        try:
            for ticket in tickets:
                self._wait_until(partial(self._complete.__contains__, ticket))
            found = [self._complete.pop(ticket) for ticket in tickets]
        except BaseException:
            self.abandon(tickets)
            raise
        self._note(found)
        return {name: [outcomes[name] for outcomes in found] for name in self.names}

    def collect(self) -> list[Finished]:
        """Return what `finished` does, for callers that merge and log these outcomes themselves."""
        self._look()
        found = list(self._complete.items())
        self._complete.clear()
        return found

    def close(self) -> None:
        """End all work, even unfinished. A second call does nothing."""
        was_closed, self._closed = self._closed, True
        self._open.clear()
        self._complete.clear()
        self._end()
        if self._owns_wake and not was_closed:
            self._wake.close()

    @abstractmethod
    def _accept(self, ticket: int, rollout: Rollout) -> None:
        """Store a rollout for `_advance`."""

    @abstractmethod
    def _advance(self) -> None:
        """Send what can be sent and call `_found` for what has returned, without blocking."""

    @abstractmethod
    def _drop(self, tickets: Sequence[int]) -> None:
        """Forget accepted rollouts that were not sent. `_found` ignores the rest."""

    @abstractmethod
    def _end(self) -> None:
        """Close, idempotently."""

    def _found(self, ticket: int, name: str, outcome: Outcome) -> None:
        known = self._open.get(ticket)
        if known is None:
            return  # abandoned
        known[name] = outcome
        if len(known) == len(self.names):
            del self._open[ticket]
            self._complete[ticket] = {name: known[name] for name in self.names}

    def _note(self, found: Sequence[dict[str, Outcome]]) -> None:
        for name, log in self._logs.items():
            log.note([outcomes[name] for outcomes in found])

    def _look(self) -> None:
        try:
            self._advance()
        except BaseException:
            self.abandon(tuple(self._open))
            raise

    def _wait_until(self, done: Callable[[], bool], timeout_seconds: float | None = None) -> bool:
        until = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not done():
            self._wake.clear()  # before looking: later events are seen next time
            self._look()
            left_seconds = until - time.monotonic()
            if done():
                break
            if left_seconds <= 0:
                return False
            self._wake.wait(min(left_seconds, _LOOK_SECONDS))
        return True

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
