"""Evaluations on held-out prompts."""

from __future__ import annotations

from mcore_rl.common import objects
from mcore_rl.data.prompts import PromptDataset
from mcore_rl.hybrid_engine.vllm.generation import Sampling, seed_of
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rollout.dispatch import SamplingTarget
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.groups import GroupPlan, GroupScheduler
from mcore_rl.rollout.options import EvaluationOptions, RolloutOptions


def is_due(options: EvaluationOptions, step: int, num_steps: int) -> bool:
    """Return whether a run of `num_steps` steps evaluates before step `step`."""
    interval = options.eval_interval
    return interval > 0 and (step % interval == 0 or step == num_steps)


class Evaluator:
    """Samples held-out prompts once each. Collective over the engines' ranks."""

    def __init__(
        self,
        workers: RolloutWorkers,
        prompts: PromptDataset,
        options: EvaluationOptions,
        rollout: RolloutOptions,
        *,
        seed: int,
        timers: StageTimers,
    ) -> None:
        self.workers, self._prompts, self._options = workers, prompts, options
        self._rollout, self._seed, self._timers = rollout, seed, timers
        self._groups: GroupScheduler | None = None
        self._num_evaluations = 0

    def sample(self, step: int, weight_version: int) -> None:
        """Sample the prompts and start their rewards; in rollout mode."""
        plan = GroupPlan(
            num_samples=1,
            sampling=Sampling(self._options.eval_temperature, stop=self._rollout.stop),
            max_tokens=self._rollout.max_response_tokens,
            seed=seed_of(self._seed, "evaluation", step),
            first_draw=0,
            weight_version=weight_version,
        )
        self._num_evaluations += 1  # servers that fail make a run repeat one
        count = min(self._options.num_eval_prompts, len(self._prompts))
        with self._timers("eval"):
            self._groups = self.workers.sample(
                plan,
                SamplingTarget.of(count),
                self._prompts.__getitem__,
                key=f"evaluation {step}, {self._num_evaluations}",
            )
            self._groups.wait()  # a step's reward tickets begin after those of an evaluation
            objects.barrier()  # the wait for stragglers counts as evaluation, not as rollout

    def accuracy(self) -> float | None:
        """Return the share of samples whose reward is at least 1, without samples whose generation
        failed; None if none were sampled since the last call."""
        groups, self._groups = self._groups, None
        if groups is None:
            return None
        with self._timers("eval"):
            table, _ = self.workers.settle(groups, lambda seconds: None)
        rewards = table.rewards[~table.has_failed]
        return float((rewards >= 1.0).mean()) if len(rewards) else None
