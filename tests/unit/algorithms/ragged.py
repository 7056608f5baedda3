"""Random ragged batches for the tests of this folder, and ways to cut and pad them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Ragged:
    lengths: torch.Tensor  # [b] int64
    loss_mask: torch.Tensor  # [t] bool

    @property
    def num_tokens(self) -> int:
        return len(self.loss_mask)

    @property
    def loss_tokens(self) -> list[list[int]]:
        """Per sample, the positions in [t] of its loss tokens."""
        ends = self.lengths.cumsum(0).tolist()
        return [
            [j for j in range(end - length, end) if self.loss_mask[j]]
            for end, length in zip(ends, self.lengths.tolist(), strict=True)
        ]

    @property
    def response_lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self.loss_tokens], dtype=np.int64)

    def part(self, rows: list[int]) -> tuple[Ragged, torch.Tensor]:
        """The samples `rows` alone, in that order, and where their tokens are in [t]."""
        ends = self.lengths.cumsum(0).tolist()
        positions = [
            j for row in rows for j in range(ends[row] - int(self.lengths[row]), ends[row])
        ]
        index = torch.tensor(positions, dtype=torch.long)
        return Ragged(self.lengths[rows], self.loss_mask[index]), index


def ragged(response_lengths: list[int], prompt_lengths: list[int]) -> Ragged:
    """Every prompt has a token at least; position j scores token j+1."""
    masks = [
        [False] * (prompt - 1) + [True] * response + [False]
        for prompt, response in zip(prompt_lengths, response_lengths, strict=True)
    ]
    return Ragged(
        torch.tensor([len(mask) for mask in masks], dtype=torch.long),
        torch.tensor([flag for mask in masks for flag in mask], dtype=torch.bool),
    )


def random_ragged(seed: int, num_samples: int = 8, gaps: bool = False) -> Ragged:
    """Has an empty response, one of one token, and longer ones in any order.

    With `gaps` some response tokens are no loss tokens, as in dialogues of several turns.
    """
    rng = np.random.default_rng(seed)
    lengths = [0, 1, *rng.integers(2, 12, num_samples - 2).tolist()]
    rng.shuffle(lengths)
    batch = ragged(lengths, rng.integers(1, 5, num_samples).tolist())
    if gaps:
        keep = torch.from_numpy(rng.random(batch.num_tokens) < 0.7)
        batch = Ragged(batch.lengths, batch.loss_mask & keep)
    return batch


def normal(batch: Ragged, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64).to(dtype)


def spoilt(batch: Ragged, values: torch.Tensor, garbage: float) -> torch.Tensor:
    """`values` with garbage where masked."""
    return torch.where(batch.loss_mask, values, torch.tensor(garbage, dtype=values.dtype))


def from_padded(padded: torch.Tensor, response_mask: torch.Tensor) -> tuple[Ragged, torch.Tensor]:
    """Peers' `[b, r]` response tensors as ragged samples with a prompt of one token each."""
    lengths = [int(count) for count in response_mask.sum(dim=1)]
    batch = ragged(lengths, [1] * len(lengths))
    return batch, to_ragged(batch, padded)


def to_ragged(batch: Ragged, padded: torch.Tensor) -> torch.Tensor:
    """`[b, r]`, responses from the left, to `[t]`, 0 where masked."""
    values = torch.zeros(batch.num_tokens, dtype=padded.dtype)
    for row, tokens in enumerate(batch.loss_tokens):
        values[tokens] = padded[row, : len(tokens)]
    return values
