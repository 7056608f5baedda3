"""Which source each draw of a run belongs to: a function of the draw's number alone.

After p draws a source with share w has had c(p) of them, and with K sources

    |c(p) - p w| <= 1 - 1 / (2K - 2)

(Tijdeman 1980, The chairman assignment problem, Discrete Mathematics 32). A step's number of
prompts of a source, the difference of two such counts, is within one of its share with two sources,
and less than two from it with more; over time the shares are exact.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_UNITS = 10**9  # shares are rounded to multiples of 1 / _UNITS


class Apportionment:
    """The sources of a run's draws. Computed on demand, in a loop over the draws, once."""

    def __init__(self, shares: Sequence[Fraction | int]) -> None:
        """`shares` are above 0, in any unit."""
        total = sum(map(Fraction, shares))
        units = [max(1, round(share / total * _UNITS)) for share in shares]
        divisor = math.gcd(*units)
        self.units = [each // divisor for each in units]
        self._period = sum(self.units)  # draws after which the pattern repeats
        self._taken = [0] * len(units)
        # For the draws so far, up to one period: the source, and the draws of it before.
        self._sources, self._ranks = array("B"), array("q")

    def of_draws(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `[count]` int64 each: sources of the draws from `start` on, and the number of
        earlier draws of the same source."""
        draws = np.arange(start, start + count)
        if len(self.units) == 1:
            return np.zeros_like(draws), draws
        periods, places = np.divmod(draws, self._period)
        self._extend(int(places.max(initial=-1)) + 1)
        sources = np.frombuffer(self._sources, np.uint8)[places].astype(np.int64)
        ranks = np.frombuffer(self._ranks, np.int64)[places]
        return sources, periods * np.array(self.units)[sources] + ranks

    def counts(self, num_draws: int) -> list[int]:
        """Return how many of the first draws belong to each source."""
        sources, _ = self.of_draws(0, num_draws % self._period)
        rest = np.bincount(sources, minlength=len(self.units)).tolist()
        return [
            num_draws // self._period * units + more
            for units, more in zip(self.units, rest, strict=True)
        ]

    def _extend(self, count: int) -> None:
        """Assign the draws up to `count`: each to the source, among those that are behind by at
        least 1 / (2K - 2), that would otherwise be the first to be behind by more than the bound.
        """
        total, scale, taken = self._period, 2 * len(self.units) - 2, self._taken
        for number in range(len(self._sources) + 1, count + 1):
            chosen, soonest = -1, math.inf
            for source, units in enumerate(self.units):
                behind = scale * (number * units - taken[source] * total)
                if behind >= total:
                    draws_left = ((scale - 1) * total - behind) / units
                    if draws_left < soonest:
                        chosen, soonest = source, draws_left
            self._sources.append(chosen)
            self._ranks.append(taken[chosen])
            taken[chosen] += 1
