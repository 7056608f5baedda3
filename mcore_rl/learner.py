"""What a step learns: from scored rollouts to log-probs, values, advantages and updates.

The algorithm (`mcore_rl.algorithms`) says what each is; here they get their inputs, on whichever
ranks these are, and the updates their order.

Shape legend: n samples of the step, b samples of this rank, t their tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.actor import Actor, ReferencePolicy, UpdateStats
from mcore_rl.algorithms.aggregation import Denominators
from mcore_rl.algorithms.estimators import AdvantageInputs
from mcore_rl.algorithms.kl import kl_penalty_rewards
from mcore_rl.algorithms.mismatch import MismatchSums, mismatch_weights
from mcore_rl.algorithms.registry import find_advantage_estimator
from mcore_rl.algorithms.segments import Segments
from mcore_rl.algorithms.shaping import overlong_penalty
from mcore_rl.algorithms.value_loss import explained_variance, value_loss
from mcore_rl.arguments import RLConfig
from mcore_rl.critic import Critic, ValueUpdateStats
from mcore_rl.hybrid_engine.layout import TrainLayout
from mcore_rl.packing import (
    Cuts,
    MicroBatching,
    build_train_batch,
    num_tokens,
    plan_step,
    split_mini_batches,
)
from mcore_rl.types import ScoredRollout, TrainBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's samples as the actor's ranks have them, and as the critic's do."""

    actor: TrainBatch
    critic: TrainBatch | None
    lengths: np.ndarray  # [n] int64, tokens of every sample of the step
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Learnt:
    """What the updates of a step did."""

    actor: list[UpdateStats]  # empty while the critic warms up
    critic: list[ValueUpdateStats]


class Learner:
    """Actor, reference and critic of a run. All methods are collective."""

    def __init__(
        self,
        config: RLConfig,
        layout: TrainLayout,
        batching: MicroBatching,
        actor: Actor,
        critic: Critic | None,
        *,
        reference: ReferencePolicy | None,
    ) -> None:
        self._config, self._layout, self._batching = config, layout, batching
        self.recipe = config.recipe
        self.actor, self.critic = actor, critic
        self.reference = reference
        self.kl_controller = self.recipe.kl_controller()
        self._rank = dist.get_rank()

    def make_batch(self, scored: Sequence[ScoredRollout]) -> StepBatch:
        """The samples as tensors, divided into mini-batches, ranks and micro-batches."""
        lengths = np.array([num_tokens(sample) for sample in scored], dtype=np.int64)
        batch = build_train_batch(scored, self._cuts(lengths, self._layout, self._batching))
        of_critic = None
        if self.critic_shares_layout:
            of_critic = batch
        elif self.critic is not None:
            cuts = self._cuts(lengths, self.critic.layout, self.critic.batching)
            of_critic = build_train_batch(scored, cuts)
        return StepBatch(batch, of_critic, lengths)

    def _cuts(self, lengths: np.ndarray, layout: TrainLayout, batching: MicroBatching) -> Cuts:
        plan = plan_step(
            lengths,
            num_mini_batches=self._config.num_mini_batches,
            dp_size=layout.dp_size,
            batching=batching,
        )
        return plan[layout.dp_rank(self._rank)]

    def with_log_probs(self, batch: StepBatch) -> StepBatch:
        """Log-probs of the actor and the reference, values of the critic, before any update."""
        samples = dataclasses.replace(batch.actor, old_log_probs=self.actor.log_probs(batch.actor))
        if self.reference is not None:
            with self.reference:
                samples = dataclasses.replace(
                    samples, ref_log_probs=self.actor.log_probs(batch.actor)
                )
        of_critic = batch.critic
        if of_critic is not None and self.critic is not None:
            values = self.critic.values(of_critic)
            of_critic = dataclasses.replace(of_critic, values=values)
            here = self._moved(values, of_critic, samples, batch.lengths, self.critic.runner.groups)
            samples = dataclasses.replace(samples, values=here)
        return dataclasses.replace(batch, actor=samples, critic=of_critic)

    def with_advantages(self, scored: Sequence[ScoredRollout], batch: StepBatch) -> StepBatch:
        """What each token is worth, what the critic is to learn, and the mismatch's correction."""
        samples = batch.actor
        assert samples.old_log_probs is not None
        mismatch = mismatch_weights(
            samples.old_log_probs,
            samples.rollout_log_probs,
            samples.loss_mask,
            samples.lengths,
            self.recipe.mismatch_config,
        )
        sums = MismatchSums.from_stacked(self.actor.runner.global_sum(mismatch.sums.stacked()))
        found = find_advantage_estimator(self.recipe.advantage).function(
            self._advantage_inputs(scored, samples), self.recipe.advantage_config
        )
        samples = dataclasses.replace(
            samples,
            advantages=found.advantages,
            returns=found.returns,
            weights=None if self.recipe.mismatch_correction == "none" else mismatch.weights,
        )
        of_critic = batch.critic
        if of_critic is not None:
            assert found.returns is not None, f"{self.recipe.advantage} gave no returns"
            there = self._moved(
                found.returns, samples, of_critic, batch.lengths, self.actor.runner.groups
            )
            of_critic = dataclasses.replace(of_critic, returns=there)
        metrics = {f"mismatch/{name}": value for name, value in sums.metrics().items()}
        metrics["kl/rollout_actor"] = metrics.pop("mismatch/kl")
        metrics.update(self._explained_variance(samples))
        return dataclasses.replace(batch, actor=samples, critic=of_critic, metrics=metrics)

    def _advantage_inputs(
        self, scored: Sequence[ScoredRollout], samples: TrainBatch
    ) -> AdvantageInputs:
        config, recipe = self._config, self.recipe
        response_lengths = np.array([len(s.rollout.response_token_ids) for s in scored])
        scores = np.array([s.reward for s in scored], dtype=np.float64)
        scores += overlong_penalty(
            response_lengths,
            buffer_tokens=recipe.overlong_buffer(config.max_response_tokens),
            max_response_tokens=config.max_response_tokens,
        )
        segments = Segments.of(samples.lengths, samples.loss_mask)
        rows = samples.sample_ids.numpy()
        token_rewards = torch.zeros(samples.num_tokens)
        if recipe.kl_place == "reward":
            penalties = self._kl_penalties(samples)
            token_rewards += penalties
            by_sample = torch.zeros(len(scored), dtype=torch.float64)
            by_sample[samples.sample_ids] = segments.sum(penalties.double())
        else:
            by_sample = None
        # The outcome comes with the last token that was generated, which position length - 2
        # scores; an empty response has none.
        ends = samples.lengths.cumsum(0) - 2
        answered = segments.counts > 0
        token_rewards[ends[answered]] += torch.from_numpy(scores[rows]).float()[answered]
        if by_sample is not None:
            scores += self.actor.runner.global_sum(by_sample).numpy()
        return AdvantageInputs(
            scores=scores,
            group_ids=np.repeat(
                np.arange(len(scored) // config.samples_per_prompt), config.samples_per_prompt
            ),
            response_lengths=response_lengths,
            rows=rows,
            token_rewards=token_rewards,
            loss_mask=samples.loss_mask,
            lengths=samples.lengths,
            baselines=_baselines(scored),
            values=samples.values,
            global_sum=self.actor.runner.global_sum,
        )

    def _kl_penalties(self, samples: TrainBatch) -> torch.Tensor:
        """`[t]`, with the controller's present coefficient; the controller hears of the KL."""
        assert samples.old_log_probs is not None and samples.ref_log_probs is not None
        kl = -kl_penalty_rewards(
            samples.old_log_probs,
            samples.ref_log_probs,
            samples.loss_mask,
            coef=1.0,
            estimator=self.recipe.kl_estimator,
        )
        sums = torch.tensor([kl.double().sum(), samples.loss_mask.sum(), samples.num_samples])
        total, tokens, count = self.actor.runner.global_sum(sums.double()).tolist()
        penalties = -self.kl_controller.coef * kl
        self.kl_controller.update(total / max(tokens, 1.0), int(count))
        return penalties

    def _explained_variance(self, samples: TrainBatch) -> dict[str, float]:
        if samples.values is None or samples.returns is None:
            return {}
        sums = value_loss(
            samples.values,
            old_values=samples.values,
            returns=samples.returns,
            loss_mask=samples.loss_mask,
            lengths=samples.lengths,
            denominators=Denominators(1.0, 1.0),
            config=self.recipe.value_loss_config(self._config.max_response_tokens),
        ).sums
        total = type(sums).from_stacked(self.actor.runner.global_sum(sums.stacked()))
        tokens = max(float(total.num_tokens), 1.0)
        return {
            "critic/explained_variance": explained_variance(total),
            "critic/value_mean": float(total.values) / tokens,
            "critic/return_mean": float(total.returns) / tokens,
        }

    def _moved(
        self,
        values: torch.Tensor,
        held: TrainBatch,
        wanted: TrainBatch,
        lengths: np.ndarray,
        groups: dict[str, dist.ProcessGroup],
    ) -> torch.Tensor:
        """`[t]` of the samples in `held` -> `[t]` of those in `wanted`, from rank to rank.

        `groups` are those of the layout that `values` are in. A float32 per token of the step
        passes through every rank.
        """
        if self.critic_shares_layout:
            return values
        starts = torch.from_numpy(lengths.cumsum() - lengths)
        everywhere = torch.zeros(int(lengths.sum()), device=self.actor.runner.device)
        everywhere[_places(held, starts)] = values.to(everywhere.device)
        dist.all_reduce(everywhere, group=groups["dp"])
        return everywhere[_places(wanted, starts)].cpu()

    @property
    def critic_shares_layout(self) -> bool:
        """Whether actor and critic have the same samples on every rank."""
        return self.critic is not None and self.critic.layout == self._layout

    def update(self, step: int, batch: StepBatch) -> Learnt:
        """One optimizer step per mini-batch and epoch, of the critic and then of the actor."""
        warming_up = step < (self._config.critic_warmup_steps or 0)
        of_critic, of_actor = [], []
        if self.critic is not None and batch.critic is not None:
            of_critic = [self.critic.update(part) for part in self._parts(batch.critic)]
        if not warming_up:
            of_actor = [self.actor.update(part) for part in self._parts(batch.actor)]
        interval = self._config.reference_refresh_interval
        if interval and self.reference is not None and (step + 1) % interval == 0:
            self.reference.refresh()
        return Learnt(of_actor, of_critic)

    def rates(self) -> dict[str, float]:
        """Learning rates and the coefficient of the KL, as they are after the step."""
        found = {"learning_rate": self.actor.optimizer.learning_rate}
        if self.critic is not None:
            found["critic/learning_rate"] = self.critic.optimizer.learning_rate
        if self.recipe.kl_place == "reward":
            found["kl/coef"] = self.kl_controller.coef
        return found

    def _parts(self, batch: TrainBatch) -> Iterator[TrainBatch]:
        for _ in range(self._config.num_epochs):
            yield from split_mini_batches(batch)


def _places(batch: TrainBatch, starts: torch.Tensor) -> torch.Tensor:
    """`[t]`: where a batch's tokens are among all of the step's, sample by sample."""
    own = batch.lengths.cumsum(0) - batch.lengths
    shift = starts[batch.sample_ids] - own
    return torch.arange(batch.num_tokens) + shift.repeat_interleave(batch.lengths)


def _baselines(scored: Sequence[ScoredRollout]) -> np.ndarray | None:
    if any(sample.baseline is None for sample in scored):
        return None
    return np.array([sample.baseline for sample in scored], dtype=np.float64)
