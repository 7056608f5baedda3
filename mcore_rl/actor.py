"""The actor: Megatron's model as the policy in training. Log-probs before the update, and the
update.

Shape legend: t tokens of a rank's samples. Tensors are in scoring alignment (`mcore_rl.types`).
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass

import torch

from mcore_rl import megatron_adapter
from mcore_rl.algorithms.aggregation import Denominators
from mcore_rl.algorithms.total_loss import PolicyLossSums, policy_loss_total
from mcore_rl.arguments import RLConfig
from mcore_rl.hybrid_engine.layout import TrainLayout
from mcore_rl.model_runner import ModelRunner
from mcore_rl.optimizer import CheckedOptimizer, UpdateResult
from mcore_rl.packing import MicroBatching, ModelRows
from mcore_rl.types import TrainBatch


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """One optimizer step; the sums are over the global mini-batch and the same on all ranks."""

    sums: PolicyLossSums
    result: UpdateResult


class Actor:
    """The policy on this rank's pipeline stage and TP shard.

    All methods are collective over the model-parallel ranks (and, through the gradients, over DP).
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: RLConfig,
        state: megatron_adapter.TrainState,
        layout: TrainLayout,
        batching: MicroBatching,
    ) -> None:
        self._args, self._config = args, config
        self.state = state
        self._layout = layout
        self.runner = ModelRunner(args, state, layout, batching, self._keywords)
        self.optimizer = CheckedOptimizer(
            state, name="actor", on_nonfinite_grad=config.on_nonfinite_grad
        )
        self.loss_config = config.recipe.policy_loss_config(config.max_response_tokens)

    def log_probs(self, batch: TrainBatch) -> torch.Tensor:
        """Log-prob of every next token, `[t]` float32 on the CPU, on every rank of TP and PP.

        `batch` is this DP rank's.
        """
        return self.runner.evaluate(batch, num_outputs=2)[:, 0].contiguous()

    def update(self, batch: TrainBatch) -> UpdateStats:
        """One optimizer step on one mini-batch, of which `batch` is this DP rank's part.

        `batch` must have `old_log_probs` and `advantages`, and `ref_log_probs` if there is a KL
        term. Raises RuntimeError on all ranks for a non-finite gradient, unless asked to skip it.
        """
        loss = functools.partial(self._loss, denominators=self.runner.denominators(batch))
        sums = self.runner.accumulate_gradients(batch, loss, num_sums=len(PolicyLossSums.__slots__))
        result = self.optimizer.step(num_samples=self.runner.num_samples(batch))
        megatron_adapter.finish_param_sync(self._args, self.state)
        return UpdateStats(PolicyLossSums.from_stacked(sums), result)

    def _keywords(self, rows: ModelRows) -> dict[str, object]:
        return {"target_ids": rows.target_ids, "temperature": self._config.temperature}

    def _loss(
        self, scores: torch.Tensor, samples: TrainBatch, *, denominators: Denominators
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert samples.old_log_probs is not None and samples.advantages is not None, (
            "a stage before the update left out a tensor of the batch"
        )
        out = policy_loss_total(
            scores[:, 0],
            scores[:, 1],
            old_log_probs=samples.old_log_probs,
            advantages=samples.advantages,
            loss_mask=samples.loss_mask,
            lengths=samples.lengths,
            ref_log_probs=samples.ref_log_probs,
            weights=samples.weights,
            denominators=denominators,
            config=self.loss_config,
        )
        return out.loss, out.sums.stacked()


class ReferencePolicy:
    """The policy as it was, kept on the host in this rank's own shards.

    `with reference:` swaps its weights into the actor's model and back; no second model exists.
    """

    def __init__(self, state: megatron_adapter.TrainState) -> None:
        self._parameters = [p for chunk in state.chunks for p in chunk.parameters()]
        self._host = [p.detach().to("cpu", copy=True) for p in self._parameters]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the actor as it is now."""
        for parameter, host in zip(self._parameters, self._host, strict=True):
            host.copy_(parameter)

    def __enter__(self) -> ReferencePolicy:
        self.swap()
        return self

    def __exit__(self, *exc: object) -> None:
        self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights with those kept here."""
        for parameter, host in zip(self._parameters, self._host, strict=True):
            current = parameter.detach().to("cpu", copy=True)
            parameter.copy_(host)
            host.copy_(current)
