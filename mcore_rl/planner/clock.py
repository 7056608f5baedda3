"""Simulated time: calls in the order of their times and, at the same time, of their numbers.

It does what a simulation of engines needs of simpy, in a fraction of its time: a simulation has
millions of events.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator

# What a process does: it yields the seconds that it waits, or None to wait for `Clock.wake`.
Process = Generator[float | None, None, None]


class Clock:
    """A clock, and one process."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[int], None]]] = []  # heap
        self._last_number = 0
        self._process: Process | None = None
        self._sleeps = False  # the process waits for `wake`

    def number(self) -> int:
        """Return the number of a call: higher than all before."""
        self._last_number += 1
        return self._last_number

    def after(self, seconds: float, call: Callable[[int], None], number: int = 0) -> None:
        """Call `call` after `seconds` with its number, a new one by default."""
        assert seconds >= 0, f"{seconds} s are not in the future"
        heapq.heappush(self._calls, (self.now + seconds, number or self.number(), call))

    def wake(self) -> None:
        """Let the process continue, if it waits for this, after the calls that are due now."""
        if self._sleeps:
            self._sleeps = False
            self.after(0.0, self._resume)

    def run(self, process: Process) -> None:
        """Run until the process ends."""
        self._process = process
        self._resume(0)
        calls, pop = self._calls, heapq.heappop
        while self._process is not None:
            self.now, number, call = pop(calls)
            call(number)

    def _resume(self, _: int) -> None:
        assert self._process is not None
        try:
            seconds = next(self._process)
        except StopIteration:
            self._process = None
            return
        if seconds is None:
            self._sleeps = True
        else:
            self.after(seconds, self._resume)
