"""Norms of queries and keys over all heads; Megatron's normalise each head separately.

OLMoE and MiniMax-M2 normalise the full projection, which tensor parallelism splits by heads.
Neither of Megatron's layer implementations has such a norm; this module replaces both norms.

Shape legend: s positions, b samples, n heads of this rank, N of all TP ranks, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


class ProjectionNorm(torch.nn.Module):
    """RMSNorm (arXiv 1910.07467) over all heads of all TP ranks: `[s, b, n, d]` -> the same.

    Collective over TP in forward and backward: one number per token. `weight` `[N * d]` is
    replicated, so that loading, the hand-over and checkpoints treat it like any norm. A rank uses
    its heads' part; its gradient is zero elsewhere. Megatron sums these gradients over TP, as for
    norms that all heads share: it selects them by their name in the attention layer.
    """

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        """Create the norm; `hidden_size` is the size of one head."""
        super().__init__()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.width = self._num_heads(config) * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self.width))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    @staticmethod
    def _num_heads(config: Any) -> int:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the last two dimensions of `x` on all ranks, in float32."""
        share = x.shape[-2] * x.shape[-1]
        weight = self.weight.narrow(0, self.tp_group.rank() * share, share).view(x.shape[-2:])
        normalized: torch.Tensor = _Normalized.apply(  # type: ignore[no-untyped-call]  # torch's
            x, weight, self.width, self.eps, self.tp_group
        )
        return normalized


class _Normalized(torch.autograd.Function):
    """The function x r w, r = (sum of x^2 / width + eps)^(-1/2), summed over all ranks of `group`.

    It saves `x` in its own dtype, and r. With g the gradient of the result, the gradient of x is
    r g w - r^3 x (sum of g w x) / width, also summed over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        width: int,
        eps: float,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        wide = x.float()
        scale = (_over_ranks(wide.square(), group) / width + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        ctx.width, ctx.group = width, group
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        wide, gradient = x.float(), gradient.float()
        of_weight = (gradient * wide * scale).sum((0, 1)).to(weight.dtype)
        gradient = gradient * weight
        of_scale = _over_ranks(gradient * wide, ctx.group) / ctx.width
        of_x = scale * gradient - scale.pow(3) * wide * of_scale
        return of_x.to(x.dtype), of_weight, None, None, None


def _over_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the heads of all ranks, `[s, b, n, d]` -> `[s, b, 1, 1]`."""
    total = x.sum((-2, -1), keepdim=True)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


class QueryNorm(ProjectionNorm):
    """The norm of `--num-attention-heads` query heads."""

    @staticmethod
    def _num_heads(config: Any) -> int:
        return int(config.num_attention_heads)


class KeyNorm(ProjectionNorm):
    """The norm of `--num-query-groups` key heads."""

    @staticmethod
    def _num_heads(config: Any) -> int:
        return int(config.num_query_groups)


def set_projection_norms(block: Any) -> None:
    """Use these norms for the attention in a decoder block's spec."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
