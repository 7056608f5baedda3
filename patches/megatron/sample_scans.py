"""Convolutions and recurrences over the samples of padded and packed rows, in torch.

For layers whose kernels need CUDA (`local_delta_net`, `local_mamba`). A row is padded or packed; a
packed row's samples begin at `cu_seqlens`, to which a prompt that samples share may be attached
(`mcore_rl.batching.rows.set_prefixes`). Nothing crosses the border of a sample, except that it
continues from such a prompt. A sample's result does not depend on what else is in its row, bit for
bit.

Shape legend: b rows, s positions of a row, d channels, n heads, dk and dv sizes of the state of a
head; c positions of a chunk, m chunks, k segments (samples, or shared prompts and their rests).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mcore_rl.batching.rows import prefix_lengths, prefixes_of

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


@dataclass(frozen=True, slots=True)
class Chunks:
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

    def decays(self, log_decay: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the factors by which `log_decay` `[b, s, n]` shrinks a state: from the begin of a
        chunk to each position `[m, n, c, 1]`, between positions `[m, n, c, c]`, from each to the
        end `[m, n, c, 1]`, and over the chunk `[m, n, 1, 1]`. Differences of sums need float64."""
        total = self.cut(log_decay.unsqueeze(-1)).double().cumsum(2)
        between = (total - total.transpose(2, 3)).tril().exp().tril()
        whole = total[:, :, -1:]
        factors = (total.exp(), between, (whole - total).exp(), whole.exp())
        return tuple(x.float() for x in factors)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[m, n, c, d]` as `[b * s, n, d]`, without padding."""
        taken = self.is_real.flatten().nonzero().flatten()
        order = self.places.flatten()[taken].argsort()
        return x.transpose(1, 2).flatten(0, 1).index_select(0, taken[order])

    def scan(
        self,
        query: torch.Tensor,
        inside: torch.Tensor,
        value: torch.Tensor,
        key_to_end: torch.Tensor,
        decay: torch.Tensor,
        corrected_by: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the outputs `[m, n, c, dv]` of a state `[dk, dv]` that starts at 0:

            value = value - corrected_by @ state        (if there is `corrected_by` [m, n, c, dk])
            output = query @ state + inside @ value     query [m, n, c, dk], inside [m, n, c, c]
            state = decay state + key_to_end @ value    key_to_end [m, n, dk, c]

        Each step takes one chunk of every segment that has one left.
        """
        steps = [x.split(self.per_step) for x in (query, inside, value, key_to_end, decay)]
        corrections = corrected_by.split(self.per_step) if corrected_by is not None else None
        state: torch.Tensor | None = None
        outputs = []
        for step, source in enumerate(self.sources.split(self.per_step)):
            query, inside, value, key_to_end, decay = (of_step[step] for of_step in steps)
            if state is None:  # nothing precedes the first step
                outputs.append(inside @ value)
                state = key_to_end @ value
                continue
            state = state.index_select(0, source)
            if corrections is not None:
                value = value - corrections[step] @ state
            outputs.append(query @ state + inside @ value)
            state = state * decay + key_to_end @ value
        return torch.cat(outputs)


def chunks_of(bounds: torch.Tensor, prefix_of: torch.Tensor | None) -> Chunks:
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
    return Chunks(places, is_real, per_step.tolist(), place[before][order])


def _earlier(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, distance: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[b * s]` int64 and bool: the position `distance` before each in its sample, which may
    be in the sample's prefix, and whether there is one."""
    bounds, prefix_of = segments_of(x, cu_seqlens)
    place = torch.arange(x.shape[0] * x.shape[1], device=x.device)
    segment = torch.bucketize(place, bounds[1:], right=True)
    inside = place - bounds[segment] - distance
    if prefix_of is None:
        return (place - distance).clamp(min=0), inside >= 0
    in_prefix = bounds[prefix_of.long() + 1][segment] + inside
    shared = prefix_lengths(bounds, prefix_of)[segment]
    earlier = torch.where(inside >= 0, place - distance, in_prefix)
    return earlier.clamp(min=0), inside + shared >= 0


def segments_of(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the bounds `[k + 1]` int64 of the samples in the flattened rows of `x` `[b, s, ...]`,
    and the segment before each, which shares its prompt (None: none does)."""
    if cu_seqlens is not None:
        return cu_seqlens.long(), prefixes_of(cu_seqlens)
    return torch.arange(len(x) + 1, device=x.device) * x.shape[1], None
