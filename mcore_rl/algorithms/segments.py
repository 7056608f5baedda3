"""Sums, means and runs over the samples that lie one after the other in a `[t]` tensor.

Shape legend: b samples, t tokens (see `mcore_rl.algorithms`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def masked(loss_mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` with 0 where masked.

    By selection and not by multiplication: 0 * nan is nan. Call it before any arithmetic and not
    only after, since the gradient of where(mask, f(x), 0) at a nan x is 0 * nan as well.
    """
    return torch.where(loss_mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


@dataclass(frozen=True, slots=True)
class Segments:
    """Which of the t tokens belong to which of the b samples, and which of them count."""

    sample_ids: torch.Tensor  # [t] int64, 0 .. b - 1, never falling
    loss_mask: torch.Tensor  # [t] bool
    counts: torch.Tensor  # [b] int64, loss tokens of each sample

    @classmethod
    def of(cls, lengths: torch.Tensor, loss_mask: torch.Tensor) -> Segments:
        """`lengths` `[b]` int64, tokens per sample, which add up to t; `loss_mask` `[t]` bool."""
        num_tokens = loss_mask.shape[0]
        samples = torch.arange(lengths.shape[0], device=lengths.device)
        # Without output_size the sum of lengths would have to come back from a GPU first.
        sample_ids = torch.repeat_interleave(samples, lengths, output_size=num_tokens)
        counts = torch.zeros_like(lengths).index_add(0, sample_ids, loss_mask.to(lengths.dtype))
        return cls(sample_ids, loss_mask, counts)

    @property
    def num_samples(self) -> int:
        return self.counts.shape[0]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`[b]`: the sum over each sample's loss tokens; 0 for a sample without any."""
        zeros = values.new_zeros(self.num_samples)
        return zeros.index_add(0, self.sample_ids, masked(self.loss_mask, values))

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """`[b]`: the mean over each sample's loss tokens; 0 for a sample without any."""
        return self.sum(values) / self.counts.clamp(min=1)

    def to_tokens(self, per_sample: torch.Tensor) -> torch.Tensor:
        """`[b]` -> `[t]`: every token gets its sample's value, masked tokens too."""
        return per_sample.index_select(0, self.sample_ids)

    def tokens_left(self) -> torch.Tensor:
        """`[m]` int64 for the m loss tokens in order: how many of its sample's follow each."""
        ends = self.counts.cumsum(0)
        owners = self.sample_ids[self.loss_mask]
        return ends[owners] - 1 - torch.arange(owners.shape[0], device=owners.device)


def discounted_sums_to_go(
    values: torch.Tensor, tokens_left: torch.Tensor, discount: float
) -> torch.Tensor:
    """`[m]`: sum over k >= 0 of discount^k * values[i + k], up to the end of i's own sample.

    values: `[m]`, loss tokens only, samples one after the other; tokens_left: `[m]` from
    `Segments.tokens_left`. After round k every sum covers 2^k tokens, so that a response of 30,000
    tokens takes 15 rounds over all tokens at once and not 30,000 steps. What lies beyond a sample's
    end is left out by selection, so another sample's nan or inf does not get in.
    """
    sums, step, factor = values, 1, discount
    longest = int(tokens_left.max()) + 1 if tokens_left.numel() else 0
    while step < longest:
        ahead = torch.cat((sums[step:], sums.new_zeros(step)))
        sums = torch.where(tokens_left >= step, sums + factor * ahead, sums)
        step, factor = 2 * step, factor * factor
    return sums
