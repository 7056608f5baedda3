"""Routing replay in training: Megatron's routers on this rank use experts that were chosen before.

Only the choice of experts is given. The router still computes its scores, which weight the experts'
outputs and have a gradient. A token without a given choice keeps the router's.

Choices are bound to the forward pass of a micro-batch. Recomputation runs a router again in the
backward pass, when other micro-batches may have gone forward since. It then gets the choices of its
forward pass, first in, first out, as schedules run backward in the order of forward passes. A call
outside any micro-batch's forward pass is a recomputation.

Megatron calls `router.router_replay` for the top k. The replay objects are set by layer, so the
router of an MTP layer, which counts from layer 1 again, gets none.

Shape legend: t tokens of a rank's samples; n positions of a micro-batch's rows on this TP and CP
rank, in Megatron's order (`[s, b]` flattened); m layers with experts on this rank, ascending; k
choices per token; e experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.moe.balance import cuda_graph_flag
from mcore_rl.moe.routing import RoutedLayers, routers_of

TopK = tuple[torch.Tensor, torch.Tensor]  # [n, k] scores and experts


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices for a micro-batch, on the device."""

    ids: torch.Tensor  # [n, m, k]
    known: torch.Tensor  # [n] bool


class RoutingReplay:
    """Replay for the routers of this rank's decoder layers; only reading counts is collective.

    Outside its contexts routers make their own choices.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], routed: RoutedLayers) -> None:
        """Attach to the routers of `chunks` (without wrappers); `routed` covers the complete model.

        Raises RuntimeError if this Megatron's routers do not support replay.
        """
        routers: dict[int, Any] = {}
        for chunk in chunks:
            routers.update(routers_of(chunk))
        layers = tuple(sorted(routers))
        self.routed = RoutedLayers(layers, routed.topk, routed.num_experts)
        self._now: Choices | None = None
        self._recorded: list[torch.Tensor | None] | None = None
        self._with_gradients = False
        self.counts = True  # whether given choices are compared with the routers' own
        self._kept: list[deque[Choices]] = [deque() for _ in layers]
        device = next(chunks[0].parameters()).device
        # Per column: choices that differ from the router's own, and choices that were compared.
        self.differing = torch.zeros(len(layers), dtype=torch.float64, device=device)
        self.compared = torch.zeros(len(layers), dtype=torch.float64, device=device)
        for column, layer in enumerate(layers):
            if not hasattr(routers[layer], "router_replay"):
                raise RuntimeError("the routers of this Megatron do not support routing replay")
            routers[layer].router_replay = _RouterReplay(self, column)

    @contextmanager
    def pass_over_samples(self, *, with_gradients: bool) -> Iterator[None]:
        """Wrap all micro-batches of a forward pass; `with_gradients`: a backward pass follows.

        Raises RuntimeError at the end if a backward pass has not used all choices kept for it.
        """
        self._with_gradients = with_gradients
        try:
            yield
            if left := sum(map(len, self._kept)):
                raise RuntimeError(f"{left} choices of experts were kept and not used")
        finally:
            self._with_gradients = False
            for kept in self._kept:
                kept.clear()

    @contextmanager
    def using(self, choices: Choices | None) -> Iterator[None]:
        """Wrap a model's forward pass of one micro-batch, on any of its chunks."""
        self._now = choices
        try:
            yield
        finally:
            self._now = None

    @contextmanager
    def recording(self, into: dict[int, torch.Tensor]) -> Iterator[None]:
        """Wrap such a forward pass; routers choose, and `into` gets the `[n, k]` of each column."""
        self._recorded = [None] * len(self._kept)
        try:
            yield
            into.update({i: ids for i, ids in enumerate(self._recorded) if ids is not None})
        finally:
            self._recorded = None

    def choose(self, column: int, scores: torch.Tensor, own: Callable[[], TopK]) -> TopK:
        """Return top k for Megatron's router; `own` computes its own from `scores` `[n, e]`."""
        if self._recorded is not None:
            values, ids = own()
            self._recorded[column] = ids
            return values, ids
        choices = self._of_this_call(column)
        if choices is None:
            return own()
        with torch.no_grad():
            _, chosen = own()
            given = choices.ids[:, column].to(chosen.dtype)
            ids = torch.where(choices.known[:, None], given, chosen)
            if self.counts and self._now is not None:
                differs = (ids[:, :, None] != chosen[:, None, :]).all(dim=-1)
                self.differing[column] += differs.sum()
                self.compared[column] += choices.known.sum() * ids.shape[1]
        # In the order of scores, like the router's own, so that sums have the same order.
        values, order = scores.gather(1, ids).sort(dim=1, descending=True)
        return values, ids.gather(1, order)

    def _of_this_call(self, column: int) -> Choices | None:
        kept = self._kept[column]
        if self._now is None:
            if not self._with_gradients:
                return None
            if not kept:
                raise RuntimeError(
                    f"the router of layer {self.routed.layers[column]} runs again in the backward "
                    "pass, and what it chose in the forward pass was not kept"
                )
            return kept.popleft()
        if self._with_gradients and not torch.is_grad_enabled():  # it will be recomputed
            kept.append(self._now)
        return self._now


class _RouterReplay:
    """Object at a router's `router_replay`, in place of Megatron's RouterReplay."""

    def __init__(self, replay: RoutingReplay, column: int) -> None:
        self._replay, self._column = replay, column
        self.layer_number: int | None = None  # Megatron sets it

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., TopK] | None = None,
    ) -> TopK:
        assert default_compute_topk is not None
        own = default_compute_topk
        return self._replay.choose(
            self._column,
            scores,
            lambda: own(scores, topk, num_groups=num_groups, group_topk=group_topk),
        )


def replay_obstacle(values: Mapping[str, Any]) -> str:
    """Return why a flag bypasses the replay, as text that begins with the flag, or "".

    `values` are Megatron's arguments by destination."""
    if values.get("moe_router_fusion"):
        return "--moe-router-fusion chooses experts in a kernel of its own"
    return f"{graphs} runs what was captured" if (graphs := cuda_graph_flag(values)) else ""
