"""The samples that a step learns from: prompts, rollouts, rewards, and prompts drawn again.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) keeps a prompt only if its responses differ
in reward, as otherwise no response is better than another. A step draws as many prompts as are
missing, again and again but no more often than `--rl-max-refills`; what is missing then is filled
up with prompts that teach nothing, so that a step always has the same number of samples.

A sample whose reward failed has none: it counts in no comparison, and nothing is learnt from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.algorithms.estimators import select_informative_groups
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Prompt, ScoredRollout
from mcore_rl.data.prompts import PromptDataset, prompt_indices
from mcore_rl.flags.options import RLConfig
from mcore_rl.hybrid_engine.vllm.generation import Sampling
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rollout.dealing import Wanted
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.groups import GroupPlan
from mcore_rl.rollout.keeper import SampleKeeper


@dataclass(frozen=True, slots=True)
class Collected:
    """What all ranks know of a step's samples: the responses to one prompt stand together."""

    table: SampleTable
    num_generated_tokens: int  # those of samples that were dropped, and of baselines, too
    metrics: dict[str, float] = field(default_factory=dict)


class Collector:
    """Draws prompts, samples responses and has them scored. All methods are collective.

    `position` counts the prompts drawn so far; a run that is resumed starts where it was.
    """

    def __init__(
        self,
        workers: RolloutWorkers,
        prompts: PromptDataset,
        config: RLConfig,
        *,
        seed: int,
        timers: StageTimers,
        position: int,
        keeper: SampleKeeper,
    ) -> None:
        """`keeper` is that of `workers`."""
        self._workers, self._prompts, self._config = workers, prompts, config
        self._recipe = config.recipe
        self._seed, self._timers, self._keeper = seed, timers, keeper
        self.position = self._step_began_at = position
        self._num_generated_tokens = 0  # in this step
        self._num_calls = 0

    def collect(self, weight_version: int, when_few_are_left: Callable[[], object]) -> Collected:
        """One step's samples; in rollout mode. `when_few_are_left` is passed to the engine."""
        wanted = self._config.num_prompts_per_step
        recipe = self._recipe
        self._num_generated_tokens = 0
        self._step_began_at = self.position
        self._keeper.forget()
        self._workers.draft_metrics()  # of what evaluations have sampled
        if not recipe.dynamic_sampling:
            return self._collected(
                self._drawn(Wanted.of(wanted), weight_version, when_few_are_left)
            )
        kept: list[SampleTable] = []
        useless: list[SampleTable] = []
        most = wanted * (1 + recipe.max_refills)
        while len(kept) < wanted and self.position - self._step_began_at < most:
            # Where groups can be compared while others are sampled, this is done once.
            again = Wanted(wanted - len(kept), wanted - len(kept), most, self._workers.compares)
            # Else training is not called back early: whether others follow is not known then.
            call_back = when_few_are_left if again.compares else None
            for group in self._groups(self._drawn(again, weight_version, call_back)):
                (kept if _differ(group) else useless).append(group)
            if again.compares or not any(group.valid.any() for group in (*kept, *useless)):
                break  # or every reward fails, which more of them would not mend
        missing = wanted - len(kept)
        groups = kept + useless[: max(missing, 0)]
        metrics = {
            "rollout/refills": (self.position - self._step_began_at) / wanted - 1.0,
            "rollout/uninformative_share": missing / wanted,
            "rollout/dropped_samples": float(
                (len(useless) - max(missing, 0)) * recipe.num_samples_per_prompt
            ),
        }
        return self._collected(SampleTable.joined(groups), metrics)

    def undo(self) -> None:
        """The last step will be done again: its prompts count as not drawn. Local."""
        self.position = self._step_began_at

    def _collected(self, table: SampleTable, metrics: dict[str, float] | None = None) -> Collected:
        metrics = {**(metrics or {}), **self._workers.draft_metrics()}
        if self._recipe.needs_greedy_baseline:
            firsts = table.take(range(0, len(table), self._recipe.num_samples_per_prompt))
            metrics["reward/baseline_failures"] = float((~firsts.has_baseline).sum())
        return Collected(table, self._num_generated_tokens, metrics)

    def _groups(self, table: SampleTable) -> list[SampleTable]:
        size = self._recipe.num_samples_per_prompt
        return [table.take(range(at, at + size)) for at in range(0, len(table), size)]

    def _drawn(
        self, wanted: Wanted, weight_version: int, when_few_are_left: Callable[[], object] | None
    ) -> SampleTable:
        """The responses to the next prompts, with their rewards."""
        config, recipe = self._config, self._recipe
        plan = GroupPlan(
            num_samples=recipe.num_samples_per_prompt,
            sampling=Sampling(
                temperature=config.temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=config.top_k or -1,
            ),
            max_tokens=config.max_response_tokens,
            seed=self._seed,
            first_draw=self.position,
            weight_version=weight_version,
            with_routes=self._keeper.routed is not None,
            with_greedy=recipe.needs_greedy_baseline,
        )
        with self._timers("rollout"):
            self._num_calls += 1
            groups = self._workers.sample(
                plan,
                wanted,
                self._prompt_of,
                key=f"{self._num_calls}",
                differs=_rewards_differ if wanted.compares else None,
                when_few_are_left=when_few_are_left,
            )
        with self._timers("reward"):
            table, num_draws = self._workers.settle(groups, self._waited_for_rollouts)
        self.position += num_draws
        self._num_generated_tokens += int(table.response_lengths.sum())
        self._num_generated_tokens += int(table.baseline_lengths[:: plan.num_samples].sum())
        return table

    def _waited_for_rollouts(self, seconds: float) -> None:
        self._timers.move(seconds, "reward", "rollout")

    def _prompt_of(self, draw: int) -> Prompt:
        """Of a draw, counted from where the position is."""
        rows = prompt_indices(
            len(self._prompts), start=self.position + draw, count=1, seed=self._seed
        )
        return self._prompts[int(rows[0])]


def _rewards_differ(scored: Sequence[ScoredRollout]) -> bool:
    return _differ(SampleTable.of(scored))


def _differ(group: SampleTable) -> bool:
    rewards = group.rewards[group.valid]
    return len(select_informative_groups(rewards, np.zeros(len(rewards), dtype=np.int64))) > 0
