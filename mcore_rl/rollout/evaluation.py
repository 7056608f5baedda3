"""Evaluations on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcore_rl.algorithms.evaluation import (
    ks_of,
    majority_is_correct,
    pass_at_k,
    wilson_interval,
)
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.common import objects
from mcore_rl.data.prompts import PromptSources
from mcore_rl.hybrid_engine.vllm.generation import Sampling, seed_of
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rewards.functions import NAMED_ANSWERS
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.group_sampler import GroupSampler, Rules
from mcore_rl.rollout.options import EvaluationOptions, RolloutOptions
from mcore_rl.rollout.sampling_state import StepCounts
from mcore_rl.rollout.segments import OpenGroup


def is_due(options: EvaluationOptions, step: int, num_steps: int) -> bool:
    """Return whether a run of `num_steps` steps evaluates before step `step`."""
    interval = options.eval_interval
    return interval > 0 and (step % interval == 0 or step == num_steps)


class Evaluator:
    """Samples the first held-out prompts of each set. Collective over the engines' ranks."""

    def __init__(
        self,
        workers: RolloutWorkers,
        prompts: PromptSources,
        options: EvaluationOptions,
        rollout: RolloutOptions,
        rewards: RewardSpec,
        *,
        seed: int,
        timers: StageTimers,
    ) -> None:
        self.workers, self._prompts, self._options = workers, prompts, options
        self._rollout, self._rewards, self._seed, self._timers = rollout, rewards, seed, timers
        self._positions = prompts.first_of_each(options.num_eval_prompts)
        self._plan: GroupPlan | None = None  # of the groups
        self._groups: list[OpenGroup] | None = None
        self._num_evaluations = 0

    def sample(self, step: int, weight_version: int) -> None:
        """Sample the prompts and start their rewards; in rollout mode."""
        plan = GroupPlan(
            num_samples=self._options.eval_samples,
            sampling=Sampling(self._options.eval_temperature, stop=self._rollout.stop),
            max_tokens=self._rollout.max_response_tokens,
            seed=seed_of(self._seed, "evaluation", step),
        )
        self._num_evaluations += 1  # servers that fail make a run repeat one
        with self._timers("eval"):
            rules = Rules(len(self._positions), deterministic=self._rollout.deterministic)
            name = f"evaluation {self._num_evaluations}"
            sampler = GroupSampler(self.workers, plan, self._prompt_of, rules, name=name)
            sampler.begin_step(weight_version)
            decision = sampler.sample()
            assert decision is not None, "nothing stops it"
            sampler.end_step()
            self._plan, self._groups = plan, sampler.groups_of(decision.taken)
            objects.barrier()  # the wait for stragglers counts as evaluation, not as rollout

    def _prompt_of(self, draw: int) -> Prompt:
        return self._prompts[int(self._positions[draw])]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last `sample`, of all sets together and, if there are several,
        of each (`eval/NAME/...`); see `sample_metrics`. Empty if none were sampled since the last
        call, or if every generation failed."""
        plan, groups, self._groups = self._plan, self._groups, None
        if groups is None or plan is None:
            return {}
        several = self._options.eval_samples > 1
        weights = [self._rewards.weights_of(spec.key) for spec in self._prompts.specs]
        named = [bool(NAMED_ANSWERS.keys() & each.keys()) for each in weights]
        with self._timers("eval"):
            table, _ = self.workers.score(plan, groups, StepCounts())
            answers = self._answers(table) if several and any(named) else []
        metrics = sample_metrics("eval", table, answers if all(named) else [], several=several)
        sources = self._prompts.sources_of(table.prompts)
        for number, name in enumerate(self._prompts.names):
            rows = np.flatnonzero(sources == number)
            own = [answers[row] for row in rows] if several and named[number] else []
            metrics |= sample_metrics(f"eval/{name}", table.take(rows), own, several=several)
        return metrics

    def _answers(self, table: SampleTable) -> list[str | None]:
        """Return the answer that each sample gives, the same on all ranks. Collective."""
        answers: list[str | None] = objects.broadcast(
            [self._answer(sample.rollout) for sample in self.workers.samples_of(table)]
        )
        return answers

    def _answer(self, rollout: Rollout) -> str | None:
        names = self._rewards.weights_of(rollout.prompt.source)
        answer_in = next((NAMED_ANSWERS[name] for name in names if name in NAMED_ANSWERS), None)
        return None if answer_in is None else answer_in(rollout.text)


def sample_metrics(
    prefix: str,
    table: SampleTable,
    answers: Sequence[str | None],
    *,
    several: bool,
) -> dict[str, float]:
    """Return `accuracy`, the share of samples whose reward is at least 1, without samples whose
    generation failed; nothing if all failed.

    With `several` samples per prompt also pass@k, avg@n and, unless `answers` is empty, maj@n:
    means over prompts, with `_low` and `_high` of their 95 % Wilson intervals. `answers` are those
    that samples give, None for none.
    """
    counts = ~table.has_failed
    correct = (table.rewards >= 1.0) & table.has_reward
    if not counts.any():
        return {}
    metrics = {f"{prefix}/accuracy": float((table.rewards[counts] >= 1.0).mean())}
    if not several:
        return metrics
    groups = [np.flatnonzero(counts & (table.draws == draw)) for draw in np.unique(table.draws)]
    num_samples = int(np.unique(table.draws, return_counts=True)[1].max())
    passed = [(len(rows), int(correct[rows].sum())) for rows in groups if len(rows)]
    values = {
        f"pass@{k}": [pass_at_k(n, c, k) for n, c in passed if n >= k] for k in ks_of(num_samples)
    }
    values[f"avg@{num_samples}"] = [c / n for n, c in passed]
    if answers:
        values[f"maj@{num_samples}"] = [
            majority_is_correct([answers[row] for row in rows], correct[rows].tolist())
            for rows in groups
            if len(rows)
        ]
    for name, of_prompts in values.items():
        if not of_prompts:
            continue
        mean = float(np.mean(of_prompts))
        low, high = wilson_interval(mean, len(of_prompts))
        metrics |= {f"{prefix}/{name}": mean}
        metrics |= {f"{prefix}/{name}_low": low, f"{prefix}/{name}_high": high}
    return metrics
