"""Who samples which prompt, decided while engines run, and which groups a step takes.

The draws of a step are numbered from 0. Without dynamic sampling there are as many as groups are
started. With it (DAPO, arXiv 2503.14476, section 3.2) a group whose responses are all worth the
same allows one draw more, up to a limit: the draws of a step are the fewest that hold enough groups
with a difference, whoever sampled them and whenever they were done.

The TP groups of all engines begin with a share of the draws, dealt in turn, and go on with a
counter, each as it has room: the one that asks first would take all that it has room for. Which of
them gets a draw of the counter's depends on their speed. The tokens of its samples do not, but for
what kernels make of batches of another size; where that must not differ either, all draws are dealt
in turn.

Where more groups are started than a step takes, it takes those that finish first: they are counted
as they do. Groups that must end in the step are taken before these, unless they are compared and do
not differ: then their places are open again. Which groups finish first depends on the speed of the
engines, too, as it does of rewards when a group is replaced; where it must not, each TP group takes
its share of them.

This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Protocol


class Counters(Protocol):
    """Numbers that several add to, as `torch.distributed.Store`'s."""

    def add(self, key: str, amount: int) -> int:
        """The sum with it, of 0 at first."""


class LocalCounters:
    """Counters of a single engine."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, key: str, amount: int) -> int:
        self._counts[key] += amount
        return self._counts[key]


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many groups a step is to take, and how many prompts it may draw for them."""

    groups: int  # for which places are open
    started: int  # groups that are drawn in any case
    most: int  # draws in all
    compares: bool = False  # a group without a difference is replaced by another
    takes_first: bool = False  # what has not finished when enough have is not waited for
    pending: int = 0  # groups of earlier steps that are sampled, too
    reserved: int = 0  # of these, those that must end in the step, and have places of their own

    @classmethod
    def of(cls, groups: int, *, max_refills: int | None = None, oversample: float = 1.0) -> Wanted:
        """`max_refills`, in steps' worth of draws; None: groups are kept whatever they teach."""
        started = math.ceil(groups * oversample)
        most = started + groups * (max_refills or 0)
        return cls(groups, started, most, max_refills is not None, started > groups)

    def share(self, part: int, num_parts: int) -> Wanted:
        """What one of so many is to take of it, and may draw."""

        def of(number: int) -> int:
            return number // num_parts + (part < number % num_parts)

        return dataclasses.replace(
            self, groups=of(self.groups), started=of(self.started), most=of(self.most)
        )

    def beside(self, *, pending: int, reserved: int) -> Wanted:
        """What is left to be drawn beside so many groups that have been, and of places, as so many
        of them must end in the step."""
        return dataclasses.replace(
            self,
            groups=max(0, self.groups - reserved),
            started=max(0, self.started - pending),
            most=max(0, self.most - pending),
            takes_first=True,
            pending=pending,
            reserved=reserved,
        )


class Deal:
    """What one TP group gets of a step's draws; on its first rank."""

    def __init__(
        self,
        wanted: Wanted,
        counters: Counters,
        key: str,
        *,
        turn: tuple[int, int] = (0, 1),
        num_in_turn: int | None = 0,
        numbering: tuple[int, int] = (0, 1),
    ) -> None:
        """`key` is the step's own. `turn` (i, g): the first `num_in_turn` draws of this TP group
        are i, i + g, i + 2g and so on; None: all of them. After so many for each of the g, whoever
        has room gets the next. `numbering` (i, g): what this deal counts as 0, 1, 2 are draws i,
        i + g, i + 2g of the step, those of others it does not count."""
        self._wanted, self._counters, self._key = wanted, counters, key
        self._turn, self._num_in_turn = turn, num_in_turn
        self._next: int | None = None
        self._first, self._stride = numbering
        self.last = -1  # the highest that was given here
        self.num_given = 0
        self.num_refills = 0  # of these, beyond what is drawn in any case
        self.is_over = False  # no more will be given here

    @property
    def takes_first(self) -> bool:
        """Whether what has not finished when enough have is not waited for."""
        return self._wanted.takes_first

    def next(self) -> int | None:
        """A draw that is to be sampled here; None: not now, or with `is_over` never."""
        if not self.is_over and self._wanted.takes_first:
            self.is_over = self.has_enough()
        if self.is_over:
            return None
        if self._next is None:
            self._next = self._following()
        if self._next < self._allowed():
            draw, self._next = self._next, None
            self.num_given += 1
            self.num_refills += draw >= self._wanted.started
            self.last = self._first + draw * self._stride
            return self.last
        self.is_over = self._is_decided(self._next)
        return None

    def finished(
        self, *, differs: bool = True, is_valid: bool = True, is_reserved: bool = False
    ) -> int:
        """A group has all its responses, and where groups are compared all its rewards; whether one
        of them is other than the others, and whether there is any. Returns its rank: the step takes
        it if that is at most `places`, once nothing `is_undecided`. One that does not differ has
        rank 0, to fill up with, and so has a reserved one."""
        wanted = self._wanted
        if is_reserved and not wanted.compares:
            return 0
        if not wanted.compares and not wanted.takes_first:
            return 0  # nothing depends on how many have
        if is_valid:
            self._add("valid", 1)
        if wanted.compares and not differs:
            self._add("useless", 1)
            if is_reserved:
                self._add(
                    "released", 1
                )  # before "settled", so that `has_enough` is never too early
        if is_reserved:
            self._add("settled", 1)
        if is_reserved or (wanted.compares and not differs):
            return 0
        return self._add("kept", 1)

    @property
    def places(self) -> int:
        """For groups that are not reserved, as far as is known."""
        wanted = self._wanted
        if not wanted.compares or not wanted.reserved:
            return wanted.groups
        return wanted.groups + self._add("released", 0)

    @property
    def is_undecided(self) -> bool:
        """Whether a reserved group, here or elsewhere, may still give up its place."""
        return self._num_unsettled() > 0 and not self._add("failed", 0)

    def has_enough(self) -> bool:
        """Whether all groups that are wanted have finished, whatever becomes of reserved ones: what
        else still runs comes too late."""
        unsettled = self._num_unsettled()
        return self._add("kept", 0) >= self.places + unsettled

    def fail(self) -> None:
        """The step has failed here: nobody waits for what this TP group had in hand."""
        self._add("failed", 1)

    def _num_unsettled(self) -> int:
        wanted = self._wanted
        if not wanted.compares or not wanted.reserved:
            return 0
        return wanted.reserved - self._add("settled", 0)

    def _following(self) -> int:
        mine, num_turns = self._turn
        if self._num_in_turn is None or self.num_given < self._num_in_turn:
            return mine + self.num_given * num_turns
        return self._num_in_turn * num_turns + self._add("drawn", 1) - 1

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
        if self._add("failed", 0):
            return True
        in_hand = wanted.started + wanted.pending
        return self._add("useless", 0) >= in_hand and not self._add("valid", 0)

    def _add(self, name: str, amount: int) -> int:
        return self._counters.add(f"{self._key}/{name}", amount)
