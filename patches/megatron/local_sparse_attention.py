"""Sparse attention (DSA) can be built without Transformer Engine, and attends sample by sample.

Symptom: the attention of DeepSeek-V3.2 and GLM-5 cannot be built from the local layers of
`attention_variant_spec`: `absorbed_mla.TELinear` is None. A sample's output depends on where in a
packed row it is, by 6e-7 of the largest number.

Cause: attention compares the class of its down projections with Transformer Engine's, although it
and its indexer are plain torch. Its torch path has a score for each pair of positions of a row;
the order in which its softmax and its product with the values add depends on these positions.

Why safe: without Transformer Engine it could not be built. Attention, indexer and their torch path
stay upstream's; the latter is given one sample at a time, up to a multiple of 64 positions. Sums
over zeros behind a sample do not change it, so that it is equal in packed and padded rows, bit for
bit. Under context parallelism, where a rank has a part of the queries, it is given the whole row.
Parameter names and shapes are those of the Transformer Engine spec. The gradients of the indexer
are averaged over TP, as upstream marks them: each rank has the full sequence.

Upstream: no issue; the local spec is documented as for testing.

Drop when: `absorbed_mla` takes the class from its spec.

Versions: megatron-core 0.19 to 0.20. Earlier ones have another form of sparse attention, which
`mcore_rl` refuses.

Shape legend: s positions of a row, b rows, n heads, d size of a head, k chosen keys of a query.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from mcore_rl.patches.megatron.delta_net_norm import has_delta_net
from mcore_rl.patches.megatron.local_layers import DuplicatedLinear
from mcore_rl.patches.megatron.local_layers import needed as lacks_transformer_engine
from mcore_rl.patches.registry import Patch, require_parameters, require_source

_MULTIPLE = 64  # of positions: whole vectors and blocks of torch's sums and products
Attend = Callable[..., torch.Tensor]


def needed() -> bool:
    """Return whether Transformer Engine is missing, and this Megatron is 0.19 or later, which came
    with the package of delta nets and with sparse attention in the form that is patched."""
    return bool(lacks_transformer_engine() and has_delta_net())


def apply() -> None:
    """Let the attention use the local layers that `attention_variant_spec` provides."""
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa

    require_source(
        absorbed_mla.AbsorbedMLASelfAttention.__init__,
        "if submodules.linear_q_down_proj in [TELinear]:",
    )
    absorbed_mla.TELinear = DuplicatedLinear
    require_parameters(
        dsa._unfused_absorbed_dsa_fn,
        "query key topk_indices softmax_scale v_channels mask varlen_starts varlen_ends "
        "key_positions",
    )
    dsa._unfused_absorbed_dsa_fn = by_sample(dsa._unfused_absorbed_dsa_fn)


def by_sample(attend: Attend) -> Attend:
    """Return upstream's attention, which gets one sample of a row at a time."""

    @functools.wraps(attend)
    def attend_by_sample(
        query: torch.Tensor,  # [s, b, n, d]
        key: torch.Tensor,  # [s, b, 1, d]
        topk_indices: torch.Tensor,  # [b, s, k] int64, -1: none
        softmax_scale: float,
        v_channels: int,
        mask: torch.Tensor | None = None,
        varlen_starts: torch.Tensor | None = None,  # [s] the first key that a query may see
        varlen_ends: torch.Tensor | None = None,
        key_positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        bounds = (mask, varlen_starts, varlen_ends, key_positions)
        if varlen_starts is None or len(query) != len(key):
            return attend(query, key, topk_indices, softmax_scale, v_channels, *bounds)
        lengths = varlen_starts.unique_consecutive(return_counts=True)[1].tolist()
        chosen = (topk_indices - varlen_starts[:, None]).clamp(min=-1)
        samples = zip(
            query.split(lengths), key.split(lengths), chosen.split(lengths, dim=1), strict=True
        )
        return torch.cat([_attended(attend, *x, softmax_scale, v_channels) for x in samples])

    return attend_by_sample


def _attended(
    attend: Attend,
    query: torch.Tensor,
    key: torch.Tensor,
    chosen: torch.Tensor,
    softmax_scale: float,
    v_channels: int,
) -> torch.Tensor:
    """Return the causal attention of one sample, computed for a multiple of 64 positions."""
    length = len(query)
    rest = -length % _MULTIPLE
    query, key = (F.pad(x, (0, 0, 0, 0, 0, 0, 0, rest)) for x in (query, key))
    chosen = F.pad(chosen, (0, 0, 0, rest), value=-1)
    ends = torch.arange(1, len(query) + 1, device=query.device)
    starts = torch.zeros_like(ends)
    out = attend(query, key, chosen, softmax_scale, v_channels, None, starts, ends, None)
    return out[:length]


PATCH = Patch(
    "megatron.local_sparse_attention",
    "sparse attention can be built without Transformer Engine",
    apply,
    needed,
)
