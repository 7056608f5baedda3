"""Sums over tokens that micro-batches and ranks each have a part of."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

import torch


class TokenSums:
    """Base of a frozen dataclass whose fields are all 0-dim tensors of one dtype.

    Parts are added up over micro-batches with `+`, and over data-parallel ranks through `stacked`,
    which makes that one collective.
    """

    __slots__ = ()

    def stacked(self: Any) -> torch.Tensor:
        """`[number of fields]`, in their order; `from_stacked` is the inverse."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])

    @classmethod
    def from_stacked(cls, stacked: torch.Tensor) -> Self:
        """The sums of a tensor that `stacked` made."""
        return cls(*stacked.unbind())

    def __add__(self, other: Self) -> Self:
        return self.from_stacked(self.stacked() + other.stacked())
