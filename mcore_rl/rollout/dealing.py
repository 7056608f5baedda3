"""Who samples which prompt, decided while engines run.

The draws of a step are numbered from 0. Without dynamic sampling there are as many as groups are
started. With it (DAPO, arXiv 2503.14476, section 3.2) a group whose responses are all worth the
same allows one draw more, up to a limit: the draws of a step are the fewest that hold enough groups
with a difference, whoever sampled them and whenever they were done.

The TP groups of all engines draw from one counter, each as it has room. Which of them gets a draw
depends on their speed. The tokens of its samples do not, but for what kernels make of batches of
another size; where that must not differ either, draws are dealt in turn.

This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Protocol


class Counters(Protocol):
    """Numbers that several add to, as `torch.distributed.Store`'s."""

    def add(self, key: str, amount: int) -> int:
        """The sum with it, of 0 at first."""


class LocalCounters:
    """Of one who deals with nobody."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, key: str, amount: int) -> int:
        self._counts[key] += amount
        return self._counts[key]


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many groups a step is to have, and how many prompts it may draw for them."""

    groups: int
    started: int  # more than `groups` where those are taken that finish first
    most: int  # draws in all
    compares: bool = False  # a group without a difference is replaced by another

    @classmethod
    def of(cls, groups: int, *, max_refills: int | None = None, oversample: float = 1.0) -> Wanted:
        """`max_refills`, in steps' worth of draws; None: groups are kept whatever they teach."""
        started = math.ceil(groups * oversample)
        if max_refills is None:
            return cls(groups, started, started)
        return cls(groups, started, started + groups * max_refills, compares=True)


class Deal:
    """What one TP group gets of a step's draws; on its first rank."""

    def __init__(
        self,
        wanted: Wanted,
        counters: Counters,
        key: str,
        *,
        turn: tuple[int, int] | None = None,
    ) -> None:
        """`key` is the step's own. `turn` (i, g): this TP group gets draws i, i + g, i + 2g and so
        on; None: any that are next."""
        self._wanted, self._counters, self._key, self._turn = wanted, counters, key, turn
        self._next: int | None = None if turn is None else turn[0]
        self.last = -1  # the highest that was given here
        self.is_over = False  # no more will be given here

    def next(self) -> int | None:
        """A draw that is to be sampled here; None: not now, or with `is_over` never."""
        if self.is_over:
            return None
        if self._next is None:
            self._next = self._add("drawn", 1) - 1
        if self._next < self._allowed():
            self.last = draw = self._next
            self._next = None if self._turn is None else draw + self._turn[1]
            return draw
        self.is_over = self._is_decided(self._next)
        return None

    def finished(self, *, differs: bool, is_valid: bool) -> None:
        """A group has all its rewards; whether one of them is other than the others, and whether
        there is any."""
        if is_valid:
            self._add("valid", 1)
        if self._wanted.compares and not differs:
            self._add("useless", 1)
        else:
            self._add("kept", 1)

    def has_enough(self) -> bool:
        """Whether all groups that are wanted have finished: what still runs comes too late."""
        return self._add("kept", 0) >= self._wanted.groups

    def _allowed(self) -> int:
        wanted = self._wanted
        # Where every reward fails more of them would not mend it.
        replaced = self._add("useless", 0) if wanted.compares and self._add("valid", 0) else 0
        return min(wanted.started + replaced, wanted.most)

    def _is_decided(self, draw: int) -> bool:
        """Whether a draw that is not allowed will never be."""
        wanted = self._wanted
        if not wanted.compares or draw >= wanted.most or self.has_enough():
            return True
        return self._add("useless", 0) >= wanted.started and not self._add("valid", 0)

    def _add(self, name: str, amount: int) -> int:
        return self._counters.add(f"{self._key}/{name}", amount)
