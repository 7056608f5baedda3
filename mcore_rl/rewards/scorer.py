"""Rollouts go in one by one, and what rewards make of each comes out as soon as it is known.

    ticket = scorer.begin(rollout)                  # whenever there is one
    for ticket, outcomes in scorer.finished():      # now and then
        ...                                         # outcomes[name] is what that reward made of it

This is the counting: which tickets are out, and what of each is known. How a rollout is scored is
in `pool` (functions), `servers` and, for all of a run together, `stack`.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Self

from mcore_rl.batching.types import Rollout
from mcore_rl.rewards.parts import FailureLog
from mcore_rl.rewards.worker import Outcome

Finished = tuple[int, dict[str, Outcome]]  # a ticket, and the outcome of each reward

# What nobody calls for is looked at so often while somebody waits: a worker that says nothing.
_LOOK_SECONDS = 1.0


class Scorer(ABC):
    """Scores rollouts by the rewards `names` while more of them come; `with` closes it.

    Not collective, and used by one thread at a time. Work goes on in other processes and threads,
    but it is `finished`, `wait` and `outcomes` that send what has begun to them: call `finished`
    often. What they raise ends all that was being scored; what comes after begins anew.
    """

    def __init__(self, names: Sequence[str], wake: threading.Event | None = None) -> None:
        self.names = tuple(names)
        self._logs = {name: FailureLog(name) for name in names}
        # Set by whatever thread has something for `_advance`.
        self._wake = threading.Event() if wake is None else wake
        self._num_begun = 0
        self._open: dict[int, dict[str, Outcome]] = {}
        self._complete: dict[int, dict[str, Outcome]] = {}
        self._closed = False

    def begin(self, rollout: Rollout) -> int:
        """Take in a rollout; returns its ticket. Sends nothing yet, so never blocks.

        Tickets count the calls: 0, 1, 2, ...
        """
        self._refuse_if_closed()
        ticket = self._num_begun
        self._num_begun += 1
        (self._open if self.names else self._complete)[ticket] = {}
        self._accept(ticket, rollout)
        return ticket

    def finished(self) -> list[Finished]:
        """What every reward has a value for, or has failed on, since the last call; does not block.

        Each ticket comes once, in the order in which they were completed. The first failure of
        each kind is logged. Raises what the subclass says.
        """
        self._refuse_if_closed()
        found = self.collect()
        self._note([outcomes for _, outcomes in found])
        return found

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until every ticket is finished, which `finished` then returns; False if
        `timeout_seconds` were not enough. Raises what `finished` raises."""
        self._refuse_if_closed()
        return self._wait_until(lambda: not self._open, timeout_seconds)

    def abandon(self, tickets: Iterable[int]) -> None:
        """Take back what is no longer wanted: no outcome of it is returned, counted or logged.

        What nobody works on yet is never begun. What somebody does goes on to its end, or to its
        limit of time. Tickets that are not out are passed over.
        """
        tickets = list(tickets)
        for ticket in tickets:
            self._open.pop(ticket, None)
            self._complete.pop(ticket, None)
        self._drop(tickets)

    def outcomes(self, rollouts: Sequence[Rollout]) -> dict[str, list[Outcome]]:
        """Scores all rollouts; blocks until each has a value or a failure of every reward.

        Returns for each reward its outcomes in the order of the rollouts. The first failure of each
        kind is logged. Raises what `finished` raises. Other tickets stay out.
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
        """`finished`, for one that adds these outcomes to others and logs them itself."""
        self._look()
        found = list(self._complete.items())
        self._complete.clear()
        return found

    def close(self) -> None:
        """End what was started, also in the middle. A second call does nothing."""
        self._closed = True
        self._open.clear()
        self._complete.clear()
        self._end()

    @abstractmethod
    def _accept(self, ticket: int, rollout: Rollout) -> None:
        """Put a rollout where `_advance` finds it."""

    @abstractmethod
    def _advance(self) -> None:
        """Send what can be sent and `_found` what has come back, without blocking."""

    @abstractmethod
    def _drop(self, tickets: Sequence[int]) -> None:
        """Forget what was accepted and not sent. `_found` passes over the rest."""

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
            self._wake.clear()  # before looking: what comes after that is seen next time
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
