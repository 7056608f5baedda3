"""The actor: Megatron's model as the policy in training, with its log-probs and its update.

Shape legend: t tokens of a rank's samples. Tensors are in scoring alignment (see
`mcore_rl.batching.types`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcore_rl.algorithms.aggregation import Denominators, Segments, masked
from mcore_rl.algorithms.distillation import teacher_term
from mcore_rl.algorithms.mismatch import MismatchSums, mismatch_weights
from mcore_rl.algorithms.score_centering import CenteringSums, centering_sums
from mcore_rl.algorithms.total_loss import PolicyLossSums, policy_loss_total
from mcore_rl.batching.rows import ModelRows
from mcore_rl.batching.types import TrainBatch
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.optimizer import CheckedOptimizer, UpdateResult
from mcore_rl.megatron.policy_head import EngineTopK, TeacherHidden, TeacherTopK
from mcore_rl.megatron.runner import ModelRunner
from mcore_rl.moe.routing import R2
from mcore_rl.moe.routing_replay import RoutingReplay
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.mixed import with_demonstrations
from mcore_rl.trainer.roles.teacher import teacher_columns


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """The outcome of one optimizer step; sums are over the global mini-batch, same on all ranks."""

    sums: PolicyLossSums
    result: UpdateResult
    mismatch: MismatchSums | None = None  # if the update itself scored the samples first
    mtp: MTPSums | None = None  # if MTP layers are trained
    demonstrations: DemonstrationSums | None = None  # learned beside the samples
    indexer_loss: float | None = None  # if indexers of sparse attention are trained
    indexer_replaced: float | None = None  # with sparse attention
    teacher_kl: float | None = None  # of the loss's term, summed over loss tokens
    centering: CenteringSums | None = None  # with --rl-score-centering


@dataclass(frozen=True, slots=True)
class MTPSums:
    """The MTP layers' sums over a global mini-batch."""

    loss: float  # cross-entropies in nats, of all layers
    num_tokens: float  # number of these terms; a token counts once for each layer


@dataclass(frozen=True, slots=True)
class DemonstrationSums:
    """The sums of demonstrations over a global mini-batch."""

    loss: float  # cross-entropies in nats
    num_tokens: float


class Actor:
    """The policy on this rank's pipeline stage and TP shard.

    All methods are collective over the model-parallel ranks (and, through the gradients, over DP).
    """

    def __init__(
        self,
        job: Job,
        state: megatron_adapter.TrainState,
        *,
        replay: RoutingReplay | None = None,
        temperature: float | None = None,
    ) -> None:
        """`replay` has the model's routers; it is needed if batches have `routes`. `temperature`
        replaces the job's."""
        config, layout = job.config, job.spec.train_layout
        self._args, self._routing_replay = job.args, config.trainer.routing_replay
        self._teacher, self._hidden_size = config.teacher, job.spec.shape.hidden_size
        # [v/tp, g], rows of the teacher's output layer, on the last stage and if they are needed
        self.teacher_head: torch.Tensor | None = None
        self._temperature = config.rollout.temperature if temperature is None else temperature
        self.state, self.replay = state, replay
        self.runner = ModelRunner(
            job.args, state, layout, job.micro_batching(), self._keywords, replay
        )
        self.optimizer = CheckedOptimizer(
            state, name="actor", on_nonfinite_grad=config.trainer.on_nonfinite_grad
        )
        self.loss_config = config.recipe.policy_loss_config(config.rollout.max_response_tokens)
        self._mismatch_config = config.recipe.mismatch_config
        self._old_is_rollout = config.recipe.old_log_probs == "rollout"
        self._demonstration_coef = config.supervised.coef

    @property
    def has_dropout(self) -> bool:
        """Whether a forward pass in training differs from one in scoring."""
        return bool(self._args.hidden_dropout or self._args.attention_dropout)

    def log_probs(self, batch: TrainBatch) -> torch.Tensor:
        """Return every next token's log-prob, `[t]` float32 on the CPU, on all TP, CP and PP ranks.

        `batch` is this DP rank's.
        """
        return self.runner.evaluate(batch, num_outputs=2)[:, 0].contiguous()

    def teacher_scores(self, batch: TrainBatch) -> torch.Tensor:
        """Return, by the weights that the model has now, what a teacher is asked for: `[t, 1 + m]`
        float32, see `TeacherRole.scores`."""
        hidden_size = self._hidden_size if self._teacher.with_hidden else 0
        return teacher_columns(
            self.runner.evaluate, batch, self._teacher.num_top_tokens, hidden_size
        )

    def scored(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with `old_log_probs`, and with the `routes` of this forward pass under
        --rl-routing-replay r2."""
        self._compare_routes(True)
        if self._routing_replay == R2:
            scores, batch = self.runner.evaluate_recording(batch, num_outputs=2)
            return dataclasses.replace(batch, old_log_probs=scores[:, 0].contiguous())
        return dataclasses.replace(batch, old_log_probs=self.log_probs(batch))

    def _compare_routes(self, compares: bool) -> None:
        """Compare given experts with the routers' own choices, before a step's first update."""
        if self.replay is not None:
            self.replay.counts = compares

    def update(self, batch: TrainBatch, demonstrations: TrainBatch | None = None) -> UpdateStats:
        """Take one optimizer step on one mini-batch; `batch` is this DP rank's part of it, and
        `demonstrations` its part of the demonstrations that are learned besides.

        `batch` must have `advantages`, and `ref_log_probs` if there is a KL term. Without
        `old_log_probs` this forward pass also scores the policy before the update, which is correct
        for the first update after a rollout: log-probs and the mismatch correction are taken from
        it, or with --rl-old-log-probs rollout the metrics of the mismatch alone. Raises
        RuntimeError on all ranks for a non-finite loss or gradient, unless set to skip it.
        """
        mtp_counts = self._mtp_counts(batch)
        counts = self.runner.global_counts(batch)
        num_learned = 0.0
        if demonstrations is not None:
            num_learned = float(self.runner.global_sum(demonstrations.loss_mask.sum().double()))
            batch = with_demonstrations(batch, demonstrations)
        loss = functools.partial(
            self._loss,
            denominators=counts.denominators,
            mtp_counts=mtp_counts,
            num_learned=num_learned,
        )
        scores_first = batch.old_log_probs is None
        self._compare_routes(scores_first)
        sizes = (
            len(PolicyLossSums.__slots__),
            scores_first * len(MismatchSums.__slots__),
            batch.teacher_outputs is not None,
            (batch.top_tokens is not None) * len(CenteringSums.__slots__),
            bool(mtp_counts),
            demonstrations is not None,
        )
        total = self.runner.accumulate_gradients(batch, loss, num_sums=sum(sizes))
        sums, of_mismatch, of_teacher, of_centering, of_mtp, of_demonstrations = total.sums.split(
            sizes
        )
        result = self.optimizer.step(
            num_samples=counts.num_samples, nonfinite_losses=total.nonfinite_ranks
        )
        megatron_adapter.finish_param_sync(self._args, self.state)
        mismatch = MismatchSums.from_stacked(of_mismatch) if scores_first else None
        mtp = MTPSums(float(of_mtp), sum(mtp_counts)) if mtp_counts else None
        policy = PolicyLossSums.from_stacked(sums)
        teacher_kl = None if batch.teacher_outputs is None else float(of_teacher)
        return UpdateStats(
            policy,
            result,
            mismatch,
            mtp,
            DemonstrationSums(float(of_demonstrations), num_learned)
            if demonstrations is not None
            else None,
            total.indexer_loss,
            total.indexer_replaced,
            teacher_kl,
            None if batch.top_tokens is None else CenteringSums.from_stacked(of_centering),
        )

    def weigh_entropy(self, coef: float) -> None:
        """Set the weight of the entropy in the loss of the following updates."""
        self.loss_config = dataclasses.replace(self.loss_config, entropy_coef=coef)

    def _mtp_counts(self, batch: TrainBatch) -> list[float]:
        """Return how many tokens of the global mini-batch each MTP layer is trained on."""
        num_layers = self._args.mtp_num_layers or 0
        masks = [predicted(batch.loss_mask, batch.lengths, 1 + i) for i in range(num_layers)]
        if not masks:
            return []
        return self.runner.global_sum(torch.stack(masks).sum(dim=1).double()).tolist()

    def _keywords(self, rows: ModelRows, samples: TrainBatch) -> dict[str, object]:
        keywords: dict[str, object] = {
            "target_ids": rows.target_ids,
            "scored": rows.scored,
            "temperature": self._temperature,
        }
        if samples.top_tokens is not None and samples.advantages is not None:  # in updates
            log_probs, ids = self.runner.in_rows(samples.top_tokens, rows).chunk(2, dim=-1)
            return {**keywords, "engine": EngineTopK(ids.long(), log_probs, self._mismatch_config)}
        if samples.teacher_outputs is None:
            return keywords
        outputs = self.runner.in_rows(samples.teacher_outputs, rows)
        if self._teacher.with_hidden:
            return {**keywords, "teacher": TeacherHidden(outputs, self.teacher_head)}
        log_probs, ids = outputs.chunk(2, dim=-1)
        return {**keywords, "teacher": TeacherTopK(ids.long(), log_probs)}

    def _loss(
        self,
        scores: torch.Tensor,
        samples: TrainBatch,
        *,
        denominators: Denominators,
        mtp_counts: Sequence[float],
        num_learned: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert samples.advantages is not None, "a stage before the update left out the advantages"
        log_probs, entropy, *more = scores.unbind(dim=1)
        expected_score, centering = None, None
        if samples.top_tokens is not None:
            expected_score, more = more[0], more[4:]
            centering = centering_sums(scores[:, 3:6], samples.loss_mask)
        of_mtp = more if samples.teacher_outputs is None else more[1:]
        old_log_probs, weights, mismatch = self._weighed(log_probs.detach(), samples)
        out = policy_loss_total(
            log_probs,
            entropy,
            old_log_probs=old_log_probs,
            advantages=samples.advantages,
            loss_mask=samples.loss_mask,
            lengths=samples.lengths,
            ref_log_probs=samples.ref_log_probs,
            weights=weights,
            rollout_log_probs=samples.rollout_log_probs,
            selected=samples.selected,
            expected_score=expected_score,
            denominators=denominators,
            config=self.loss_config,
        )
        sums = out.sums.stacked().double()
        if mismatch is not None:
            sums = torch.cat([sums, mismatch.stacked()])
        loss = out.loss
        if samples.teacher_outputs is not None:
            of_tokens = more[0]
            if samples.teacher_mask is not None:
                of_tokens = masked(samples.teacher_mask, of_tokens)
            teacher_loss, kl = teacher_term(
                of_tokens,
                samples.loss_mask,
                samples.lengths,
                denominators=denominators,
                aggregation=self.loss_config.aggregation,
            )
            loss = loss + self._teacher.teacher_coef * teacher_loss
            sums = torch.cat([sums, kl[None]])
        if centering is not None:
            sums = torch.cat([sums, centering.stacked()])
        if mtp_counts:
            mtp_loss, mtp_sum = mtp_cross_entropy(
                of_mtp, samples.loss_mask, samples.lengths, mtp_counts
            )
            sums = torch.cat([sums, mtp_sum[None]])
            loss = loss + self._args.mtp_loss_scaling_factor * mtp_loss
        if samples.demonstration_mask is not None:
            nats = -masked(samples.demonstration_mask, log_probs).sum()
            sums = torch.cat([sums, nats.detach().double()[None]])
            loss = loss + self._demonstration_coef * nats / max(num_learned, 1.0)
        return loss, sums

    def _weighed(
        self, log_probs: torch.Tensor, samples: TrainBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None, MismatchSums | None]:
        """Return old log-probs, weights of the mismatch and its sums, if they follow from these
        `log_probs` `[t]`: in the first update without a scoring pass, and with expected scores,
        whose weights are of the current policy."""
        old_log_probs = samples.old_log_probs
        if old_log_probs is not None and samples.top_tokens is None:
            return old_log_probs, samples.weights, None
        mismatch = mismatch_weights(
            log_probs,
            samples.rollout_log_probs,
            samples.loss_mask,
            samples.lengths,
            self._mismatch_config,
        )
        weights = None if self._mismatch_config.correction == "none" else mismatch.weights
        if old_log_probs is not None:
            return old_log_probs, weights, None
        old_log_probs = samples.rollout_log_probs if self._old_is_rollout else log_probs
        return old_log_probs, weights, mismatch.sums


def predicted(loss_mask: torch.Tensor, lengths: torch.Tensor, ahead: int) -> torch.Tensor:
    """Return `[t]` bool: whether the token `ahead` positions after a position's target belongs to
    the same sample and counts."""
    sample_ids = Segments.of(lengths, loss_mask).sample_ids
    is_predicted = torch.zeros_like(loss_mask)
    stop = max(0, len(loss_mask) - ahead)
    is_predicted[:stop] = loss_mask[ahead:] & (sample_ids[ahead:] == sample_ids[:stop])
    return is_predicted


def mtp_cross_entropy(
    log_probs: Sequence[torch.Tensor],
    loss_mask: torch.Tensor,
    lengths: torch.Tensor,
    counts: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of MTP layers (arXiv 2412.19437, eq. 24 and 25) and the sum of its terms.

    `log_probs[i]` `[t]` scores the token at t+2+i; `counts[i]` is how many of these count in the
    global mini-batch. The loss is this call's share of the mean over layers of the means over
    tokens; the sum, float64 without gradient, is over tokens and layers.
    """
    loss = log_probs[0].new_zeros(())
    total = torch.zeros((), dtype=torch.float64, device=loss.device)
    for i, (each, count) in enumerate(zip(log_probs, counts, strict=True)):
        nats = -masked(predicted(loss_mask, lengths, 1 + i), each)
        loss = loss + nats.sum() / (max(count, 1.0) * len(counts))
        total += nats.detach().double().sum()
    return loss, total
