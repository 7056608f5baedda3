"""The training half of a step: from scored rollouts to log-probs, values, advantages, updates.

`mcore_rl.algorithms` defines each of them; this module collects their inputs, from whichever ranks
have them, and orders the updates.

Shape legend: n samples of the step, b samples of this rank, t their tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.algorithms.aggregation import Denominators, Segments
from mcore_rl.algorithms.distillation import TeacherSums, teacher_penalties
from mcore_rl.algorithms.estimators import advantages_of_valid, overlong_penalty
from mcore_rl.algorithms.interfaces import AdvantageInputs, SelectionInputs
from mcore_rl.algorithms.kl import kl_of_loss_tokens
from mcore_rl.algorithms.mismatch import MismatchSums, mismatch_weights
from mcore_rl.algorithms.registry import find_advantage_estimator, find_policy_loss
from mcore_rl.algorithms.supervised import Preference, preference_metrics
from mcore_rl.algorithms.value_loss import explained_variance, value_loss
from mcore_rl.batching.assignment import division_of, orders_of_epochs
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import StepBatch, TrainBatch
from mcore_rl.common import objects
from mcore_rl.rewards.functions import ENVIRONMENT
from mcore_rl.rollout.comparison import GroupComparison
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.trainer.actor import Actor, UpdateStats
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.mixed import MixedDemonstrations
from mcore_rl.trainer.roles.critic import StepCritic, ValueUpdateStats
from mcore_rl.trainer.roles.reference import ReferencePolicy
from mcore_rl.trainer.roles.samples import (
    batch_by_plan,
    mini_batches,
    plan_epochs,
    with_given_routes,
    with_top_tokens,
)
from mcore_rl.trainer.roles.teacher import StepTeachers
from mcore_rl.trainer.step_metrics import mean_entropy, mismatch_metrics


@dataclass(frozen=True, slots=True)
class Updates:
    """The outcomes of a step's updates."""

    actor: list[UpdateStats]  # empty during the critic's warm-up
    critic: list[ValueUpdateStats]


class Learner:
    """Actor, reference, critic and teachers of a run. All methods are collective."""

    def __init__(
        self,
        job: Job,
        actor: Actor,
        critic: StepCritic | None,
        *,
        reference: ReferencePolicy | None,
        teachers: StepTeachers | None = None,
        sample_store: SampleStore,
    ) -> None:
        """`sample_store` has a step's samples, with their experts if training uses them."""
        config = job.config
        self._options, self._seed = config.trainer, job.args.seed
        self._layout, self._batching = job.spec.train_layout, job.micro_batching()
        self._rewards = job.spec.rewards
        self._max_response_tokens = config.rollout.max_response_tokens
        self._critic_warmup_steps = config.critic.warmup_steps or 0
        self.recipe = config.recipe
        self.actor, self.critic = actor, critic
        self.reference, self.sample_store = reference, sample_store
        self.teachers, self._teacher_coef = teachers, config.teacher.teacher_coef
        self.demonstrations: MixedDemonstrations | None = None  # what updates learn besides
        # `Prompt.index` of samples, `[n]` -> `SourceSpec.key` of each; None: there are no sources
        self.source_keys: Callable[[np.ndarray], Sequence[str]] | None = None
        self.kl_controller = self.recipe.kl_controller()
        self.entropy_controller = self.recipe.entropy_controller()
        self._entropy_coef = self.entropy_controller.weight  # of this step
        self._kl_coef = self.kl_controller.coef  # of this step; the controller has the next step's
        self._rank = dist.get_rank()
        # With one update per step, the update's own forward pass runs the policy before it: scoring
        # the samples first would repeat that pass. A KL in the reward needs log-probs earlier, as
        # a teacher does, and so do the metrics of a step without an update, and a loss that selects
        # tokens before it. If old log-probs are the engine's, the first update only measures the
        # mismatch.
        self._old_is_rollout = self.recipe.old_log_probs == "rollout"
        self.scores_in_update = (
            self._old_is_rollout
            or (
                self._options.num_mini_batches * self._options.num_epochs == 1
                and self.recipe.kl_place != "reward"
                and teachers is None
                and not self._critic_warmup_steps
                and not actor.has_dropout
                and find_policy_loss(self.recipe.policy_loss).select is None
            )
            or self.recipe.trains_on == "demonstrations"
        )  # whose loss compares no policies

    def make_batch(self, step: int, table: SampleTable) -> StepBatch:
        """Return the samples as tensors, divided into mini-batches, ranks and micro-batches."""
        orders = orders_of_epochs(
            self.informative_groups(table),
            group_sizes=np.bincount(table.group_ids),
            num_mini_batches=self._options.num_mini_batches,
            num_epochs=self._options.num_epochs,
            seed=self._seed,
            step=step,
        )
        epochs = plan_epochs(
            table,
            num_mini_batches=self._options.num_mini_batches,
            dp_size=self._layout.dp_size,
            batching=self._batching,
            orders=orders,
        )
        division = division_of(epochs, table.lengths, self._layout.dp_ranks())
        tokens = self.sample_store.deliver(table, division.every)
        trained = self._trained(table)
        batch = batch_by_plan(trained, tokens, epochs, self._layout.dp_rank(self._rank))
        metrics = {}
        if self.sample_store.routed is not None:
            batch = with_given_routes(batch, tokens, self.sample_store.of_stage())
            # A sample's last token never went through the engine.
            metrics = self._replayed(batch, batch.num_tokens - batch.num_samples)
        if self.sample_store.num_top:
            batch = with_top_tokens(batch, tokens, self.sample_store.num_top)
        for_critic = None
        if self.critic is not None:
            for_critic = self.critic.divide(self.sample_store, trained, orders)
        if self.teachers is not None:
            self.teachers.divide(self.sample_store, trained)
        return StepBatch(batch, division, for_critic, metrics)

    def _replayed(self, batch: TrainBatch, num_tokens: int) -> dict[str, float]:
        """Return the share of `num_tokens` tokens here whose experts are given, over all ranks."""
        assert batch.routes_known is not None
        counts = torch.tensor([float(batch.routes_known.sum()), float(num_tokens)])
        known, total = self.actor.runner.global_sum(counts.double()).tolist()
        return {"moe/replayed_share": known / max(total, 1.0)}

    def _trained(self, table: SampleTable) -> SampleTable:
        """Return the table in which samples that the losses leave out are not valid.

        They are valid in `table` itself: their rewards count in their group, as in TRL.
        """
        if not self.recipe.mask_truncated:
            return table
        why = zip(table.why_not_valid, table.is_cut, strict=True)
        return dataclasses.replace(
            table, why_not_valid=tuple(w or ("it is truncated" if cut else None) for w, cut in why)
        )

    def informative_groups(self, table: SampleTable) -> np.ndarray:
        """Return `[g]` bool: groups with a trained sample and with one whose advantages are not
        0."""
        group_ids = table.group_ids
        groups = np.unique(group_ids)
        is_trained = np.isin(groups, group_ids[self._trained(table).valid])
        estimator = find_advantage_estimator(self.recipe.advantage)
        if not estimator.compares_group:
            return is_trained
        informative = [self._comparison.informative(table, group_ids)]
        if self.teachers is not None:
            informative.append(group_ids[self.teachers.teacher_of(table) >= 0])
        return is_trained & np.isin(groups, np.concatenate(informative))

    @property
    def _comparison(self) -> GroupComparison:
        return GroupComparison(self.recipe, self._rewards, self.source_keys)

    def with_log_probs(self, batch: StepBatch) -> StepBatch:
        """Add the log-probs of actor and reference and the critic's values, before any update."""
        samples = batch.actor
        values = None if self.critic is None else self.critic.begin_values(batch)
        teacher = None if self.teachers is None else self.teachers.begin(batch)
        if not self.scores_in_update:
            samples = self.actor.scored(samples)
        if self.reference is not None:
            # The reference is another model, which chooses its experts itself.
            unrouted = dataclasses.replace(batch.actor, routes=None, routes_known=None)
            with self.reference:
                ref_log_probs = self.actor.log_probs(unrouted)
            samples = dataclasses.replace(samples, ref_log_probs=ref_log_probs)
        if values is not None:
            samples = dataclasses.replace(samples, values=values())
        if self.teachers is not None and teacher is not None:
            scores = teacher()
            samples = dataclasses.replace(
                samples,
                teacher_log_probs=scores[:, 0].contiguous(),
                teacher_outputs=scores[:, 1:].contiguous() if scores.shape[1] > 1 else None,
                teacher_mask=self.teachers.mask(samples),
            )
        return dataclasses.replace(batch, actor=samples)

    def with_advantages(self, table: SampleTable, batch: StepBatch) -> StepBatch:
        """Add each token's advantage, the critic's targets, and the mismatch correction."""
        samples, metrics = batch.actor, dict(batch.metrics)
        if samples.old_log_probs is not None and not self.recipe.is_supervised:
            mismatch = mismatch_weights(
                samples.old_log_probs,
                samples.rollout_log_probs,
                samples.loss_mask,
                samples.lengths,
                self.recipe.mismatch_config,
            )
            sums = self.actor.runner.global_sum(mismatch.sums.stacked())
            metrics.update(mismatch_metrics(MismatchSums.from_stacked(sums)))
            if self.recipe.mismatch_correction != "none":
                samples = dataclasses.replace(samples, weights=mismatch.weights)
        inputs = self.advantage_inputs(table, samples)
        estimated = advantages_of_valid(
            find_advantage_estimator(self.recipe.advantage).function,
            inputs,
            self.recipe.advantage_config,
            table.valid,
        )
        samples = dataclasses.replace(
            samples,
            advantages=estimated.advantages,
            returns=estimated.returns,
        )
        if samples.teacher_log_probs is not None:
            samples, of_teachers = self._with_penalties(samples)
            metrics.update(of_teachers.metrics())
        self._require_finite_advantages(samples, inputs)
        samples = dataclasses.replace(samples, selected=self._selected(table, samples))
        metrics.update(self._explained_variance(samples))
        if isinstance(self.recipe.advantage_config, Preference):
            of_pairs = inputs.scores, inputs.response_lengths
            metrics.update(preference_metrics(*of_pairs, self.recipe.advantage_config))
        return dataclasses.replace(batch, actor=samples, metrics=metrics)

    def _with_penalties(self, samples: TrainBatch) -> tuple[TrainBatch, TeacherSums]:
        """Add the teachers' part to the advantages, after any normalisation of rewards."""
        student = samples.rollout_log_probs if self._old_is_rollout else samples.old_log_probs
        assert samples.advantages is not None and student is not None
        assert samples.teacher_log_probs is not None
        mask = samples.loss_mask
        if samples.teacher_mask is not None:
            mask = mask & samples.teacher_mask
        penalties, sums = teacher_penalties(
            student, samples.teacher_log_probs, mask, self._teacher_coef
        )
        total = TeacherSums.from_stacked(self.actor.runner.global_sum(sums.stacked()))
        if samples.teacher_outputs is None:  # else the loss has a term
            samples = dataclasses.replace(samples, advantages=samples.advantages + penalties)
        return samples, total

    def _selected(self, table: SampleTable, samples: TrainBatch) -> torch.Tensor | None:
        """Return `[t]` bool: tokens that the policy loss selects; None if it selects none."""
        select = find_policy_loss(self.recipe.policy_loss).select
        if select is None:
            return None
        old = samples.rollout_log_probs if self._old_is_rollout else samples.old_log_probs
        assert old is not None and samples.advantages is not None, "no scoring pass"
        # By draw and number in the group, so that the layout does not matter.
        groups = table.group_ids
        number = np.arange(len(table)) - np.searchsorted(groups, groups)
        random = [
            np.random.default_rng([self._seed, table.draws[row], number[row]]).random(length)
            for row, length in zip(
                samples.sample_ids.tolist(), samples.lengths.tolist(), strict=True
            )
        ]
        inputs = SelectionInputs(
            old,
            samples.advantages,
            samples.loss_mask,
            torch.from_numpy(np.concatenate([np.empty(0), *random])).float(),
            self.actor.runner.global_sum,
        )
        return select(inputs, self.recipe.policy_loss_parameters)

    def _require_finite_advantages(self, samples: TrainBatch, inputs: AdvantageInputs) -> None:
        """Raise RuntimeError on all ranks, naming the first non-finite tensor of each.

        Inputs of the advantages come first: whitening spreads one NaN over all of them.
        """
        assert samples.advantages is not None
        total = self.actor.runner.global_sum((~torch.isfinite(samples.advantages)).sum()[None])
        if not total.item():
            return
        mine = None
        for name, values in (
            ("log-probs", samples.old_log_probs),
            ("reference's log-probs", samples.ref_log_probs),
            ("teacher's log-probs", samples.teacher_log_probs),
            ("values", samples.values),
            ("rewards", inputs.token_rewards),
            ("advantages", samples.advantages),
        ):
            if mine is None and values is not None and not torch.isfinite(values).all():
                first = (~torch.isfinite(values)).nonzero()[0, 0]
                index = int(torch.searchsorted(samples.lengths.cumsum(0), first, right=True))
                mine = f"{name} of sample {int(samples.sample_ids[index])} of the step"
        everywhere = objects.all_gather(mine)
        named = [f"rank {rank}: {text}" for rank, text in enumerate(everywhere) if text]
        raise RuntimeError(
            f"{int(total.item())} advantages of --rl-advantage {self.recipe.advantage} are not "
            f"finite, first of all on {'; '.join(named)}"
        )

    def advantage_inputs(self, table: SampleTable, samples: TrainBatch) -> AdvantageInputs:
        """Return what an estimator gets: rewards after clipping, penalties and KL. Collective."""
        scores = self._comparison.clipped(table.rewards)
        scores = scores + self._overlong_penalty(table.response_lengths)
        scores -= self.recipe.missing_eos_penalty * table.is_cut
        segments = Segments.of(samples.lengths, samples.loss_mask)
        rows = samples.sample_ids.numpy()
        token_rewards = torch.zeros(samples.num_tokens)
        if self.recipe.kl_place == "reward":
            penalties = self._kl_penalties(samples)
            token_rewards += penalties
            by_sample = torch.zeros(len(table), dtype=torch.float64)
            by_sample[samples.sample_ids] = segments.sum(penalties.double())
        else:
            by_sample = None
        # The outcome is the reward of the last generated token, which position length - 2 scores;
        # an empty response has none. What an environment pays is a reward of its turn.
        ends = samples.lengths.cumsum(0) - 2
        answered = segments.counts > 0
        outcomes = torch.from_numpy(scores[rows]).float()
        if samples.turn_rewards is not None:
            of_turns = self._rewards.weight(ENVIRONMENT) * samples.turn_rewards * samples.loss_mask
            token_rewards += of_turns
            outcomes -= segments.sum(of_turns.double()).float()
        token_rewards[ends[answered]] += outcomes[answered]
        if by_sample is not None:
            scores += self.actor.runner.global_sum(by_sample).numpy()
        parts, weights = self._comparison.parts(table) if table.parts else (None, None)
        return AdvantageInputs(
            scores=scores,
            group_ids=table.group_ids,
            response_lengths=table.generated_lengths,
            rows=rows,
            token_rewards=token_rewards,
            loss_mask=samples.loss_mask,
            lengths=samples.lengths,
            baselines=self._baselines(table),
            values=samples.values,
            reward_parts=parts,
            reward_weights=weights,
            global_sum=self.actor.runner.global_sum,
        )

    def _overlong_penalty(self, response_lengths: np.ndarray) -> np.ndarray:
        max_response_tokens = self._max_response_tokens
        return overlong_penalty(
            response_lengths,
            buffer_tokens=self.recipe.overlong_buffer(max_response_tokens),
            max_response_tokens=max_response_tokens,
        )

    def _baselines(self, table: SampleTable) -> np.ndarray | None:
        """Return outcomes of greedy responses, with the penalties of samples."""
        if np.isnan(table.baselines).any():
            return None
        penalties = self._overlong_penalty(table.baseline_lengths)
        penalties -= self.recipe.missing_eos_penalty * table.baseline_is_cut
        outcomes: np.ndarray = self._comparison.clipped(table.baselines) + penalties
        return outcomes

    def _kl_penalties(self, samples: TrainBatch) -> torch.Tensor:
        """Return `[t]` penalties by the controller's present coefficient; update the controller."""
        old = samples.rollout_log_probs if self._old_is_rollout else samples.old_log_probs
        assert old is not None and samples.ref_log_probs is not None
        kl = kl_of_loss_tokens(
            old,
            samples.ref_log_probs,
            samples.loss_mask,
            self.recipe.kl_estimator,
            self.recipe.kl_clamp,
        )
        sums = torch.tensor([kl.double().sum(), samples.loss_mask.sum(), samples.num_samples])
        total, tokens, count = self.actor.runner.global_sum(sums.double()).tolist()
        self._kl_coef = self.kl_controller.coef
        penalties = -self._kl_coef * kl
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
            config=self.recipe.value_loss_config(self._max_response_tokens),
        ).sums
        total = type(sums).from_stacked(self.actor.runner.global_sum(sums.stacked()))
        tokens = max(float(total.num_tokens), 1.0)
        return {
            "critic/explained_variance": explained_variance(total),
            "critic/value_mean": float(total.values) / tokens,
            "critic/return_mean": float(total.returns) / tokens,
        }

    def update(self, step: int, batch: StepBatch) -> Updates:
        """Take one optimizer step per mini-batch and epoch, of critic and actor."""
        warming_up = step < self._critic_warmup_steps
        end_update = None if self.critic is None else self.critic.begin_update(batch)
        of_actor = []
        if not warming_up:
            group = self.actor.runner.groups["dp"]
            parts = mini_batches(batch.actor, self._options.num_epochs, batch.division, group)
            is_adapted = self.entropy_controller.target is not None
            if is_adapted:
                self._entropy_coef = self.entropy_controller.weight
                self.actor.weigh_entropy(self._entropy_coef)
            parts = self._with_old_log_probs(parts)
            if self.demonstrations is None:
                of_actor = [self.actor.update(part) for part in parts]
            else:
                rows = itertools.cycle(self.demonstrations.mini_batches(step))  # anew in each epoch
                of_actor = [self.actor.update(part, next(rows)) for part in parts]
            if is_adapted:
                self.entropy_controller.update(mean_entropy(of_actor))
        of_critic = [] if end_update is None else end_update()
        interval = self._options.reference_refresh_interval
        if interval and self.reference is not None and (step + 1) % interval == 0:
            self.reference.refresh(step + 1)
        return Updates(of_actor, of_critic)

    def _with_old_log_probs(self, parts: Iterator[TrainBatch]) -> Iterator[TrainBatch]:
        """Give the engine's log-probs as old ones to all updates but the first, if they are used.

        The first has none, so that it also measures the mismatch of engine and actor."""
        for number, part in enumerate(parts):
            if self._old_is_rollout and number:
                part = dataclasses.replace(part, old_log_probs=part.rollout_log_probs)
            yield part

    def rates(self) -> dict[str, float]:
        """Return learning rates of the step's last updates, the step's coefficients, and the
        critic's metrics."""
        rates = {"learning_rate": self.actor.optimizer.learning_rate}
        if self.critic is not None:
            rates.update(self.critic.metrics())
        if self.recipe.kl_place == "reward" and not self.recipe.is_supervised:
            rates["kl/coef"] = self._kl_coef
        if self.recipe.entropy_target is not None:
            rates["entropy_coef"] = self._entropy_coef
        return rates
