"""Assignment of a step's draws to engines, and the choice of the groups that the step takes.

The draws of a step are numbered from 0. Without dynamic sampling there is one draw per started
group. With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2), a group whose responses all have
the same reward allows one more draw, up to a limit. A step uses the fewest draws that contain
enough groups with different rewards, regardless of who sampled them and when they finished.

Each TP group begins with a share of the draws, assigned round-robin, so that the first caller does
not take all draws that it has room for. Later draws come from a shared counter whenever a TP group
has room, so their assignment depends on speed. Tokens do not depend on it, except where kernels
return other bits for batches of another size. `--rl-deterministic` assigns all draws round-robin.

If a step starts more groups than it takes, it takes those that finish first. Groups that must end
in the step are reserved: they have places of their own. If groups are compared, a reserved group
whose rewards do not differ releases its place. Which groups finish first, and which are replaced in
time, depends on the speed of engines and rewards; `--rl-deterministic` gives each TP group its own
share of the target instead.

If groups have different sizes, the target has places for each size, so that every step has the same
number of samples. A group that differs but whose size has no place left allows one more draw, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class Counters(Protocol):
    """Shared counters, like those of `torch.distributed.Store`."""

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a counter that starts at 0, and return the sum."""


class LocalCounters:
    """Counters of one TP group."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, key: str, amount: int) -> int:
        self._counts[key] += amount
        return self._counts[key]


@dataclass(frozen=True, slots=True)
class SamplingTarget:
    """The number of groups that a step takes, and of the prompts that it may draw for them.

    Example: 4 groups, 6 started at a time, at most 14 draws, unfinished groups are stopped:
    `SamplingTarget(num_groups=4, num_started=6, max_draws=14, compares=True, takes_first=True)`.
    """

    num_groups: int  # places for groups that are not reserved
    num_started: int  # groups started in any case
    max_draws: int
    compares: bool = False  # replaces groups whose rewards do not differ
    takes_first: bool = False  # takes the groups that finish first and stops the others
    num_pending: int = 0  # groups of earlier steps that are sampled as well
    num_reserved: int = 0  # of these, groups that must end in this step, with places of their own

    @classmethod
    def of(
        cls, num_groups: int, *, max_refills: int | None = None, oversample: float = 1.0
    ) -> SamplingTarget:
        """Return the target of a step without pending groups. `max_refills` counts in draws per
        group of the step; None compares no groups."""
        started = math.ceil(num_groups * oversample)
        most = started + num_groups * (max_refills or 0)
        return cls(num_groups, started, most, max_refills is not None, started > num_groups)

    def share(self, part: int, num_parts: int) -> SamplingTarget:
        """Return part `part` of `num_parts` nearly equal parts."""

        def part_of(number: int) -> int:
            return number // num_parts + (part < number % num_parts)

        return dataclasses.replace(
            self,
            num_groups=part_of(self.num_groups),
            num_started=part_of(self.num_started),
            max_draws=part_of(self.max_draws),
        )

    def with_pending(self, *, num_pending: int, num_reserved: int) -> SamplingTarget:
        """Return the target of the new groups of a step that also resumes `num_pending` groups, of
        which `num_reserved` must end in this step."""
        return dataclasses.replace(
            self,
            num_groups=max(0, self.num_groups - num_reserved),
            num_started=max(0, self.num_started - num_pending),
            max_draws=max(0, self.max_draws - num_pending),
            takes_first=True,
            num_pending=num_pending,
            num_reserved=num_reserved,
        )


@dataclass(slots=True)
class StepCounts:
    """The counts of a step, of one TP group or summed over all.

    Example: of 6 groups of 8 samples 2 are pending:

        StepCounts(num_draws=6, started=6, pending=2, generated_tokens=9000, left_samples=16,
                   left_tokens=3000)
    """

    num_draws: int = 0  # counted from the step's first draw
    started: int = 0
    refills: int = 0  # among `started`, replacing groups without a difference or a place
    stale: int = 0  # pending groups dropped at once because of their age
    dropped: int = 0  # including `stale`
    pending: int = 0
    generated_tokens: int = 0
    left_samples: int = 0  # of dropped or pending groups
    left_tokens: int = 0  # their tokens so far

    def __add__(self, other: StepCounts) -> StepCounts:
        counts = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)
        }
        return dataclasses.replace(
            StepCounts(**counts), num_draws=max(self.num_draws, other.num_draws)
        )


class Dispatcher:
    """Assigns a step's draws to one TP group; on its first rank."""

    def __init__(
        self,
        target: SamplingTarget,
        counters: Counters,
        key: str,
        *,
        round_robin: tuple[int, int] = (0, 1),
        num_round_robin: int | None = 0,
        numbering: tuple[int, int] = (0, 1),
        places: Mapping[int, int] | None = None,
    ) -> None:
        """`key` is unique to the step. With `round_robin` (i, g) the first `num_round_robin` draws
        of this TP group are i, i + g, i + 2g and so on; None: all of them. Later draws go to any TP
        group that has room. With `numbering` (i, g) the numbers 0, 1, 2 of this dispatcher are
        draws i, i + g, i + 2g of the step; other draws are not counted here. `places` are those of
        `target` by the samples of a group, if groups differ in that; none is reserved then."""
        assert not places or not target.num_reserved, "reserved groups of different sizes"
        self._target, self._counters, self._key = target, counters, key
        self._round_robin, self._num_round_robin = round_robin, num_round_robin
        self._next_number: int | None = None
        self._first, self._stride = numbering
        self._places = Counter(places)
        self.num_dispatched = 0
        self.num_refills = 0  # of these, replacements
        self.is_exhausted = False  # no more will be dispatched here

    @property
    def takes_first(self) -> bool:
        """Whether the step stops other groups once enough have finished."""
        return self._target.takes_first

    def next_draw(self) -> int | None:
        """Return a draw to sample here. None: none is available now, or, if `is_exhausted`, none
        will be."""
        if not self.is_exhausted and self._target.takes_first:
            self.is_exhausted = self.has_enough()
        if self.is_exhausted:
            return None
        if self._next_number is None:
            self._next_number = self._take_number()
        if self._next_number < self._allowed():
            draw, self._next_number = self._next_number, None
            self.num_dispatched += 1
            self.num_refills += draw >= self._target.num_started
            return self._first + draw * self._stride
        self.is_exhausted = self._is_final(self._next_number)
        return None

    def record_group(
        self,
        *,
        size: int = 0,
        differs: bool = True,
        is_valid: bool = True,
        is_reserved: bool = False,
    ) -> int:
        """Record a group with all its responses and, if groups are compared, all its rewards.

        `size`: its samples; `differs`: its rewards differ; `is_valid`: it has a valid reward.
        Return its rank: once no group `is_undecided`, the step takes the groups with a rank of at
        most the `places` of their size. Rank 0: a reserved group, or one that the caller chooses
        from, because it only fills a place that remains, or because no group is stopped.
        """
        target = self._target
        if is_reserved and not target.compares:
            return 0
        if not target.compares and not target.takes_first:
            return 0  # nothing depends on the number of finished groups
        if is_valid:
            self._add("valid", 1)
        if target.compares and not differs:
            self._add("uninformative", 1)
            if is_reserved:
                self._add("released", 1)  # before "settled", so that `has_enough` is not early
        if is_reserved:
            self._add("settled", 1)
        if is_reserved or (target.compares and not differs):
            return 0
        rank = self._add(self._kept(size), 1)
        if target.compares and self._places and rank > self._places[size]:
            self._add("surplus", 1)
        return rank if target.takes_first else 0

    def places(self, size: int) -> int:
        """Number of places for groups of this size that are not reserved, as far as known."""
        target = self._target
        if self._places:
            return self._places[size]
        if not target.compares or not target.num_reserved:
            return target.num_groups
        return target.num_groups + self._add("released", 0)

    @property
    def is_undecided(self) -> bool:
        """Whether a reserved group of any TP group may still release its place."""
        return self._num_unsettled() > 0 and not self._add("failed", 0)

    def has_enough(self) -> bool:
        """Return whether enough groups have finished, whatever happens to reserved groups. Groups
        that are still running are too late."""
        unsettled = self._num_unsettled()
        return all(
            self._add(self._kept(size), 0) >= self.places(size) + unsettled
            for size in self._places or (0,)
        )

    def fail(self) -> None:
        """Record that the step failed here: no TP group waits for its draws."""
        self._add("failed", 1)

    def _kept(self, size: int) -> str:
        return f"kept/{size}" if self._places else "kept"

    def _num_unsettled(self) -> int:
        target = self._target
        if not target.compares or not target.num_reserved:
            return 0
        return target.num_reserved - self._add("settled", 0)

    def _take_number(self) -> int:
        first, stride = self._round_robin
        if self._num_round_robin is None or self.num_dispatched < self._num_round_robin:
            return first + self.num_dispatched * stride
        return self._num_round_robin * stride + self._add("drawn", 1) - 1

    def _allowed(self) -> int:
        target = self._target
        # If every reward failed, more draws would not help.
        replaced = 0
        if target.compares and self._add("valid", 0):
            replaced = self._add("uninformative", 0)
            replaced += self._add("surplus", 0) if self._places else 0
        return min(target.num_started + replaced, target.max_draws)

    def _is_final(self, draw: int) -> bool:
        """Return whether a draw that is not allowed now will never be allowed."""
        target = self._target
        if not target.compares or draw >= target.max_draws or self.has_enough():
            return True
        if self._add("failed", 0):
            return True
        in_hand = target.num_started + target.num_pending
        return self._add("uninformative", 0) >= in_hand and not self._add("valid", 0)

    def _add(self, name: str, amount: int) -> int:
        return self._counters.add(f"{self._key}/{name}", amount)
