"""Aggregation of token losses into the loss of a mini-batch: one weight per token.

    token_mean            1 / T                DAPO, arXiv 2503.14476, eq. 8
    seq_mean_token_mean   1 / (N * length)     GRPO, arXiv 2402.03300, eq. 3
    seq_mean_token_sum    1 / N
    constant              1 / (N * constant)   Dr. GRPO, arXiv 2503.20783: constant is the response
                                               budget, so that no length weighs more than another

T is the number of loss tokens, N the number of samples with at least one loss token, in the
*global* mini-batch, over all micro-batches and data-parallel ranks; length is the number of a
sample's loss tokens. Nothing else is averaged, so the losses and gradients of any split into
micro-batches and ranks sum to the mini-batch's, if samples are not split.

Also the underlying sums, means and scans over consecutive samples in a `[t]` tensor.
Shape legend: b samples, t tokens (see `mcore_rl.algorithms`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import torch

from mcore_rl.common.errors import UsageError


def masked(loss_mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values` with 0 where masked.

    It selects instead of multiplying: 0 * nan is nan. Call it before any arithmetic, not only
    after, since the gradient of where(mask, f(x), 0) at a nan x is 0 * nan as well.
    """
    return torch.where(loss_mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


@dataclass(frozen=True, slots=True)
class Segments:
    """Assignment of t tokens to b samples, with the loss mask."""

    sample_ids: torch.Tensor  # [t] int64, 0 .. b - 1, non-decreasing
    loss_mask: torch.Tensor  # [t] bool
    counts: torch.Tensor  # [b] int64, loss tokens of each sample

    @classmethod
    def of(cls, lengths: torch.Tensor, loss_mask: torch.Tensor) -> Segments:
        """Build from `lengths` `[b]` int64, tokens per sample (sum: t), and `loss_mask` `[t]`."""
        num_tokens = loss_mask.shape[0]
        samples = torch.arange(lengths.shape[0], device=lengths.device)
        # Without output_size a GPU would have to return the sum of lengths first.
        sample_ids = torch.repeat_interleave(samples, lengths, output_size=num_tokens)
        counts = torch.zeros_like(lengths).index_add(0, sample_ids, loss_mask.to(lengths.dtype))
        return cls(sample_ids, loss_mask, counts)

    @property
    def num_samples(self) -> int:
        return self.counts.shape[0]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[b]`: the sum over each sample's loss tokens; 0 for a sample without any."""
        zeros = values.new_zeros(self.num_samples)
        return zeros.index_add(0, self.sample_ids, masked(self.loss_mask, values))

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[b]`: the mean over each sample's loss tokens; 0 for a sample without any."""
        return self.sum(values) / self.counts.clamp(min=1)

    def to_tokens(self, per_sample: torch.Tensor) -> torch.Tensor:
        """Expand `[b]` to `[t]`: every token, masked or not, gets its sample's value."""
        return per_sample.index_select(0, self.sample_ids)

    def tokens_left(self) -> torch.Tensor:
        """Return `[m]` int64 for the m loss tokens: how many of its sample's follow each."""
        ends = self.counts.cumsum(0)
        owners = self.sample_ids[self.loss_mask]
        return ends[owners] - 1 - torch.arange(owners.shape[0], device=owners.device)


def discounted_sums_to_go(
    values: torch.Tensor, tokens_left: torch.Tensor, discount: float
) -> torch.Tensor:
    """Return `[m]`: sum over k >= 0 of discount^k * values[i + k], up to the end of i's sample.

    values: `[m]`, loss tokens only, samples one after the other; tokens_left: `[m]` from
    `Segments.tokens_left`. After round k every sum covers 2^k tokens, so a response of 30,000
    tokens takes 15 rounds over all tokens instead of 30,000 steps. Values after a sample's end are
    excluded by selection, so another sample's nan or inf has no effect.
    """
    sums, step, factor = values, 1, discount
    longest = int(tokens_left.max()) + 1 if tokens_left.numel() else 0
    while step < longest:
        ahead = torch.cat((sums[step:], sums.new_zeros(step)))
        sums = torch.where(tokens_left >= step, sums + factor * ahead, sums)
        step, factor = 2 * step, factor * factor
    return sums


class TokenSums:
    """Base of a frozen dataclass whose fields are all 0-dim tensors of one dtype.

    Add over micro-batches with `+`, and over data-parallel ranks by one collective on `stacked`.
    """

    __slots__ = ()

    def stacked(self: Any) -> torch.Tensor:
        """Return `[number of fields]`, in field order; `from_stacked` is the inverse."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])

    @classmethod
    def from_stacked(cls, stacked: torch.Tensor) -> Self:
        """Rebuild the sums from the tensor that `stacked` returned."""
        return cls(*stacked.unbind())

    def __add__(self, other: Self) -> Self:
        return self.from_stacked(self.stacked() + other.stacked())


AggregationMode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts of the global mini-batch: numbers, or 0-dim tensors on the tokens' device.

    Masking by a correction (`mismatch`) does not change them: they count all generated tokens,
    since otherwise few kept tokens would weigh as much as many.
    """

    num_tokens: float | torch.Tensor  # loss tokens
    num_samples: float | torch.Tensor  # samples with at least one loss token

    def __post_init__(self) -> None:
        for name, count in (("num_tokens", self.num_tokens), ("num_samples", self.num_samples)):
            # Tensors are not checked, which would wait for the GPU.
            if not isinstance(count, torch.Tensor) and not 0 < count < math.inf:
                raise RuntimeError(
                    f"the loss denominator {name} is {count}, expected a positive count"
                )

    @classmethod
    def of(cls, segments: Segments) -> Denominators:
        """Count a mini-batch that one call holds; raise RuntimeError if it has no loss token."""
        return cls(int(segments.counts.sum()), int((segments.counts > 0).sum()))


@dataclass(frozen=True, slots=True)
class Aggregation:
    """Aggregation mode; a constant that is missing or without effect raises UsageError."""

    mode: AggregationMode = "token_mean"  # --rl-loss-aggregation
    constant: float | None = None  # --rl-loss-constant: tokens, only for mode "constant"

    def __post_init__(self) -> None:
        if self.mode == "constant" and self.constant is None:
            raise UsageError(
                "needs --rl-loss-constant, the number of tokens to divide by",
                flag="--rl-loss-aggregation constant",
                remedy="give for example the value of --rl-max-response-tokens",
            )
        if self.mode != "constant" and self.constant is not None:
            raise UsageError(
                f"has no effect with --rl-loss-aggregation {self.mode}",
                flag=f"--rl-loss-constant {self.constant}",
                remedy="drop it, or choose --rl-loss-aggregation constant",
            )


def token_weights(
    segments: Segments, denominators: Denominators, aggregation: Aggregation, dtype: torch.dtype
) -> torch.Tensor:
    """Return `[t]`: the factor of each token's loss in the sum; 0 where masked."""
    mask = segments.loss_mask.to(dtype)
    if aggregation.mode == "token_mean":
        return mask / denominators.num_tokens
    per_sample = mask / denominators.num_samples
    if aggregation.mode == "seq_mean_token_mean":
        return per_sample / segments.to_tokens(segments.counts.clamp(min=1).to(dtype))
    if aggregation.mode == "constant":
        assert aggregation.constant is not None, "checked when the aggregation was made"
        return per_sample / aggregation.constant
    return per_sample
