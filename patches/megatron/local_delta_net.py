"""The kernels of Megatron's gated delta net, without flash-linear-attention.

Symptom: without flash-linear-attention `GatedDeltaNet` raises ImportError, and that package needs
CUDA. Megatron's own torch path (`--deterministic-mode`) takes no packed samples, and its norm is
flash-linear-attention's. With CUDA and that package nothing is replaced.

Cause: `causal_conv1d`, `l2norm` and `chunk_gated_delta_rule` are imported from
flash-linear-attention alone.

Why safe: the layer stays Megatron's: parameters, their cuts over TP, the all-to-all of context
parallelism, and the names in checkpoints. The three names are bound to functions in torch with the
same arguments and formulas. Packed rows are computed sample by sample: no state and no convolution
crosses a border, except from a prompt to the samples that share it (`mcore_rl.batching.rows`). The
gate's decay is computed in float32 from A_log, as in vLLM and transformers; Megatron takes the
exponential in the dtype of the parameter.

Upstream: no issue; the variants are experimental.

Drop when: Megatron's torch path takes `cu_seqlens` and needs no other package.

Versions: megatron-core 0.19 and 0.20; earlier ones have no `gated_delta_net` package.

Shape legend: b rows, s positions (all of a row, also under context parallelism), n heads of this
rank, dk and dv sizes of a head's keys and values; c positions of a chunk, m chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mcore_rl.patches.megatron.delta_net_norm import has_delta_net
from mcore_rl.patches.megatron.sample_scans import causal_conv1d, chunks_of, segments_of
from mcore_rl.patches.registry import Patch, require_parameters, require_source


def l2norm(x: torch.Tensor, eps: float = 1e-6, **unused: Any) -> torch.Tensor:
    """Divide the last dimension of `x` by its length, in float32."""
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Return o_t = S_t^T q_t / sqrt(dk) of the state S_t `[dk, dv]`, which starts at 0 and is

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T

    (arXiv 2412.06464, equation 10), as `[b, s, n, dv]`. `q` and `k` are `[b, s, n, dk]`, `v` is
    `[b, s, n, dv]`, `g` and `beta` are `[b, s, n]`. Float32 inside, in chunks of one sample each
    (section 3.3): a chunk's values are corrected for each other by solving a triangular system,
    then for the state before the chunk.
    """
    rows = chunks_of(*segments_of(q, cu_seqlens))
    query, key, value = (rows.cut(x) for x in (q, k, v))  # [m, n, c, .]
    query = query * q.shape[-1] ** -0.5
    gain = rows.cut(beta.unsqueeze(-1))
    from_begin, between, to_end, whole = rows.decays(g)
    system = (gain * key) @ key.transpose(2, 3) * between
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat((gain * value, gain * key * from_begin), dim=-1),
        upper=False,
        unitriangular=True,
    )
    new_value, new_key = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    out = rows.scan(
        query * from_begin,
        query @ key.transpose(2, 3) * between,
        new_value,
        (key * to_end).transpose(2, 3),
        whole,
        new_key,
    )
    return rows.joined(out).view(v.shape).to(v.dtype), None


def _decay_and_gain(
    self: Any,
    A_log_local_cp: torch.Tensor,
    dt_bias_local_cp: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g in float32 and beta; upstream's takes the exponential in A_log's dtype."""
    decay = A_log_local_cp.float().exp()
    return -decay * F.softplus(alpha.float() + dt_bias_local_cp), beta.sigmoid()


def _gates(
    self: Any,
    A_log_local_cp: torch.Tensor,
    dt_bias_local_cp: torch.Tensor,
    batch: int,
    seq_len: int,
    *gate_feats: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the same for 0.20, where beta comes before alpha."""
    beta, alpha = gate_feats
    decay, gain = _decay_and_gain(self, A_log_local_cp, dt_bias_local_cp, alpha, beta)
    return decay, {"beta": gain.contiguous()}


def needed() -> bool:
    """Return whether this Megatron has the layer, and this machine lacks its kernels."""
    if not has_delta_net():
        return False
    from megatron.core.ssm.gated_delta_net import common

    return not (torch.cuda.is_available() and common.HAVE_FLA)


def apply() -> None:
    """Bind the kernels in Megatron's modules."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    require_source(common._GDNBase.__init__, "if not HAVE_FLA:")
    require_source(gdn.GatedDeltaNet.forward, "qkv, _ = causal_conv1d(")
    layer: Any = gdn.GatedDeltaNet  # a release has one of the two methods
    own = "self A_log_local_cp dt_bias_local_cp"
    if hasattr(layer, "_compute_gates"):
        require_parameters(layer._compute_gates, f"{own} batch seq_len gate_feats")
        layer._compute_gates = _gates
    else:
        require_parameters(layer._compute_g_and_beta, f"{own} alpha beta")
        layer._compute_g_and_beta = _decay_and_gain
    common.HAVE_FLA = True
    modules: tuple[Any, ...] = (common, gdn)
    for module in modules:
        module.causal_conv1d = causal_conv1d
        module.chunk_gated_delta_rule = chunk_gated_delta_rule
    common.l2norm = l2norm


PATCH = Patch(
    "megatron.local_delta_net",
    "the gated delta net is computed by torch, without flash-linear-attention",
    apply,
    needed,
)
