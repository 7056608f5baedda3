"""All rewards of a run: functions in worker processes, servers over HTTP, their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcore_rl.batching.types import Rollout, ScoredRollout
from mcore_rl.rewards.http import PLAIN_DIALECT, POOLING_DIALECT, ServerReward, asking
from mcore_rl.rewards.parts import FailureLog, weighed
from mcore_rl.rewards.pool import ClosedAtTheEnd, RewardPool
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rewards.worker import Outcome

_DIALECTS = {"http": PLAIN_DIALECT, "pooling": POOLING_DIALECT}


class RewardStack(ClosedAtTheEnd):
    """Scores rollouts by every reward of a `RewardSpec`.

    Not collective: every rank that scores has its own. All functions share one pool of processes
    (see `RewardPool`); servers are asked while these work. Call `check_rewards` before building
    anything, for its errors.
    """

    def __init__(self, spec: RewardSpec) -> None:
        """Raises UsageError if the environment does not hold a header that a server needs."""
        self._weights = dict(zip(spec.names, spec.weights, strict=True))
        self._servers = [
            ServerReward(server, _DIALECTS[server.name], timeout_seconds=spec.timeout_seconds)
            for server in spec.servers
        ]
        self._logs = {server.name: FailureLog(server.name) for server in self._servers}
        self._pool = (
            RewardPool(
                *spec.functions,
                num_workers=spec.num_workers,
                timeout_seconds=spec.timeout_seconds,
                imports=spec.imports,
                memory_gib=spec.memory_gib,
                environment_names=spec.environment_names,
            )
            if spec.functions
            else None
        )

    def score(self, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        """Scores all rollouts, in their order, by functions and servers."""
        return self.weigh(rollouts, self.outcomes(rollouts))

    def outcomes(self, rollouts: Sequence[Rollout]) -> dict[str, list[Outcome]]:
        """What functions and servers make of each rollout; blocks until every part has a value or
        has failed. The first failure of each kind is logged.

        Raises what `RewardPool.outcomes` raises; a server raises nothing.
        """
        with asking(self._servers, rollouts) as answers:
            outcomes = {} if self._pool is None else self._pool.outcomes(rollouts)
            for server, answer in zip(self._servers, answers, strict=True):
                outcomes[server.name] = answer.result()
                self._logs[server.name].note(outcomes[server.name])
        return outcomes

    def weigh(
        self, rollouts: Sequence[Rollout], outcomes: Mapping[str, Sequence[Outcome]]
    ) -> list[ScoredRollout]:
        """The rollouts with the sum of what all rewards made of them.

        `reward` is the weighted sum, `parts` has the values before their weights. A sample of
        which a part failed has the part's reason in `failure` and a reward of 0 that means nothing,
        and keeps the parts that did not fail.
        """
        in_order = {name: outcomes[name] for name in self._weights}
        return weighed(rollouts, in_order, self._weights)

    def close(self) -> None:
        """Ends the worker processes. A second call does nothing."""
        if self._pool is not None:
            self._pool.close()
