"""The runner of Megatron models: pipeline schedule, losses and gradients for batches of samples.

Every model of mcore_rl, actor and critic, uses it. The loss is normalised by the caller, with
counts of the global mini-batch, so that neither the parallel layout nor the micro-batches change
it. This module undoes the divisions by the schedule and data parallelism.

It also hides context parallelism: a model returns its part of every sample, and the parts of all
ranks are joined, so that every loss sees complete samples, the same on every rank.

Shape legend: t tokens of a rank's samples, one sample after the other; k numbers per token; s
positions of a row, on all context-parallel ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from mcore_rl.algorithms.aggregation import Denominators, Segments
from mcore_rl.batching.rows import MicroBatching, ModelRows, lay_out, row_length
from mcore_rl.batching.train_batches import split_micro_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.common import objects
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import sparse_attention
from mcore_rl.megatron.router_layout import RouterLayout, passes_padding
from mcore_rl.model.hybrid_pattern import has_mamba
from mcore_rl.model.layout import TrainLayout
from mcore_rl.moe.routing_replay import RoutingReplay

# A micro-batch's rows and samples, on the device -> the model's keyword arguments in addition to
# tokens and positions.
ModelKeywords = Callable[[ModelRows, TrainBatch], Mapping[str, Any]]
# (model outputs for the tokens `[t, k]`, micro-batch on the device) -> (this call's share of the
# global loss, sums to report `[m]`).
TokenLoss = Callable[[torch.Tensor, TrainBatch], tuple[torch.Tensor, torch.Tensor]]


_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LossSums:
    """The summed losses of a global mini-batch; the same on all ranks."""

    sums: torch.Tensor  # `[m]` float64 on the CPU: the loss's sums to report
    nonfinite_ranks: tuple[int, ...]  # whose part of the loss is not finite
    # Of all layers, a mean over tokens; None: indexers are not trained.
    indexer_loss: float | None = None
    # Share of the keys chosen in a micro-batch that FP8 scores, as an engine's, would replace.
    indexer_replaced: float | None = None


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """Counts of a global mini-batch; the same on all ranks."""

    denominators: Denominators  # at least 1, also for a mini-batch without loss tokens
    num_samples: int  # with or without loss tokens


@dataclass(frozen=True, slots=True)
class _Work:
    """A micro-batch and its rows, on the device."""

    samples: TrainBatch  # without routes
    rows: ModelRows
    # The routers' choices, if they are given or recorded.
    routed: TrainBatch | None = None  # the samples with their routes, on the CPU
    positions: torch.Tensor | None = None  # of these samples' tokens, see `RouterLayout`
    recorded: dict[int, torch.Tensor] | None = None
    # [rows, s / cp_size] bool, True at padding, for models that pass it to their routers.
    padding: torch.Tensor | None = None


class ModelRunner:
    """A model on this rank's pipeline stage and shard.

    All methods are collective over the model-parallel ranks (and, through the gradients, over DP).
    """

    def __init__(
        self,
        args: argparse.Namespace,
        state: megatron_adapter.TrainState,
        layout: TrainLayout,
        batching: MicroBatching,
        keywords: ModelKeywords = lambda rows, samples: {},
        replay: RoutingReplay | None = None,
    ) -> None:
        """Create the runner; `replay` has the model's routers, for batches with `routes`."""
        self._args, self._replay = args, replay
        self.state = state
        self._layout = layout
        self._batching = batching
        self._keywords = keywords
        self._rank = dist.get_rank()
        self.groups = megatron_adapter.model_parallel_groups()
        self.device = state.device
        self._routers = RouterLayout.of(args, self.groups, self.device)
        self._passes_padding = passes_padding(args, state.chunks)
        self._trains_indexers = sparse_attention.trains_indexers(args)
        self._has_indexers = sparse_attention.has_indexers(args)
        self._has_mamba = has_mamba(state.chunks[0])
        self._choices = sparse_attention.Choices()

    @property
    def _is_last_stage(self) -> bool:
        return self._layout.pp_rank(self._rank) == self._layout.pp_size - 1

    @torch.no_grad()
    def evaluate(self, batch: TrainBatch, num_outputs: int, **more: Any) -> torch.Tensor:
        """Return the model's output for every token, without dropout and gradients.
        It is `[t, num_outputs]` float32 on the CPU, on every rank of TP, CP and PP. `more` are
        keyword arguments of the model, the same for all micro-batches."""
        return self._evaluated(batch, num_outputs, more=more)[0]

    @torch.no_grad()
    def evaluate_recording(
        self, batch: TrainBatch, num_outputs: int
    ) -> tuple[torch.Tensor, TrainBatch]:
        """Evaluate; also return the batch with the `routes` that this stage's routers chose."""
        assert self._replay is not None
        outputs, done = self._evaluated(batch, num_outputs, records=True)
        routed = self._replay.routed
        routes = [
            self._routers.gathered(work.recorded, work.rows, routed)
            for work in done
            if work.recorded
        ]
        if not routes:  # no layer of this stage has experts
            return outputs, batch
        known = torch.ones(batch.num_tokens, dtype=torch.bool)
        return outputs, dataclasses.replace(batch, routes=torch.cat(routes), routes_known=known)

    def _evaluated(
        self,
        batch: TrainBatch,
        num_outputs: int,
        *,
        records: bool = False,
        more: Mapping[str, Any] = _NOTHING,
    ) -> tuple[torch.Tensor, list[_Work]]:
        for chunk in self.state.model:
            chunk.eval()
        work = self._work(batch, records=records)
        outputs = self._run(work, _collect, forward_only=True, more=more)
        for chunk in self.state.model:
            chunk.train()
        if self._is_last_stage:
            joined = torch.cat(outputs).contiguous()
        else:
            joined = torch.empty(batch.num_tokens, num_outputs, device=self.device)
        if self._layout.pp_size > 1:
            last = self._layout.pp_group(self._rank)[-1]
            dist.broadcast(joined, src=last, group=self.groups["pp"])
        return joined.cpu(), work

    def accumulate_gradients(self, batch: TrainBatch, loss: TokenLoss, num_sums: int) -> LossSums:
        """Run forward and backward over one mini-batch; `batch` is this rank's part of it.

        On return the gradients are finished, including the reduction over DP. `num_sums` is the
        number of sums that the loss reports.
        """
        num_micro_batches = sum(len(sizes) for sizes in batch.cuts)
        # The schedule divides by the number of micro-batches and DDP averages over DP. The loss is
        # already a share of the global mean, so both are undone here. CP needs no correction: DDP
        # also averages over CP ranks, each with its own positions' gradients, and the schedule
        # multiplies by their number.
        scale = num_micro_batches * self._layout.dp_size
        megatron_adapter.zero_gradients(self.state)
        num_tokens = self._scale_indexer_losses(batch, num_micro_batches)
        scaled = functools.partial(_scaled, loss, scale)
        collected = self._run(self._work(batch), scaled, forward_only=False)
        # Some sums are sums of squares; float32 would lose their variance.
        mine = torch.zeros(1 + num_sums, dtype=torch.float64, device=self.device)
        first = self._layout.tp_rank(self._rank) == 0 and self.groups["cp"].rank() == 0
        if self._is_last_stage and first:
            mine += torch.stack(collected).sum(dim=0)
        total = mine.clone()
        dist.all_reduce(total)
        total = total.cpu()
        nonfinite: list[bool] = []
        if not torch.isfinite(total[0]):
            nonfinite = objects.all_gather(not torch.isfinite(mine[0]).item())
        return LossSums(
            total[1:],
            tuple(r for r, is_so in enumerate(nonfinite) if is_so),
            self._indexer_loss(num_tokens) if self._trains_indexers else None,
            self._replaced_share() if self._has_indexers else None,
        )

    def _scale_indexer_losses(self, batch: TrainBatch, num_micro_batches: int) -> float:
        """Prepare the losses of indexers, if they are trained; return the global tokens."""
        if not self._trains_indexers:
            return 0.0
        num_tokens = float(self.global_sum(torch.tensor(batch.num_tokens, dtype=torch.float64)))
        sparse_attention.scale_indexer_losses(
            self.state.chunks,
            num_micro_batches=num_micro_batches,
            dp_size=self._layout.dp_size,
            num_tokens=num_tokens,
        )
        return num_tokens

    def _replaced_share(self) -> float | None:
        counts = torch.tensor([self._choices.replaced, self._choices.chosen], dtype=torch.float64)
        total = counts.to(self.device)
        dist.all_reduce(total)
        replaced, chosen = total.tolist()
        self._choices = sparse_attention.Choices()
        return replaced / chosen if chosen else None

    def _indexer_loss(self, num_tokens: float) -> float:
        loss = sparse_attention.taken_indexer_losses(self.device)
        loss *= self._layout.tp_rank(self._rank) == 0  # alike on these ranks
        dist.all_reduce(loss)
        return float(loss) / num_tokens

    def in_rows(self, values: torch.Tensor, rows: ModelRows) -> torch.Tensor:
        """Return `[t, k]` values of a micro-batch's tokens as `[rows, s / cp_size, k]`, in the
        places of this context-parallel rank's tokens; 0 in padding."""
        cp = self.groups["cp"]
        places = rows.places
        whole = values.new_zeros(
            cp.size() * rows.token_ids.numel(), values.shape[1], device=places.device
        )
        whole[places] = values.to(places.device)
        return whole.view(cp.size(), *rows.token_ids.shape, -1)[cp.rank()]

    def global_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values over the data-parallel ranks, and return them on the CPU."""
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, group=self.groups["dp"])
        return total.cpu()

    def global_counts(self, batch: TrainBatch) -> GlobalCounts:
        """Count loss tokens and samples of the global mini-batch; `batch` is this rank's part."""
        counts = Segments.of(batch.lengths, batch.loss_mask).counts
        mine = [counts.sum(), (counts > 0).sum(), batch.num_samples]
        total = self.global_sum(torch.tensor(mine, dtype=torch.float64))
        num_tokens, num_with_loss, num_samples = total.tolist()
        divisors = Denominators(max(num_tokens, 1.0), max(num_with_loss, 1.0))
        return GlobalCounts(divisors, int(num_samples))

    def _work(self, batch: TrainBatch, *, records: bool = False) -> list[_Work]:
        micro_batches = split_micro_batches(batch)
        length = row_length(micro_batches, self._batching)
        cp_rank = self.groups["cp"].rank()
        work = []
        for micro_batch in micro_batches:
            rows = lay_out(micro_batch, self._batching, length, cp_rank)
            # Routes and candidates stay on the host until their micro-batch's forward pass.
            samples = dataclasses.replace(
                micro_batch, routes=None, routes_known=None, top_tokens=None
            )
            samples = dataclasses.replace(
                self._on_device(samples), top_tokens=micro_batch.top_tokens
            )
            each = _Work(samples, self._on_device(rows))
            if self._passes_padding:
                padding = self._routers.padding(rows, micro_batch.num_tokens)
                each = dataclasses.replace(each, padding=padding)
            if micro_batch.routes is not None:
                positions = self._routers.positions(rows, micro_batch.num_tokens)
                each = dataclasses.replace(each, routed=micro_batch, positions=positions)
            work.append(dataclasses.replace(each, recorded={}) if records else each)
        return work

    def _run(
        self,
        work: list[_Work],
        loss: Any,
        *,
        forward_only: bool,
        more: Mapping[str, Any] = _NOTHING,
    ) -> list[torch.Tensor]:
        def forward_step(data: Iterator[_Work], model: torch.nn.Module) -> tuple[Any, Any]:
            """Run one micro-batch through this stage; return its output and its loss function."""
            now = next(data)
            is_first = now is work[0] and not forward_only
            with self._routing(now), self._comparing(is_first):
                output = model(
                    now.rows.token_ids,
                    now.rows.position_ids,
                    None,  # causal, and padding is on the right
                    packed_seq_params=self._packed_samples(now.rows),
                    **self._keywords(now.rows, now.samples),
                    **more,
                    **self._padding(now, model),
                )
            return output, functools.partial(self._on_tokens, loss, now)

        with self._routed_pass(work, with_gradients=not forward_only):
            return megatron_adapter.forward_backward(
                self.state,
                forward_step,
                work,
                seq_length=work[0].rows.token_ids.shape[1] * self._layout.cp_size,
                micro_batch_size=work[0].rows.token_ids.shape[0],
                forward_only=forward_only,
            )

    def _comparing(self, is_first: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context that compares the choices of an update's first micro-batch."""
        if not (self._has_indexers and is_first):
            return contextlib.nullcontext()
        return sparse_attention.comparing_choices(self._choices)

    def _packed_samples(self, rows: ModelRows) -> Any:
        row_tokens = rows.token_ids.shape[1] * self._layout.cp_size if self._has_mamba else None
        packed = megatron_adapter.packed_samples(
            rows.cu_seqlens, rows.longest, rows.prefix_of, row_tokens
        )
        if self._trains_indexers:
            share = rows.token_ids.shape[1]
            first = self.groups["cp"].rank() * share
            mine = rows.places[(rows.places >= first) & (rows.places < first + share)] - first
            packed.real_token_mask_q = torch.zeros(share, dtype=torch.bool, device=self.device)
            packed.real_token_mask_q[mine] = True
        return packed

    def _padding(self, now: _Work, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        if now.padding is None:
            return {}
        chunk = self.state.chunks[self.state.model.index(model)]
        return {"padding_mask": self._routers.padding_for(chunk, now.padding)}

    def _routed_pass(
        self, work: list[_Work], *, with_gradients: bool
    ) -> contextlib.AbstractContextManager[None]:
        if self._replay is None or work[0].routed is None:
            return contextlib.nullcontext()
        return self._replay.pass_over_samples(with_gradients=with_gradients)

    def _routing(self, now: _Work) -> contextlib.AbstractContextManager[None]:
        """Return a context for a micro-batch's forward pass that records or sets its routes."""
        if self._replay is None:
            return contextlib.nullcontext()
        if now.recorded is not None:
            return self._replay.recording(now.recorded)
        if now.routed is None or now.positions is None:
            return contextlib.nullcontext()
        return self._replay.using(self._routers.choices(now.routed, now.positions))

    def _on_device(self, tensors: Any) -> Any:
        """Copy a dataclass with its tensors on the device."""
        moved = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name in type(tensors).__slots__
            for value in (getattr(tensors, name),)
        }
        return type(tensors)(**moved)

    def _on_tokens(self, loss: Any, work: _Work, output: torch.Tensor, **kwargs: Any) -> Any:
        """Apply `loss` to `[t, k]` without padding, given a model's `[rows, s / cp_size, k]`.

        Collective over CP, whose ranks then compute the same: each takes its part of the gradient.
        """
        output = gather_from_sequence_parallel_region(
            output, tensor_parallel_output_grad=False, group=self.groups["cp"]
        )
        return loss(output.flatten(0, 1)[work.rows.places], work.samples, **kwargs)


def _collect(outputs: torch.Tensor, samples: TrainBatch, *, non_loss_data: bool) -> torch.Tensor:
    return outputs


def _scaled(
    loss: TokenLoss, scale: int, outputs: torch.Tensor, samples: TrainBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    value, sums = loss(outputs, samples)
    return value * scale, torch.cat([value.detach()[None].double(), sums.double()])
