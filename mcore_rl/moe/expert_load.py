"""How evenly a step's updates use the experts of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class ExpertLoad:
    """Counts the tokens that each expert is chosen for, in training mode.

    Hooks on the routers of this rank's layers; a token of padded rows counts as any other, and with
    recomputation each counts twice, which changes no ratio.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], *, num_layers: int, num_experts: int
    ) -> None:
        device = next(chunks[0].parameters()).device
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)
        for chunk in chunks:
            for layer in chunk.decoder.layers:  # type: ignore[union-attr]
                router = getattr(layer.mlp, "router", None)
                if router is not None:
                    router.register_forward_hook(self._count)

    @torch.no_grad()
    def _count(self, router: Any, _: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if router.training:
            _, chosen = output  # [tokens, experts] bool
            self._counts[router.layer_number - 1] += chosen.sum(dim=0)

    def metrics(self) -> dict[str, float]:
        """`moe/imbalance`: how many times the mean of its layer the busiest expert gets, in the
        worst layer; `moe/unused_experts`: the share of experts without a token. Of what was counted
        since the last call. Collective over the world."""
        total = self._counts.clone()
        self._counts.zero_()
        dist.all_reduce(total)
        used = total[total.sum(dim=1) > 0]  # the others are dense, or nothing was learnt
        if not len(used):
            return {}
        return {
            "moe/imbalance": float((used.amax(dim=1) / used.mean(dim=1)).max()),
            "moe/unused_experts": float((used == 0).double().mean()),
        }
