"""The samples that a step learns from: prompts, rollouts, rewards, and prompts drawn again.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) keeps a prompt only if its responses differ
in reward, as otherwise no response is better than another. A step draws as many prompts as are
missing, again and again but no more often than `--rl-max-refills`; what is missing then is filled
up with prompts that teach nothing, so that a step always has the same number of samples.

A sample whose reward failed has none: it counts in no comparison, and nothing is learnt from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.algorithms.estimators import select_informative_groups
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.data.prompts import PromptDataset, prompt_indices
from mcore_rl.flags.options import RLConfig
from mcore_rl.hybrid_engine.vllm.generation import seed_of
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rollout.engines import RolloutWorkers
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

    def collect(self, weight_version: int, when_few_are_left: Callable[[], object]) -> Collected:
        """One step's samples; in rollout mode. `when_few_are_left` is passed to the engine."""
        wanted = self._config.num_prompts_per_step
        self._num_generated_tokens = 0
        self._step_began_at = self.position
        self._keeper.forget()
        self._workers.draft_metrics()  # of what evaluations have sampled
        if not self._recipe.dynamic_sampling:
            return self._collected(self._drawn(wanted, weight_version, when_few_are_left))
        kept: list[SampleTable] = []
        useless: list[SampleTable] = []
        num_draws = 0
        while len(kept) < wanted and num_draws <= self._recipe.max_refills:
            # Training is not called back early: whether another draw follows is not known yet.
            for group in self._groups(self._drawn(wanted - len(kept), weight_version, None)):
                (kept if _differ(group) else useless).append(group)
            num_draws += 1
            if not any(group.valid.any() for group in (*kept, *useless)):
                break  # every reward fails, which more of them would not mend
        missing = wanted - len(kept)
        groups = kept + useless[: max(missing, 0)]
        metrics = {
            "rollout/refills": float(num_draws - 1),
            "rollout/uninformative_share": missing / wanted,
            "rollout/dropped_samples": float(
                (len(useless) - max(missing, 0)) * self._recipe.num_samples_per_prompt
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
        self, num_prompts: int, weight_version: int, when_few_are_left: Callable[[], object] | None
    ) -> SampleTable:
        """The responses to the next prompts, with their rewards."""
        size = self._recipe.num_samples_per_prompt
        with self._timers("data"):
            draws = range(self.position, self.position + num_prompts)
            prompts = self._draw(num_prompts)
            seeds = [seed_of(self._seed, "draw", draw) for draw in draws]
        with self._timers("rollout"):
            sampled = self._workers.generate(
                prompts,
                seeds,
                num_samples=size,
                temperature=self._config.temperature,
                top_p=1.0 if self._config.top_p is None else self._config.top_p,
                top_k=self._config.top_k or -1,
                weight_version=weight_version,
                when_few_are_left=when_few_are_left,
                with_routes=self._keeper.routed is not None,
            )
            greedy: dict[int, list[Rollout]] = {}
            if self._recipe.needs_greedy_baseline:
                greedy = self._workers.generate(
                    prompts, seeds, num_samples=1, temperature=0.0, weight_version=weight_version
                )
        with self._timers("reward"):
            table = self._workers.score(
                [rollout for of_prompt in sampled.values() for rollout in of_prompt],
                [draws[number] for number in sampled for _ in range(size)],
                [rollout for of_prompt in greedy.values() for rollout in of_prompt],
                waited=self._waited_for_rollouts,
            )
        self._num_generated_tokens += int(table.response_lengths.sum())
        self._num_generated_tokens += int(table.baseline_lengths[::size].sum())
        return table

    def _waited_for_rollouts(self, seconds: float) -> None:
        self._timers.move(seconds, "reward", "rollout")

    def _draw(self, num_prompts: int) -> list[Prompt]:
        rows = prompt_indices(
            len(self._prompts), start=self.position, count=num_prompts, seed=self._seed
        )
        self.position += num_prompts
        return [self._prompts[int(row)] for row in rows]


def _differ(group: SampleTable) -> bool:
    rewards = group.rewards[group.valid]
    return len(select_informative_groups(rewards, np.zeros(len(rewards), dtype=np.int64))) > 0
