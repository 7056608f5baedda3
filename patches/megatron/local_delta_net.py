"""The kernels of Megatron's gated delta net, for machines without CUDA.

Symptom: without flash-linear-attention `GatedDeltaNet` raises ImportError, and that package needs
CUDA. Megatron's own torch path (`--deterministic-mode`) takes no packed samples, and its norm is
flash-linear-attention's.

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

Shape legend: b rows, s positions (all of a row, also under context parallelism), d channels, n
heads of this rank, dk and dv sizes of a head's keys and values; c positions of a chunk, m chunks, k
segments of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mcore_rl.batching.rows import prefix_lengths, prefixes_of
from mcore_rl.patches.megatron.delta_net_norm import has_delta_net
from mcore_rl.patches.registry import Patch, require_parameters, require_source

CHUNK = 64  # positions, as in flash-linear-attention and transformers


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Convolve each channel of `x` `[b, s, d]` with its `weight` `[d, width]`; the last tap is the
    position's own. Float32 inside. Nothing is before the first position of a row or sample."""
    width = weight.shape[1]
    taps = weight.float().t()
    wide = x.float().flatten(0, 1)
    out = wide * taps[-1]
    for distance in range(1, width):
        places, exists = _earlier(x, cu_seqlens, distance)
        earlier = wide.index_select(0, places).masked_fill(~exists[:, None], 0.0)
        out = out + earlier * taps[width - 1 - distance]
    if bias is not None:
        out = out + bias.float()
    if activation in ("silu", "swish"):
        out = F.silu(out)
    return out.view(x.shape).to(x.dtype), None


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
    rows = _chunks(*_segments(q, cu_seqlens))
    query, key, value = (rows.cut(x) for x in (q, k, v))  # [m, n, c, .]
    query = query * q.shape[-1] ** -0.5
    gain = rows.cut(beta.unsqueeze(-1))
    decay = rows.cut(g.unsqueeze(-1)).cumsum(2)  # [m, n, c, 1], log, from the chunk's begin
    between = (decay - decay.transpose(2, 3)).tril().exp().tril()  # [m, n, c, c]
    system = (gain * key) @ key.transpose(2, 3) * between
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat((gain * value, gain * key * decay.exp()), dim=-1),
        upper=False,
        unitriangular=True,
    )
    new_value, new_key = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    inside = query @ key.transpose(2, 3) * between
    whole = decay[:, :, -1:]
    out = _over_chunks(
        rows,
        query * decay.exp(),
        inside,
        new_value,
        new_key,
        (key * (whole - decay).exp()).transpose(2, 3),
        whole.exp(),
    )
    return rows.joined(out).view(v.shape).to(v.dtype), None


def _over_chunks(rows: _Chunks, *of_chunks: torch.Tensor) -> torch.Tensor:
    """Return the outputs `[m, n, c, dv]`: each step takes one chunk of every sample that has one.

    `of_chunks` are queries `[m, n, c, dk]` decayed from the chunk's begin, attention within the
    chunk, values and keys of the solved system, keys decayed to its end, transposed, and the decay
    of the whole chunk.
    """
    found = []
    state: torch.Tensor | None = None
    parts = [x.split(rows.per_step) for x in of_chunks]
    sources = rows.sources.split(rows.per_step)
    for source, query, inside, value, key, key_to_end, decay in zip(sources, *parts, strict=True):
        if state is None:  # nothing precedes the first step
            found.append(inside @ value)
            state = key_to_end @ value
            continue
        before = state.index_select(0, source)
        new = value - key @ before
        found.append(query @ before + inside @ new)
        state = before * decay + key_to_end @ new
    return torch.cat(found)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The chunks of all segments, in the order of the steps that compute them.

    Example: segments of 3 and 2 positions in chunks of 2:

        places    [[0, 1], [3, 4], [2, 0]]
        is_real   [[T, T], [T, T], [T, F]]
        per_step  [2, 1]
        sources   [0, 0, 0]
    """

    places: torch.Tensor  # [m, c] int64, in the flattened rows; padding may point anywhere
    is_real: torch.Tensor  # [m, c] bool
    per_step: list[int]  # number of chunks in each step
    sources: torch.Tensor  # [m] int64: which chunk of the step before has the state

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[b, s, n, d]` as `[m, n, c, d]` float32, with zeros for padding."""
        rows = x.flatten(0, 1).float().index_select(0, self.places.flatten())
        rows = rows.masked_fill(~self.is_real.flatten()[:, None, None], 0.0)
        return rows.view(*self.places.shape, *rows.shape[1:]).transpose(1, 2)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[m, n, c, d]` as `[b * s, n, d]`, without padding."""
        taken = self.is_real.flatten().nonzero().flatten()
        order = self.places.flatten()[taken].argsort()
        return x.transpose(1, 2).flatten(0, 1).index_select(0, taken[order])


def _chunks(bounds: torch.Tensor, prefix_of: torch.Tensor | None) -> _Chunks:
    """Cut the segments between `bounds` `[k + 1]`; one that follows a prefix starts after it."""
    starts, lengths = bounds[:-1], bounds.diff()
    counts = (lengths + CHUNK - 1) // CHUNK
    segment = torch.arange(len(counts), device=bounds.device)
    prefix = segment if prefix_of is None else prefix_of.long()
    first_step = counts[prefix].masked_fill(prefix == segment, 0)
    segment = segment.repeat_interleave(counts)
    first = counts.cumsum(0) - counts  # number of a segment's first chunk, in their order
    number = torch.arange(len(segment), device=bounds.device)
    nth = number - first[segment]
    step = first_step[segment] + nth
    order = step.argsort(stable=True)
    per_step = step.bincount()
    place = torch.empty_like(order)  # in its step
    place[order] = number
    place -= (per_step.cumsum(0) - per_step)[step]
    # A chunk continues the one before it, a segment's first chunk the prefix's last.
    last_of_prefix = (first + counts - 1)[prefix[segment]]
    before = torch.where(nth > 0, number - 1, last_of_prefix)
    inside = nth[order, None] * CHUNK + torch.arange(CHUNK, device=bounds.device)
    is_real = inside < lengths[segment[order], None]
    places = (starts[segment[order], None] + inside).masked_fill(~is_real, 0)
    return _Chunks(places, is_real, per_step.tolist(), place[before][order])


def _earlier(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, distance: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[b * s]` int64 and bool: the position `distance` before each in its sample, which may
    be in the sample's prefix, and whether there is one."""
    bounds, prefix_of = _segments(x, cu_seqlens)
    place = torch.arange(x.shape[0] * x.shape[1], device=x.device)
    segment = torch.bucketize(place, bounds[1:], right=True)
    inside = place - bounds[segment] - distance
    if prefix_of is None:
        return (place - distance).clamp(min=0), inside >= 0
    in_prefix = bounds[prefix_of.long() + 1][segment] + inside
    shared = prefix_lengths(bounds, prefix_of)[segment]
    found = torch.where(inside >= 0, place - distance, in_prefix)
    return found.clamp(min=0), inside + shared >= 0


def _segments(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the bounds `[k + 1]` int64 of the samples in the flattened rows of `x` `[b, s, ...]`,
    and the segment before each, which shares its prompt (None: none does)."""
    if cu_seqlens is not None:
        return cu_seqlens.long(), prefixes_of(cu_seqlens)
    return torch.arange(len(x) + 1, device=x.device) * x.shape[1], None


def _decay_and_gain(
    self: Any, A_log: torch.Tensor, dt_bias: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g in float32 and beta; upstream's takes the exponential in A_log's dtype."""
    return -A_log.float().exp() * F.softplus(alpha.float() + dt_bias), beta.sigmoid()


def needed() -> bool:
    """Return whether this Megatron has the layer, and this machine cannot have its kernels."""
    return not torch.cuda.is_available() and has_delta_net()


def apply() -> None:
    """Bind the kernels in Megatron's modules."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    require_source(common._GDNBase.__init__, "if not HAVE_FLA:")
    require_source(gdn.GatedDeltaNet.forward, "qkv, _ = causal_conv1d(")
    require_parameters(
        common._GDNBase._compute_g_and_beta, "self A_log_local_cp dt_bias_local_cp alpha beta"
    )
    common.HAVE_FLA = True
    for module in (common, gdn):
        module.causal_conv1d = causal_conv1d
        module.chunk_gated_delta_rule = chunk_gated_delta_rule
    common.l2norm = l2norm
    common._GDNBase._compute_g_and_beta = _decay_and_gain


PATCH = Patch(
    "megatron.local_delta_net", "the gated delta net can be computed without CUDA", apply, needed
)
