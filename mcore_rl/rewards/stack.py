"""All rewards of a run: functions in worker processes, servers over HTTP, their weighted sum."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from mcore_rl.batching.types import Rollout, ScoredRollout
from mcore_rl.rewards.http import PLAIN_DIALECT, POOLING_DIALECT, ServerReward
from mcore_rl.rewards.parts import weighed
from mcore_rl.rewards.pool import RewardPool
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.rewards.servers import Servers
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rewards.worker import Outcome

_DIALECTS = {"http": PLAIN_DIALECT, "pooling": POOLING_DIALECT}


class RewardStack(Scorer):
    """A scorer of rollouts by every reward of a `RewardSpec`, as they come or all at once.

    Not collective: every rank that scores has its own stack. All functions share one pool of
    processes (see `RewardPool`, also for errors: servers raise nothing); requests to servers run
    concurrently (see `Servers`). Call `check_rewards` before building anything, for its errors.
    """

    def __init__(self, spec: RewardSpec, output: int | None = None) -> None:
        """`output` is a descriptor for what functions print; None: this process's. Raises
        UsageError if the environment does not hold a header that a server needs."""
        self._weights = dict(zip(spec.names, spec.weights, strict=True))
        servers = [
            ServerReward(server, _DIALECTS[server.name], timeout_seconds=spec.timeout_seconds)
            for server in spec.servers
        ]
        super().__init__([*spec.functions, *(server.name for server in spec.servers)])
        self._parts: list[Scorer] = []
        if spec.functions:
            self._parts.append(RewardPool(spec, output, self._wake))
        if servers:
            self._parts.append(Servers(servers, self._wake))

    def score(self, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        """Score all rollouts, in their order, by functions and servers."""
        return self.weigh(rollouts, self.outcomes(rollouts))

    def weigh(
        self, rollouts: Sequence[Rollout], outcomes: Mapping[str, Sequence[Outcome]]
    ) -> list[ScoredRollout]:
        """Return the rollouts with the weighted sum of their outcomes.

        `reward` is the weighted sum; `parts` holds the values before their weights. A sample with a
        failed part has the reason in `failure`, a meaningless reward of 0, and the parts that did
        not fail.
        """
        in_order = {name: outcomes[name] for name in self._weights}
        return weighed(rollouts, in_order, self._weights)

    def _accept(self, ticket: int, rollout: Rollout) -> None:
        for part in self._parts:
            same = part.begin(rollout)
            assert same == ticket, f"a part counts {same} rollouts where the stack has {ticket}"

    def _advance(self) -> None:
        for part in self._parts:
            for ticket, outcomes in part.collect():
                for name, outcome in outcomes.items():
                    self._found(ticket, name, outcome)

    def _drop(self, tickets: Sequence[int]) -> None:
        for part in self._parts:
            part.abandon(tickets)

    def _end(self) -> None:
        with contextlib.ExitStack() as all_of_them:  # even if one of them fails
            for part in self._parts:
                all_of_them.callback(part.close)
