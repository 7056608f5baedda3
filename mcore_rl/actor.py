"""The actor: Megatron's model as the policy in training. Log-probs before the update, and the
update.

Both run Megatron's pipeline schedule over padded micro-batches. The loss is normalised in one
place, by the number of loss tokens of the global mini-batch, so that neither the parallel layout
nor the micro-batch size changes it.

Shape legend: b samples, s positions. Tensors are in scoring alignment (`mcore_rl.types`).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl import megatron_adapter
from mcore_rl.arguments import RLConfig
from mcore_rl.hybrid_engine.layout import TrainLayout
from mcore_rl.losses import PolicyLossConfig, PolicyLossSums, policy_loss
from mcore_rl.optimizer import ActorOptimizer, UpdateResult
from mcore_rl.packing import split_micro_batches
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
    ) -> None:
        self._args, self._config = args, config
        self.state = state
        self._layout = layout
        self._rank = dist.get_rank()
        self._groups = megatron_adapter.model_parallel_groups()
        self._device = next(state.model[0].parameters()).device
        self.optimizer = ActorOptimizer(state, on_nonfinite_grad=config.on_nonfinite_grad)
        self.loss_config = PolicyLossConfig(
            clip_eps_lower=config.clip_eps_lower,
            clip_eps_upper=config.clip_eps_upper,
            kl_coef=config.kl_coef,
            kl_estimator=config.kl_estimator,
            entropy_coef=config.entropy_coef,
        )

    @property
    def _is_last_stage(self) -> bool:
        return self._layout.pp_rank(self._rank) == self._layout.pp_size - 1

    @property
    def _last_stage_rank(self) -> int:
        return self._layout.pp_group(self._rank)[-1]

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch) -> torch.Tensor:
        """Log-prob of every next token, `[b, s]` float32 on the CPU, on every rank of TP and PP.

        `batch` is this DP rank's; b must be a multiple of the micro-batch size.
        """
        for chunk in self.state.model:
            chunk.eval()
        scores = self._run(batch, _collect_scores, forward_only=True)
        for chunk in self.state.model:
            chunk.train()
        if self._is_last_stage:
            log_probs = torch.cat([score[..., 0] for score in scores])
        else:
            log_probs = torch.empty(batch.token_ids.shape, device=self._device)
        if self._layout.pp_size > 1:
            dist.broadcast(log_probs, src=self._last_stage_rank, group=self._groups["pp"])
        return log_probs.cpu()

    def update(self, batch: TrainBatch) -> UpdateStats:
        """One optimizer step on one mini-batch, of which `batch` is this DP rank's part.

        `batch.old_log_probs` must be set, `batch.ref_log_probs` if there is a KL term. Raises
        RuntimeError on all ranks for a non-finite gradient, unless asked to skip it.
        """
        denominator = batch.loss_mask.sum().to(torch.float32).to(self._device)
        dist.all_reduce(denominator, group=self._groups["dp"])
        num_micro_batches = batch.num_samples // self._args.micro_batch_size
        # The schedule divides by the number of micro-batches and DDP averages over DP; the loss is
        # this sample's share of the global mean already, so both are undone here.
        scale = num_micro_batches * self._layout.dp_size
        loss = functools.partial(self._loss, denominator=denominator.clamp(min=1.0), scale=scale)
        megatron_adapter.zero_gradients(self.state)
        collected = self._run(batch, loss, forward_only=False)
        result = self.optimizer.step(num_samples=batch.num_samples * self._layout.dp_size)
        megatron_adapter.finish_param_sync(self._args, self.state)
        return UpdateStats(self._reduce(collected), result)

    def _loss(
        self,
        output: torch.Tensor,
        *,
        micro_batch: TrainBatch,
        denominator: torch.Tensor,
        scale: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = policy_loss(
            output[..., 0],
            output[..., 1],
            old_log_probs=self._move(micro_batch.old_log_probs),
            advantages=self._move(micro_batch.advantages),
            loss_mask=self._move(micro_batch.loss_mask),
            ref_log_probs=(
                None if micro_batch.ref_log_probs is None else self._move(micro_batch.ref_log_probs)
            ),
            denominator=denominator,
            config=self.loss_config,
        )
        return out.loss * scale, out.sums.stacked()

    def _move(self, tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None, "a stage before the update left out a tensor of the batch"
        return tensor.to(self._device)

    def _run(self, batch: TrainBatch, loss: Any, *, forward_only: bool) -> list[torch.Tensor]:
        micro_batches = split_micro_batches(batch, self._args.micro_batch_size)

        def forward_step(data: Iterator[TrainBatch], model: torch.nn.Module) -> tuple[Any, Any]:
            """One micro-batch through this stage: its output, and what makes the loss of it."""
            micro_batch = next(data)
            token_ids = micro_batch.token_ids.to(self._device)
            samples, positions = token_ids.shape
            output = model(
                token_ids,
                torch.arange(positions, device=self._device).expand(samples, -1),
                None,  # causal, and padding is on the right
                target_ids=token_ids.roll(-1, dims=1),
                temperature=self._config.temperature,
            )
            return output, functools.partial(loss, micro_batch=micro_batch)

        return megatron_adapter.forward_backward(
            self.state,
            forward_step,
            micro_batches,
            seq_length=batch.token_ids.shape[1],
            micro_batch_size=self._args.micro_batch_size,
            forward_only=forward_only,
            collect=forward_only,
        )

    def _reduce(self, collected: list[torch.Tensor]) -> PolicyLossSums:
        """Add up over micro-batches and DP ranks, and tell everybody."""
        total = torch.zeros(len(PolicyLossSums.__slots__), device=self._device)
        if self._is_last_stage and self._layout.tp_rank(self._rank) == 0:
            total += torch.stack(collected).sum(dim=0)
        dist.all_reduce(total)
        return PolicyLossSums.from_stacked(total.cpu())


def _collect_scores(
    output: torch.Tensor, *, micro_batch: TrainBatch, non_loss_data: bool
) -> torch.Tensor:
    return output


class ReferencePolicy:
    """The policy as it was at the start, kept on the host in this rank's own shards.

    `with reference:` swaps its weights into the actor's model and back; no second model exists.
    """

    def __init__(self, state: megatron_adapter.TrainState) -> None:
        self._parameters = [p for chunk in state.chunks for p in chunk.parameters()]
        self._host = [p.detach().to("cpu", copy=True) for p in self._parameters]

    def __enter__(self) -> ReferencePolicy:
        self._swap()
        return self

    def __exit__(self, *exc: object) -> None:
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, host in zip(self._parameters, self._host, strict=True):
            current = parameter.detach().to("cpu", copy=True)
            parameter.copy_(host)
            host.copy_(current)
