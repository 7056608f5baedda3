"""Which source each draw of a run belongs to: a function of the draw's number alone.

Draws are divided into blocks of N, the prompts of a step. A source with share w has floor(N w) or
ceil(N w) draws of each block, and after k blocks floor(k N w) or ceil(k N w) draws in all, so both
are within one prompt of its share.

With f = N w - floor(N w), the sources share the F = sum f places of a block that are left after
floor(N w) each, at most one place per source. This is proportionate fair scheduling of periodic
tasks of weights f on F processors, which the algorithm PD2 solves block by block (Baruah et al.
1996, Proportionate progress, Algorithmica 15; Anderson and Srinivasan 2001, Mixed Pfair/ERfair
scheduling, Journal of Computer and System Sciences 68, 2004).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_MOST_UNITS = 10**9  # larger numbers would overflow 64 bits


class Apportionment:
    """The sources of a run's draws. Computed on demand, in a loop over the blocks, once."""

    def __init__(
        self,
        shares: Sequence[Fraction | int],
        block: int = 1,
        *,
        position: int = 0,
        counts: Sequence[int] | None = None,
    ) -> None:
        """`shares` are above 0, in any unit. The first block begins with draw `position`, before
        which `counts` draws of each source came; None: 0."""
        self.units = units = _in_units([Fraction(share) for share in shares])
        self.block, self.position = block, position
        self._counts_before = np.array(counts or [0] * len(units), dtype=np.int64)
        self._total = sum(self.units)
        quotas = [divmod(block * each, self._total) for each in self.units]
        self._whole, self._rests = np.array(quotas, dtype=np.int64).T  # a rest is f * total
        self._num_left = block - int(self._whole.sum())
        self._period = self._total // math.gcd(self._total, *(rest for _, rest in quotas))
        # Places beyond floor(N w) that each source has taken before block 0, 1, ...
        self._taken = [np.zeros(len(units), dtype=np.int64)]

    def of_draws(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `[count]` int64 each: sources of the draws from `start` on, and the number of
        earlier draws of the same source."""
        first = start - self.position
        assert first >= 0, f"draw {start} precedes the first block, which begins at {self.position}"
        if len(self.units) == 1:
            draws = np.arange(first, first + count)
            return np.zeros_like(draws), draws + self._counts_before[0]
        blocks = range(first // self.block, (first + count - 1) // self.block + 1)
        parts = [self._of_block(block) for block in blocks] or [np.empty((2, 0), dtype=np.int64)]
        skipped = first % self.block
        sources, ranks = np.concatenate(parts, axis=1)[:, skipped : skipped + count]
        return sources, ranks

    def counts(self, num_draws: int) -> list[int]:
        """Return how many of the first draws belong to each source."""
        blocks, rest = divmod(num_draws - self.position, self.block)
        counts = self._counts_at(blocks)
        if rest:
            sources, _ = self.of_draws(num_draws - rest, rest)
            counts = counts + np.bincount(sources, minlength=len(self.units))
        per_source: list[int] = counts.tolist()
        return per_source

    def _of_block(self, block: int) -> np.ndarray:
        """Return `[2, N]` int64, as `of_draws`. The draws of each source are spread evenly."""
        before = self._counts_at(block)
        quotas = self._counts_at(block + 1) - before
        sources = np.repeat(np.arange(len(quotas)), quotas)
        within = np.arange(self.block) - np.repeat(np.cumsum(quotas) - quotas, quotas)
        order = np.argsort((2 * within + 1) / quotas[sources], kind="stable")
        return np.stack([sources, before[sources] + within])[:, order]

    def _counts_at(self, block: int) -> np.ndarray:
        """Return `[sources]` int64: the draws of each source before a block."""
        periods, place = divmod(block, self._period)
        self._extend(place)
        taken = periods * (self._rests * self._period // self._total) + self._taken[place]
        counts: np.ndarray = self._counts_before + self._whole * block + taken
        return counts

    def _extend(self, num_blocks: int) -> None:
        """Assign the places that are left in the blocks before `num_blocks`, by PD2.

        The j-th place of a source, from 1, is due in blocks floor((j - 1) / f) to ceil(j / f) - 1.
        Of the places that may be taken, those due first are; then those whose last block is also
        the first of the source's next place; then, for f >= 1/2, those followed by the longest run
        of places due in two blocks only.
        """
        total, sharing = self._total, np.flatnonzero(self._rests)
        rests = self._rests[sharing]
        idle = np.maximum(total - rests, 1)
        while len(self._taken) <= num_blocks:
            taken = self._taken[-1][sharing]
            may_take = taken * total // rests < len(self._taken)
            deadline = _rounded_up((taken + 1) * total, rests)
            overlaps = (taken + 1) * total % rests != 0
            run_end = _rounded_up(_rounded_up(deadline * idle, total) * total, idle)
            run_end[2 * rests < total] = 0
            urgent = np.lexsort((-run_end, ~overlaps, deadline))
            chosen = urgent[may_take[urgent]][: self._num_left]
            assert len(chosen) == self._num_left, "not a fair schedule"
            after = self._taken[-1].copy()
            after[sharing[chosen]] += 1
            self._taken.append(after)


def _rounded_up(numerator: np.ndarray, denominator: np.ndarray | int) -> np.ndarray:
    quotient: np.ndarray = -(-numerator // denominator)
    return quotient


def _in_units(shares: Sequence[Fraction]) -> list[int]:
    """Return whole numbers in the same proportion, up to one in 10^9."""
    multiple = math.lcm(*(share.denominator for share in shares))
    units = [int(share * multiple) for share in shares]
    divisor, total = math.gcd(*units), sum(units)
    if total // divisor <= _MOST_UNITS:
        return [each // divisor for each in units]
    return [max(1, each * _MOST_UNITS // total) for each in units]
