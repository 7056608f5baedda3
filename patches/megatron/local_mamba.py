"""The kernels of Megatron's Mamba-2 layers, for machines without CUDA.

Symptom: without mamba-ssm, which needs CUDA, `MambaMixer` raises ImportError.

Cause: the convolution and the scan of a training step are one kernel of mamba-ssm, and the norm is
its class. Samples of packed rows are told apart by `PackedSeqParams.seq_idx`, which is set only if
the number of tokens is passed; without it, the state crosses the borders of samples.

Why safe: the layer stays Megatron's: parameters, their cuts over TP, the all-to-all of context
parallelism, and the names in checkpoints. Kernel and norm are replaced by functions in torch with
the same formulas; samples begin at `cu_seqlens`, which every packed row has. Under context
parallelism Transformer Engine's function for the positions of a rank is replaced by ours.

Upstream: no issue.

Drop when: mamba-ssm has kernels for CPU.

Versions: megatron-core 0.19 and 0.20.

Shape legend: b rows, s positions (all of a row, also under context parallelism), n heads of this
rank, p size of a head, g groups of heads with the same B and C, d size of the state.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from mcore_rl.batching.rows import positions_on_cp_rank
from mcore_rl.patches.megatron.sample_scans import causal_conv1d, chunks_of, segments_of
from mcore_rl.patches.registry import Patch, parameters_of, require, require_parameters


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    seq_idx: torch.Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = False,
    **unused: Any,
) -> torch.Tensor:
    """Return y_t silu(z_t) `[b, s, n * p]`, where y_t = S_t^T C_t + D x_t of the state S_t `[d, p]`

        S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T,  dt_t = softplus(dt + dt_bias)

    (arXiv 2405.21060, section 6) and x, B, C have passed the convolution. `zxbcdt` `[b, s, .]` has
    z, x, B, C, dt. `seq_idx` are the bounds of the samples here. Float32 inside.
    """
    require(headdim is not None and not norm_before_gate, "Mamba-2", "has a D per channel or norm")
    heads, groups = len(A), ngroups
    inner = heads * (headdim or 0)
    gate, mixed, step = zxbcdt.split((inner, zxbcdt.shape[-1] - inner - heads, heads), dim=-1)
    mixed, _ = causal_conv1d(mixed, conv1d_weight, conv1d_bias, activation, seq_idx)
    width = (mixed.shape[-1] - inner) // 2
    x, key, query = mixed.float().split((inner, width, width), dim=-1)
    x = x.unflatten(-1, (heads, -1))
    key, query = (
        each.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=2)
        for each in (key, query)
    )
    step = F.softplus(step.float() + dt_bias.float())
    out = _scan(query, key, x * step.unsqueeze(-1), step * A.float(), seq_idx)
    out = (out + D.float()[:, None] * x).flatten(2)
    gated: torch.Tensor = (out * F.silu(gate.float())).to(zxbcdt.dtype)
    return gated


def _scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    bounds: torch.Tensor | None,
) -> torch.Tensor:
    """Return `[b, s, n, p]` of `[b, s, n, d]`, `[b, s, n, d]`, `[b, s, n, p]` and `[b, s, n]`."""
    rows = chunks_of(*segments_of(query, bounds))
    q, k, v = (rows.cut(x) for x in (query, key, value))
    from_begin, between, to_end, whole = rows.decays(log_decay)
    out = rows.scan(
        q * from_begin,
        q @ k.transpose(2, 3) * between,
        v,
        (k * to_end).transpose(2, 3),
        whole,
    )
    joined: torch.Tensor = rows.joined(out).view(value.shape)
    return joined


class GroupRMSNorm(torch.nn.Module):
    """RMSNorm over groups of `group_size` channels; `weight` `[hidden_size]`, split over TP."""

    def __init__(
        self, hidden_size: int, eps: float, group_size: int, dtype: Any = None, **unused: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x` in float32."""
        grouped = x.float().unflatten(-1, (-1, self.group_size))
        normed = F.rms_norm(grouped, (self.group_size,), eps=self.eps).flatten(-2)
        return (normed * self.weight.float()).to(x.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the weight as upstream's norm stores it."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        tensors: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,  # set by the layer
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        return tensors


def needed() -> bool:
    """Return whether this machine lacks the kernels, and this Megatron's layer takes others."""
    from megatron.core.ssm import mamba_mixer

    mixer = mamba_mixer.MambaMixer
    return not mamba_mixer.HAVE_MAMBA_SSM and hasattr(mixer, "_ssm_training")


def apply() -> None:
    """Bind kernel and norm in Megatron's module, and pass on the bounds of samples."""
    from megatron.core.ssm import mamba_mixer

    train = mamba_mixer.MambaMixer._ssm_training
    require_parameters(train, "self zxBCdt packed_seq_params")
    require(
        "norm_before_gate" in parameters_of(mamba_mixer.MambaMixer.__init__),
        "MambaMixer",
        "has another norm",
    )

    def train_by_sample(self: Any, zxBCdt: torch.Tensor, packed_seq_params: Any = None) -> Any:
        if packed_seq_params is not None:
            padded = packed_seq_params.cu_seqlens_q_padded
            packed_seq_params = copy.copy(packed_seq_params)
            packed_seq_params.seq_idx = packed_seq_params.cu_seqlens_q if padded is None else padded
        return train(self, zxBCdt, packed_seq_params)

    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.mamba_split_conv1d_scan_combined = mamba_split_conv1d_scan_combined
    mamba_mixer.ExtendedRMSNorm = GroupRMSNorm
    mamba_mixer._check_mamba_sequence_packing_support = lambda *_, **__: (True, None)
    mamba_mixer.MambaMixer._ssm_training = train_by_sample
    _cut_packed_rows()


def _cut_packed_rows() -> None:
    """Bind Transformer Engine's function that says which positions a context-parallel rank has."""
    from megatron.core.ssm import mamba_context_parallel

    require(hasattr(mamba_context_parallel, "tex"), mamba_context_parallel.__name__, "has no tex")

    def indices(bounds: torch.Tensor, num_tokens: int, cp_size: int, cp_rank: int) -> torch.Tensor:
        return positions_on_cp_rank(bounds, num_tokens // cp_size, cp_size=cp_size, cp_rank=cp_rank)

    if mamba_context_parallel.tex is None:
        mamba_context_parallel.tex = SimpleNamespace(thd_get_partitioned_indices=indices)
        mamba_context_parallel.is_te_min_version = lambda *_: True


PATCH = Patch("megatron.local_mamba", "Mamba-2 can be computed without CUDA", apply, needed)
