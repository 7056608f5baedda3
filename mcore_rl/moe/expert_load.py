"""Metrics of expert load per layer, and of agreement between trainer and engine on experts.

Shape legend: m layers with experts, of the complete model; e experts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.moe.routing import RoutedLayers, routers_of
from mcore_rl.moe.routing_replay import RoutingReplay


class ExpertLoad:
    """Counter of the tokens per expert in updates.

    It hooks the routers of this rank's layers. A token counts once, even if recomputed; padding
    counts if routers get no padding mask (see `balance`).
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        routed: RoutedLayers,
        *,
        replay: RoutingReplay | None = None,
        of_rollout: Callable[[], np.ndarray] | None = None,
    ) -> None:
        """Hook the routers of `chunks`; `routed` covers the complete model.

        `replay` counts differing choices. `of_rollout` returns `[m, e]`, this rank's part of the
        engines' choices per expert."""
        self._routed, self._replay, self._of_rollout = routed, replay, of_rollout
        self._device = next(chunks[0].parameters()).device
        self._counts = self._zeros(routed.num_experts)
        for chunk in chunks:
            for layer, router in routers_of(chunk):
                row = routed.layers.index(layer)
                router.register_forward_hook(functools.partial(self._count, row))

    def _zeros(self, *shape: int) -> torch.Tensor:
        size = (len(self._routed.layers), *shape)
        return torch.zeros(size, dtype=torch.float64, device=self._device)

    def _count(
        self,
        row: int,
        router: Any,
        inputs: tuple[Any, ...],
        output: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        # A forward pass without gradients is not part of an update, or is repeated for backward.
        if not (router.training and torch.is_grad_enabled()):
            return
        _, chosen = output  # [tokens, experts] bool
        _, *padding = inputs  # [s, b] bool, or None
        if padding and padding[0] is not None:
            chosen = chosen & ~padding[0].reshape(-1, 1)
        self._counts[row] += chosen.sum(dim=0)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the counts since the last call. Collective over the world.

        `moe/imbalance`: load of the busiest expert relative to its layer's mean, in the worst
        layer; `moe/unused_experts`: share of experts without a token; `moe/most_unused_experts`:
        the same in the worst layer; `moe/rollout_imbalance`: imbalance in rollout;
        `moe/routing_disagreement`: share of the engine's choices that the trainer's routers do not
        make for the same tokens with the same weights. Each also exists per layer, as
        `.../layer_3`, except `moe/most_unused_experts`.
        """
        counts = [self._counts, self._rollout_counts(), self._replay_counts()]
        total = torch.cat(counts, dim=1)
        self._counts.zero_()
        dist.all_reduce(total)
        widths = [part.shape[1] for part in counts]
        of_updates, of_rollout, of_replay = total.split(widths, dim=1)
        return {
            **self._imbalance("moe/imbalance", of_updates),
            **self._unused(of_updates),
            **self._imbalance("moe/rollout_imbalance", of_rollout),
            **self._disagreement(of_replay),
        }

    def _rollout_counts(self) -> torch.Tensor:
        """Return `[m, e]`, this rank's part of the engines' choices; `[m, 0]` if not counted."""
        if self._of_rollout is None:
            return self._zeros(0)
        return torch.from_numpy(self._of_rollout()).to(self._counts)

    def _replay_counts(self) -> torch.Tensor:
        """Return `[m, 2]`, this rank's differing and compared choices since the last call."""
        counts = self._zeros(2)
        if self._replay is None:
            return counts
        for column, layer in enumerate(self._replay.routed.layers):
            row = self._routed.layers.index(layer)
            counts[row, 0] += self._replay.differing[column]
            counts[row, 1] += self._replay.compared[column]
        self._replay.differing.zero_()
        self._replay.compared.zero_()
        return counts

    def _imbalance(self, name: str, counts: torch.Tensor) -> dict[str, float]:
        is_used = counts.sum(dim=1) > 0
        if not is_used.any():
            return {}
        used = counts[is_used]
        of_layers = used.amax(dim=1) / used.mean(dim=1)
        return {name: float(of_layers.max()), **self._by_layer(name, of_layers, is_used)}

    def _unused(self, counts: torch.Tensor) -> dict[str, float]:
        is_used = counts.sum(dim=1) > 0
        if not is_used.any():
            return {}
        of_layers = (counts[is_used] == 0).double().mean(dim=1)
        return {
            "moe/unused_experts": float(of_layers.mean()),
            "moe/most_unused_experts": float(of_layers.max()),
            **self._by_layer("moe/unused_experts", of_layers, is_used),
        }

    def _disagreement(self, counts: torch.Tensor) -> dict[str, float]:
        is_known = counts[:, 1] > 0
        if not is_known.any():
            return {}
        name = "moe/routing_disagreement"
        of_layers = counts[is_known, 0] / counts[is_known, 1]
        total = counts.sum(dim=0)
        return {name: float(total[0] / total[1]), **self._by_layer(name, of_layers, is_known)}

    def _by_layer(
        self, name: str, values: torch.Tensor, is_there: torch.Tensor
    ) -> dict[str, float]:
        layers = itertools.compress(self._routed.layers, is_there.tolist())
        return {
            f"{name}/layer_{layer}": value
            for layer, value in zip(layers, values.tolist(), strict=True)
        }
