"""All rewards of a run: functions in worker processes, servers over HTTP, their weighted sum.

ticket = stack.begin(rollout)                   # for each new rollout
for ticket, outcomes in stack.finished():       # poll
    ...                                         # outcomes[name] is the outcome of one reward
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from mcore_rl.batching.types import Rollout, ScoredRollout
from mcore_rl.rewards.http import ServerReward
from mcore_rl.rewards.parts import FailureLog, weighed
from mcore_rl.rewards.pool import RewardPool
from mcore_rl.rewards.servers import Servers
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rewards.worker import Outcome

Finished = tuple[int, dict[str, Outcome]]  # a ticket, and the outcome of each reward

# Poll interval of `wait`, for events without notification, such as a silent worker.
_LOOK_SECONDS = 1.0
_UNUSED = Outcome(0.0)  # of a reward that the sample's source does not have


class RewardStack:
    """A scorer of rollouts by every reward of a `RewardSpec`; `with` closes it.

    Not collective: every rank that scores has its own stack, used by one thread. All functions
    share one pool of processes (see `RewardPool`, also for errors: servers raise nothing); requests
    to servers run concurrently (see `Servers`). Call `check_rewards` before building anything, for
    its errors.

    Work runs in other processes and threads, but only `finished`, `wait` and `outcomes` send begun
    rollouts to them: call `finished` often. Their exceptions drop all open tickets; later calls
    start again.
    """

    def __init__(self, spec: RewardSpec, output: int | None = None) -> None:
        """`output` is a descriptor for what functions print; None: this process's. Raises
        UsageError if the environment does not hold a header that a server needs."""
        self._spec = spec
        servers = [
            ServerReward(server, timeout_seconds=spec.timeout_seconds) for server in spec.servers
        ]
        self._parts: list[RewardPool | Servers] = []
        self._pool = RewardPool(spec, output) if spec.functions else None
        self._of_servers = {server.name: server.url for server in spec.servers}
        if self._pool is not None:
            self._parts.append(self._pool)
        if servers:
            self._parts.append(Servers(servers))
        self.names = (*spec.functions, *(server.name for server in spec.servers))
        self.failure_logs = {name: FailureLog(name) for name in self.names}
        self._poll = select.poll()
        for part in self._parts:
            self._poll.register(part.fileno(), select.POLLIN)
        self._num_begun = 0
        self._open: dict[int, dict[str, Outcome]] = {}
        self._complete: dict[int, dict[str, Outcome]] = {}
        self._closed = False

    def sources(self) -> dict[str, str]:
        """Return what tells whether a reward is still the same, by its name: a hash of a function's
        source, or of a server's address. Functions are missing before `find_sources` or their first
        outcome."""
        hashed = {n: hashlib.sha256(u.encode()).hexdigest() for n, u in self._of_servers.items()}
        return hashed if self._pool is None else hashed | self._pool.sources

    def find_sources(self) -> dict[str, str]:
        """Return the `sources` of all rewards. Waits for a worker process to import functions.
        Raises the errors of `finished`."""
        if self._pool is not None:
            self._pool.find_sources()
        return self.sources()

    def begin(self, rollout: Rollout) -> int:
        """Accept a rollout and return its ticket: 0, 1, 2, ... Sends nothing, so never blocks."""
        self._refuse_if_closed()
        ticket = self._num_begun
        self._num_begun += 1
        names = self._spec.weights_of(rollout.prompt.source).keys()
        unused = {name: _UNUSED for name in self.names if name not in names}
        (self._open if len(unused) < len(self.names) else self._complete)[ticket] = unused
        for part in self._parts:
            part.add(ticket, rollout, names)
        return ticket

    def finished(self) -> list[Finished]:
        """Return the tickets completed since the last call; does not block.

        A ticket is complete when each reward has a value or a failure. Each is returned once, in
        order of completion. The first failure of each kind is logged.
        """
        completed = self.collect()
        self._log_failures([outcomes for _, outcomes in completed])
        return completed

    def collect(self) -> list[Finished]:
        """Return what `finished` does, without logging failures."""
        self._refuse_if_closed()
        self._advance()
        completed = list(self._complete.items())
        self._complete.clear()
        return completed

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until every ticket is complete, so that `finished` returns it; False after
        `timeout_seconds`. Raises the errors of `finished`."""
        self._refuse_if_closed()
        return self._wait_until(lambda: not self._open, timeout_seconds)

    def outcomes(self, rollouts: Sequence[Rollout]) -> dict[str, list[Outcome]]:
        """Score all rollouts; blocks until each has a value or a failure of every reward. A reward
        that a rollout's source does not have is 0.

        Returns the outcomes of each reward in the order of the rollouts. The first failure of each
        kind is logged. Raises the errors of `finished`. Other tickets stay open.
        """
        self._refuse_if_closed()
        tickets = [self.begin(rollout) for rollout in rollouts]
        self._wait_until(lambda: self._open.keys().isdisjoint(tickets))
        completed = [self._complete.pop(ticket) for ticket in tickets]
        self._log_failures(completed)
        return {name: [outcomes[name] for outcomes in completed] for name in self.names}

    def score(self, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        """Score all rollouts, in their order, by functions and servers."""
        return self.weigh(rollouts, self.outcomes(rollouts))

    def weigh(
        self, rollouts: Sequence[Rollout], outcomes: Mapping[str, Sequence[Outcome]]
    ) -> list[ScoredRollout]:
        """Return the rollouts with the weighted sum of the outcomes of their source's rewards.

        `reward` is the weighted sum; `parts` holds the values before their weights. A sample with a
        failed part has the reason in `failure`, a meaningless reward of 0, and the parts that did
        not fail.
        """
        scored = []
        for index, rollout in enumerate(rollouts):
            weights = self._spec.weights_of(rollout.prompt.source)
            own = {name: [outcomes[name][index]] for name in weights}
            scored += weighed([rollout], own, weights)
        return scored

    def close(self) -> None:
        """End all work, even unfinished. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._open.clear()
        self._complete.clear()
        with contextlib.ExitStack() as stack:  # even if one of them fails
            for part in self._parts:
                stack.callback(part.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _advance(self) -> None:
        """Send what can be sent and store the outcomes that have arrived, without blocking."""
        try:
            for part in self._parts:
                for ticket, name, outcome in part.advance():
                    self._store(ticket, name, outcome)
        except BaseException:
            self._open.clear()
            self._complete.clear()
            for part in self._parts:
                part.reset()
            raise

    def _store(self, ticket: int, name: str, outcome: Outcome) -> None:
        outcomes = self._open[ticket]
        outcomes[name] = outcome
        if len(outcomes) == len(self.names):
            del self._open[ticket]
            self._complete[ticket] = {name: outcomes[name] for name in self.names}

    def _log_failures(self, completed: Sequence[dict[str, Outcome]]) -> None:
        for name, log in self.failure_logs.items():
            log.note([outcomes[name] for outcomes in completed])

    def _wait_until(self, done: Callable[[], bool], timeout_seconds: float | None = None) -> bool:
        until = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not done():
            self._advance()
            left_seconds = until - time.monotonic()
            if left_seconds <= 0:
                return done()
            if not done():
                self._poll.poll(1000 * min(left_seconds, _LOOK_SECONDS))
        return True

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this RewardStack is closed")
