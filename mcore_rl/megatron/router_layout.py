"""Expert choices: conversion between token order and the order of this rank's routers.

A router gets its rank's `[s, b, h]`: the rows of this context-parallel rank. Sequence parallelism
gives each TP rank an equal part of their positions, in order.

Shape legend: t tokens of a micro-batch, one sample after the other; n positions of a rank's router
on this micro-batch; m layers with experts on this pipeline stage; k choices per token.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mcore_rl.batching.rows import ModelRows, tokens_in_rows
from mcore_rl.batching.types import TrainBatch
from mcore_rl.common.errors import UsageError
from mcore_rl.moe.balance import balances, balancing_flag, cuda_graph_flag
from mcore_rl.moe.routing import RoutedLayers
from mcore_rl.moe.routing_replay import Choices


@dataclass(frozen=True, slots=True)
class RouterLayout:
    """The distribution of a micro-batch's row positions over the ranks of a stage."""

    tp_group: dist.ProcessGroup | None  # None without sequence parallelism
    cp_group: dist.ProcessGroup
    device: torch.device

    @classmethod
    def of(
        cls,
        args: argparse.Namespace,
        groups: Mapping[str, dist.ProcessGroup],
        device: torch.device,
    ) -> RouterLayout:
        """Return the layout for Megatron's `args` and the groups of `model_parallel_groups`."""
        return cls(groups["tp"] if args.sequence_parallel else None, groups["cp"], device)

    def positions(self, rows: ModelRows, num_tokens: int) -> torch.Tensor:
        """Return `[n]` int64 on the CPU: the token at each position of this rank; -1: padding."""
        return self._of_this_rank(
            tokens_in_rows(rows, num_tokens, self.cp_group.rank()).t()
        ).flatten()

    def padding(self, rows: ModelRows, num_tokens: int) -> torch.Tensor:
        """Return `[b, s / cp_size]` bool on the device: the padding in this CP rank's rows."""
        return (tokens_in_rows(rows, num_tokens, self.cp_group.rank()) < 0).to(self.device)

    def padding_for(self, chunk: torch.nn.Module, padding: torch.Tensor) -> torch.Tensor:
        """Return `padding` in the form that a model chunk takes.
        GPTModel splits it with the embeddings; HybridModel does not, nor do later stages."""
        if chunk.pre_process and not hasattr(chunk, "hybrid_layer_pattern"):
            return padding
        return self._of_this_rank(padding.t()).t()

    def _of_this_rank(self, of_rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `[s, b]` under sequence parallelism."""
        if self.tp_group is None:
            return of_rows
        return of_rows.chunk(self.tp_group.size())[self.tp_group.rank()]

    def choices(self, micro_batch: TrainBatch, positions: torch.Tensor) -> Choices:
        """Return the micro-batch's `routes` at this rank's `positions`, on the device."""
        assert micro_batch.routes is not None and micro_batch.routes_known is not None
        here = positions.clamp(min=0)
        known = (positions >= 0) & micro_batch.routes_known[here]
        return Choices(micro_batch.routes[here].to(self.device), known.to(self.device))

    def gathered(
        self, recorded: Mapping[int, torch.Tensor], rows: ModelRows, routed: RoutedLayers
    ) -> torch.Tensor:
        """Gather the choices of all TP and CP ranks' routers, `[t, m, k]` on the CPU.

        `recorded` has this rank's `[n, k]` for each of the m layers. Collective over the TP and the
        CP group.
        """
        mine = torch.stack([recorded[column] for column in range(len(routed.layers))], dim=1)
        # As bytes: NCCL has no two-byte integers.
        whole = mine.to(routed.torch_dtype).contiguous().view(torch.uint8)  # [n, m, bytes]
        if self.tp_group is not None:
            whole = _all_gathered(whole, self.tp_group).flatten(0, 1)
        num_rows = rows.token_ids.shape[0]
        whole = whole.unflatten(0, (-1, num_rows)).transpose(0, 1)  # [b, s / cp_size, m, bytes]
        everywhere = _all_gathered(whole.contiguous(), self.cp_group).flatten(0, 2)
        return everywhere[rows.places.to(self.device)].cpu().contiguous().view(routed.torch_dtype)


def passes_padding(args: argparse.Namespace, chunks: Sequence[torch.nn.Module]) -> bool:
    """Return whether padding can be passed to the routers of these model chunks, if they have any.
    A flag may prevent it. UsageError: balancing needs it, but a model takes no `padding_mask`."""
    values = vars(args)
    if not values.get("num_experts") or cuda_graph_flag(values):
        return False
    without = [type(chunk) for chunk in chunks if not _takes_padding(type(chunk))]
    if without and balances(values):
        raise UsageError(
            f"needs the padding of a row, which {without[0].__qualname__} does not take",
            flag=balancing_flag(values),
            remedy="add padding_mask to its forward and pass it to its layers, or drop the flag",
        )
    return not without


def _takes_padding(model: type) -> bool:
    # A mixin's forward takes any arguments and calls the next class.
    forwards = [vars(each)["forward"] for each in model.__mro__ if "forward" in vars(each)]
    return any("padding_mask" in inspect.signature(each).parameters for each in forwards)


def _all_gathered(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.stack(parts)
