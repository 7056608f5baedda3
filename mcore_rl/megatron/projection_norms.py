"""Norms of queries and keys over all heads at once, where Megatron's are of one head each.

OLMoE and MiniMax-M2 normalise the whole projection, which tensor parallelism cuts by heads. Neither
of Megatron's families of layers has such a part; ours stands in the place of both norms.

Shape legend: s positions, b samples, n heads of this rank, N of all TP ranks, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)


class ProjectionNorm(torch.nn.Module):
    """RMSNorm (arXiv 1910.07467) over all heads of all TP ranks: `[s, b, n, d]` -> the same.

    Collective over TP, forward and backward: one number a token. `weight` `[N * d]` is replicated,
    so that loading, the hand-over and checkpoints treat it as any norm; a rank uses its heads' part
    and its gradient is zero elsewhere. Megatron adds these gradients up over TP, as it does for
    the norms that all heads share: it goes by the name that they have in the attention layer.
    """

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        """`hidden_size` is that of one head."""
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
        """Normalise over the last two dimensions of `x` on all ranks; computed in float32."""
        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        if self.tp_group.size() > 1:
            # The sum over ranks, whose gradient is the sum over ranks of what each makes of it.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        share = x.shape[-2] * x.shape[-1]
        weight = self.weight.narrow(0, self.tp_group.rank() * share, share).view(x.shape[-2:])
        return (wide * (squares / self.width + self.eps).rsqrt() * weight).to(x.dtype)


class QueryNorm(ProjectionNorm):
    """Of `--num-attention-heads` heads."""

    @staticmethod
    def _num_heads(config: Any) -> int:
        return config.num_attention_heads


class KeyNorm(ProjectionNorm):
    """Of `--num-query-groups` heads."""

    @staticmethod
    def _num_heads(config: Any) -> int:
        return config.num_query_groups


def set_projection_norms(block: Any) -> None:
    """Have the attention of a decoder block's spec be made with these norms."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
