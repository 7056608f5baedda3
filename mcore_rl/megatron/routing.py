"""Choices of experts by token, as Megatron's routers on this rank have the tokens, and back.

A router gets `[s, b, h]` of its rank: the rows of this context-parallel rank, of whose positions
sequence parallelism gives each TP rank an equal part, in order.

Shape legend: t tokens of a micro-batch, one sample after the other; n positions of a rank's router
on this micro-batch; m layers with experts on this pipeline stage; k choices a token.
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
from mcore_rl.moe.balance import asked, balances, in_the_way_of_padding
from mcore_rl.moe.routing import RoutedLayers
from mcore_rl.moe.routing_replay import Choices


@dataclass(frozen=True, slots=True)
class RouterLayout:
    """How the positions of a micro-batch's rows are spread over the ranks of a stage."""

    tp_group: dist.ProcessGroup | None  # where sequence parallelism divides positions, else None
    cp_group: dist.ProcessGroup
    device: torch.device

    @classmethod
    def of(
        cls,
        args: argparse.Namespace,
        groups: Mapping[str, dist.ProcessGroup],
        device: torch.device,
    ) -> RouterLayout:
        """That of Megatron's `args`; `groups` as `model_parallel_groups`."""
        return cls(groups["tp"] if args.sequence_parallel else None, groups["cp"], device)

    def positions(self, rows: ModelRows, num_tokens: int) -> torch.Tensor:
        """`[n]` int64 on the CPU: the token that each position of this rank holds; -1: padding."""
        return self._of_this_rank(
            tokens_in_rows(rows, num_tokens, self.cp_group.rank()).t()
        ).flatten()

    def padding(self, rows: ModelRows, num_tokens: int) -> torch.Tensor:
        """`[b, s / cp_size]` bool on the device: where the rows of this CP rank hold no token."""
        return (tokens_in_rows(rows, num_tokens, self.cp_group.rank()) < 0).to(self.device)

    def padding_for(self, chunk: torch.nn.Module, padding: torch.Tensor) -> torch.Tensor:
        """`padding` as a model chunk takes it: Megatron divides it where it divides embeddings, and
        hands it on as it is in later stages, whose hidden states are divided already."""
        return padding if chunk.pre_process else self._of_this_rank(padding.t()).t()

    def _of_this_rank(self, of_rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of `[s, b]` under sequence parallelism."""
        if self.tp_group is None:
            return of_rows
        return of_rows.chunk(self.tp_group.size())[self.tp_group.rank()]

    def choices(self, micro_batch: TrainBatch, positions: torch.Tensor) -> Choices:
        """What the micro-batch's `routes` say of this rank's `positions`, on the device."""
        assert micro_batch.routes is not None and micro_batch.routes_known is not None
        here = positions.clamp(min=0)
        known = (positions >= 0) & micro_batch.routes_known[here]
        return Choices(micro_batch.routes[here].to(self.device), known.to(self.device))

    def gathered(
        self, recorded: Mapping[int, torch.Tensor], rows: ModelRows, routed: RoutedLayers
    ) -> torch.Tensor:
        """`[t, m, k]` on the CPU, of what the routers of all TP and CP ranks have chosen.

        `recorded` has the `[n, k]` of this rank for each of the m layers. Collective over the TP
        and the CP group.
        """
        mine = torch.stack([recorded[column] for column in range(len(routed.layers))], dim=1)
        # As bytes: NCCL knows no integers of two.
        whole = mine.to(routed.torch_dtype).contiguous().view(torch.uint8)  # [n, m, bytes]
        if self.tp_group is not None:
            whole = _all_gathered(whole, self.tp_group).flatten(0, 1)
        num_rows = rows.token_ids.shape[0]
        whole = whole.unflatten(0, (-1, num_rows)).transpose(0, 1)  # [b, s / cp_size, m, bytes]
        everywhere = _all_gathered(whole.contiguous(), self.cp_group).flatten(0, 2)
        return everywhere[rows.places.to(self.device)].cpu().contiguous().view(routed.torch_dtype)


def tells_padding(args: argparse.Namespace, chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether routers of these model chunks are told of padding: there are some, and nothing is in
    the way. UsageError where balancing needs it and a fork's model takes no `padding_mask`."""
    values = vars(args)
    if not values.get("num_experts") or in_the_way_of_padding(values):
        return False
    deaf = [type(chunk) for chunk in chunks if not _takes_padding(type(chunk))]
    if deaf and balances(values):
        raise UsageError(
            f"counts padding in the load of experts, of which {deaf[0].__qualname__} is not told",
            flag=asked(values),
            remedy="let its forward take padding_mask and hand it to its layers, or drop the flag",
        )
    return not deaf


def _takes_padding(model: type) -> bool:
    # A mixin's forward takes anything and asks the next class.
    forwards = [vars(each)["forward"] for each in model.__mro__ if "forward" in vars(each)]
    return any("padding_mask" in inspect.signature(each).parameters for each in forwards)


def _all_gathered(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.stack(parts)
