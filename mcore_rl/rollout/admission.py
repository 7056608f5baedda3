"""Admission of draws, and the choice of the groups that each step trains on.

A step begins when the weights of its version are in place, and trains on N groups. With a maximum
staleness of K, a group that started with version v has the deadline v + K: the last step that may
train on it. Versions are those of consecutive steps. At version `now`, the groups in flight, the
finished groups that wait, and the draws that may start number at most

    N + A   from the beginning of the step to its decision,
    A       from the decision to the next step,

where A, the number of groups ahead, is at most N K and at least N (0 if K is 0).

Groups ahead. A group that finishes long before its step waits and becomes stale for nothing.
A = N + U is enough: if a step begins with U of the groups ahead unfinished, its N groups are among
the others. U is measured: the largest number, over recent steps, of groups that were unfinished
when the step began, plus those that finished while trainers waited for its decision. Where trainers
are slower than engines, U is small, and most groups start one step before they are trained. Where
they wait, A grows at once by at least the groups that the step lacked, up to the bound. It is the
bound while nothing is measured. No clock is involved: A depends on the order of calls alone.

Feasibility. Groups can be trained in steps s, s + 1, ..., N in each, each by its deadline, if and
only if, for every step w >= s, at most N (w - s + 1) of them have a deadline of w or earlier. In
other words: sorted by deadline, group i (from 0) has a deadline of s + i // N or later.

Choice. A step is decided once N finished groups can be chosen such that the others, finished or
not, remain feasible from now + 1 on. The N finished groups with the earliest deadlines are such a
choice if there is any. Proof by exchange: let a choice hold group g but not the finished group f,
which has an earlier deadline. With f in place of g, one group fewer remains with a deadline of at
least f's and before g's, and the other numbers stay the same, so the others remain feasible.
Repeated, this leads to the earliest deadlines. Deadlines have the order of versions.

No deadlock. When a step begins at `now`, all groups are feasible from `now` on: what is not, in the
first step of a resumed run, `begin_step` discards. Its draws start again, before others, when the
beginning of a step has room for them; this proof counts such a start as any other. By induction:
after a decision the groups left were feasible from now + 1 on. Until the next step, groups only
leave, or start with version `now` and the deadline now + K. For w >= now + K the condition holds
because there are at most N K groups in all; for earlier w such a start does not count. In the step,
new groups have the deadline now + K again, and there are at most N (K + 1) groups in all. Hence,
once all groups have finished, `decide` returns a choice: there are at least N groups, as draws fill
the room of N + A; and of x groups with a deadline of w or earlier, all but the N earliest,
max(0, x - N), are left, at most N (w - now).

Engines that stop. Engines on the trainers' ranks sample from the beginning of a step to its
decision. A is a constant then, the groups that a step starts and does not take, and no draw is
admitted between a decision and the next step. What a decision leaves continues in the next step if
K is at least 1, else it is dropped, and decisions wait for no deadline.

Refills. A group whose responses all have the same reward has no information (dynamic sampling,
DAPO, arXiv 2503.14476, section 3.2), and another draw is admitted for it, N R times per step. With
engines that stop, the refills of a step are not carried over, none is admitted before a valid
reward has arrived, and a group without information may fill a place once nothing else can. Without
groups ahead, a step therefore uses the fewest draws that contain enough groups with information,
regardless of who samples them and when they finish. If groups have different sizes, each size has
its places, and a group whose size has no place left allows one more draw, too.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AdmissionCounts:
    """The counts of a run since its start or resumption.

    Example: of 40 started groups 32 were trained, one was replaced, two are in flight and five
    wait: `AdmissionCounts(started=40, uninformative=1, stale=0, in_flight=2, waiting=5)`.
    """

    started: int  # without the groups of a resumed run
    uninformative: int  # dropped, each for one more draw: the refills
    stale: int  # dropped because of their age
    in_flight: int  # started but not finished, or resumed
    waiting: int  # finished but not trained
    reasons: Mapping[str, int] = field(default_factory=dict)  # of `uninformative`, if they have one


@dataclass(frozen=True, slots=True)
class Finished:
    """A group with all its responses and rewards.

    Example: a group filter has left it out: `Finished(False, size=8, reason="short")`.
    """

    is_informative: bool = True
    is_valid: bool = True  # any of its rewards
    size: int = 0  # samples
    reason: str = ""  # why it has no information, which is counted if it is discarded


_WITH_INFORMATION = Finished()


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The groups of a step.

    Example: `StepDecision(taken=(96, 98), dropped=(97,))`.
    """

    taken: tuple[int, ...] = ()  # draws, sorted
    # Since the last decision: groups without information that did not fill a place, sorted, and
    # with engines that do not stop, all that were discarded.
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of a step of engines that stop.

    Example: of 6 groups that a step started it dropped one, and another continues in the next:
    `StepEnd(dropped=(97,), started=6, refills=0, pending=1, next_draw=102)`.
    """

    dropped: tuple[int, ...]  # draws, sorted; without those of its `StepDecision`
    started: int
    refills: int  # of these
    pending: int
    next_draw: int


class Admission:
    """Decides which draws may start, and which finished groups each step trains on.

    In one process; does not block. The result depends only on the order of the calls. Each step is
    one `begin_step` and, after some calls of `decide`, one decision. Every draw below `limit` must
    start and finish in the end, unless `begin_step` drops it. If engines stop, each decision is
    followed by `end_step`.

    `restarted` are draws whose groups were discarded when the run resumed, and which the last
    `begin_step` has started again, sorted: their first tokens are of its version.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        next_draw: int,
        max_refills: int | None = None,
        drops_stale: bool = False,
        groups: Mapping[int, int] | None = None,
        extra_groups: int | None = None,
        stride: int = 1,
    ) -> None:
        """`next_draw` is the first draw that has never been admitted. `groups` maps the draws that
        a resumed run continues to the version that they started with; they are in flight. They may
        be at or above `next_draw`, and their versions may be those of a lost continuation.

        With `max_refills` R, groups without information are replaced by other draws, N R times per
        step that has begun; None replaces none. With `drops_stale`, decisions do not wait for
        deadlines. A group that misses its deadline is dropped, as are those of a resumed run that
        are above the maximum. `extra_groups` is A of engines that stop at each decision; None: they
        do not stop. Every `stride`-th draw is admitted here.
        """
        assert groups_per_step >= 0 and max_staleness >= 0, "not a step of groups"
        self._extra_groups, self._stride = extra_groups, stride
        self._groups_per_step, self._max_staleness = groups_per_step, max_staleness
        self._max_refills, self._drops_stale = max_refills, drops_stale
        self._versions = dict(groups or {})  # of groups in flight or waiting, by draw
        self._resumed = frozenset(self._versions)
        self._informative: dict[int, bool] = {}  # of waiting groups, by draw
        # By version, since the last `begin_step`: of all groups, and of those that wait.
        self._num_of_version: Counter[int] = Counter()
        self._num_waiting: Counter[int] = Counter()
        self._unstarted: set[int] = set()  # draws below the limit
        self._stale: set[int] = set()
        self._deferred: list[int] = []  # draws of a resumed run that start again
        self.restarted: tuple[int, ...] = ()
        self._limit = next_draw
        self._version: int | None = None
        self._is_open = False  # a step has begun and is not decided
        self._num_steps = self._num_started = self._num_uninformative = 0
        self._reasons: Counter[str] = Counter()
        # Of recent steps, the last one last: see "Groups ahead".
        self._unfinished: deque[int] = deque(maxlen=2 * max_staleness + 4)
        self._is_awaited = False  # trainers wait for the decision
        # Of the current step, if engines stop.
        self._num_groups, self._places = groups_per_step, Counter[int]()
        self._sizes: dict[int, int] = {}  # of finished groups, by draw
        self._num_ready: Counter[int] = Counter()  # of these, with information, by size
        self._replaced: dict[int, int] = {}  # sizes of groups without information, by draw
        self._refills_left = self._num_first = self._num_started_before = 0
        self._has_valid = False
        self._end_of_started = next_draw

    @property
    def limit(self) -> int:
        """Draws below this number may start, except those of `groups`, which have started.
        Increases in `begin_step`, and in `finish` if it discards a group. `end_step` lowers it to
        the draws that have started."""
        return self._limit

    @property
    def outstanding(self) -> dict[int, int]:
        """The admitted draws that are neither trained nor dropped, with the versions that they
        started with; for those that have not started, the next version.

        With `limit` as `next_draw`, these are the `groups` of a run that resumes from here.
        """
        next_version = (self._version or 0) + 1
        unstarted = sorted({*self._unstarted, *self._deferred})
        return self._versions | dict.fromkeys(unstarted, next_version)

    @property
    def num_unstarted(self) -> int:
        """The number of draws below `limit` that have never started."""
        return len(self._unstarted)

    def skip_versions(self, count: int) -> None:
        """Count `count` versions as if they were not, because no step began with them; before the
        first step of a resumed run."""
        assert self._version is None, "a step has begun"
        self._versions = {draw: version + count for draw, version in self._versions.items()}

    def begin_step(
        self,
        weight_version: int,
        *,
        num_groups: int | None = None,
        sizes: Sequence[int] = (),
        next_draw: int | None = None,
    ) -> tuple[int, ...]:
        """Begin a step with weights of this version; the previous step must be decided.

        If engines stop, a step may be another round with the same weights, take another number of
        groups, of these `sizes`, and begin at another draw.

        Returns the draws whose groups are discarded because of their age, sorted. Without
        `drops_stale` these are only groups of a resumed run that cannot all be trained in time,
        whose draws start again now or later, and groups whose deadline was skipped by a version
        without a step.
        """
        assert not self._is_open, "the previous step is not decided"
        least = 0 if self._version is None else self._version + (not self._stops)
        assert weight_version >= least, "versions do not increase"
        self._version, self._is_open = weight_version, True
        self._num_groups = self._groups_per_step if num_groups is None else num_groups
        self._limit = self._limit if next_draw is None else next_draw
        self._num_steps += 1
        # Versions of a lost continuation count as this one, the last that both have in common.
        self._versions = {draw: min(v, weight_version) for draw, v in self._versions.items()}
        late = sorted(self._late(self._versions, weight_version, waits=not self._drops_stale))
        for draw in late:
            self._remove(draw)
        if self._num_steps == 1 and not self._drops_stale:
            self._deferred = late.copy()
        else:
            self._stale |= set(late)
        self.restarted = tuple(self._deferred[: self._room])
        del self._deferred[: self._room]
        self._versions |= dict.fromkeys(self.restarted, weight_version)
        self._num_of_version = Counter(self._versions.values())
        self._num_waiting = Counter(self._versions[draw] for draw in self._informative)
        if self._stops:
            self._begin_stopping_step(sizes)
            return tuple(late)
        # The first steps train on groups that started together: how many are left says little.
        if self._num_steps > self._max_staleness + 1:
            in_flight = len(self._versions) - len(self._informative)
            self._unfinished.append(in_flight + len(self._unstarted))
        self._admit()
        return tuple(late)

    def _begin_stopping_step(self, sizes: Sequence[int]) -> None:
        """Begin a step of engines that stop, with the groups that continue."""
        self._places = Counter(sizes)
        self._has_valid, self._end_of_started = False, self._limit
        self._num_started_before = self._num_started
        self._num_first = self._admit()
        self._refills_left = self._num_groups * (self._max_refills or 0)

    def start(self, draw: int, weight_version: int) -> None:
        """Record that a draw below `limit` started. `weight_version` must be that of the last
        `begin_step`: starts are recorded before the weights change."""
        assert draw in self._unstarted, f"draw {draw} may not start, or has started"
        assert weight_version == self._version, f"draw {draw} started with other weights"
        self._unstarted.remove(draw)
        self._versions[draw] = weight_version
        self._num_of_version[weight_version] += 1
        self._num_started += 1
        self._end_of_started = max(self._end_of_started, draw + self._stride)

    def finish(self, draw: int, group: Finished = _WITH_INFORMATION) -> bool:
        """Record that a group has all its responses and rewards. Returns whether it is kept.

        A group without information is discarded, and another draw admitted, while refills are left;
        otherwise it is kept. False also for a group that `begin_step` has dropped.
        """
        if draw in self._stale:
            return False
        assert draw in self._versions, f"draw {draw} is not in flight"
        assert draw not in self._informative, f"draw {draw} has finished already"
        if self._stops:
            self._has_valid |= group.is_valid
            is_replaced = not group.is_informative and self._max_refills is not None
            self._note_finished(draw, group.size, is_replaced=is_replaced)
            self._refills_left -= self._admit(self._refills_left if self._has_valid else 0)
            return True
        max_refills = self._groups_per_step * (self._max_refills or 0) * self._num_steps
        if not group.is_informative and self._num_uninformative < max_refills:
            self._num_uninformative += 1
            self._reasons.update([group.reason] if group.reason else [])
            self._remove(draw)
            self._admit()
            return False
        self._informative[draw] = group.is_informative or self._max_refills is None
        self._num_waiting[self._versions[draw]] += 1
        if self._is_awaited and self._unfinished:
            self._unfinished[-1] += 1
            self._admit()
        return True

    def _note_finished(self, draw: int, size: int, *, is_replaced: bool) -> None:
        """Record a finished group of engines that stop."""
        if is_replaced:
            self._remove(draw)
            self._replaced[draw] = size
            return
        self._informative[draw], self._sizes[draw] = True, size
        self._num_waiting[self._versions[draw]] += 1
        self._num_ready[size] += 1

    def decide(self) -> StepDecision | None:
        """Return the groups that the step trains on, and end the step; None while other groups must
        finish first.

        Takes the oldest finished groups. Among those of one version, groups without information
        come last, then the order of draws decides.
        """
        assert self._is_open and self._version is not None, "no step has begun"
        self._is_awaited = True
        chosen = self._choice_of_stopping() if self._stops else self._choice()
        if chosen is None:
            return None
        for draw in chosen:
            if draw in self._versions:
                self._remove(draw)
        self._is_open = self._is_awaited = False
        dropped = self._replaced.keys() - {*chosen}
        self._replaced.clear()
        return StepDecision(tuple(sorted(chosen)), tuple(sorted(dropped)))

    def end_step(self) -> StepEnd:
        """End a decided step of engines that have stopped, once all that they did is recorded.
        Groups that finished after the decision without information are dropped, and with a maximum
        staleness of 0 all others; draws that have not started count as not admitted."""
        assert self._stops and not self._is_open, "engines do not stop, or the step is not decided"
        dropped = {*self._replaced} if self._max_staleness else {*self._replaced, *self._versions}
        for draw in dropped & self._versions.keys():
            self._remove(draw)
        self._replaced.clear()
        self._unstarted.clear()
        self._limit = self._end_of_started
        started = self._num_started - self._num_started_before
        refills = max(0, started - self._num_first)
        return StepEnd(tuple(sorted(dropped)), started, refills, len(self._versions), self._limit)

    def counts(self) -> AdmissionCounts:
        """Return the counts so far."""
        return AdmissionCounts(
            started=self._num_started,
            uninformative=self._num_uninformative,
            stale=len(self._stale),
            in_flight=len(self._versions) - len(self._informative),
            waiting=len(self._informative),
            reasons=dict(self._reasons),
        )

    # Internal

    @property
    def _stops(self) -> bool:
        return self._extra_groups is not None

    def _choice(self) -> list[int] | None:
        """Return the draws of a step; None: not yet."""
        assert self._version is not None
        if len(self._informative) < self._groups_per_step:
            return None
        if not self._drops_stale and not self._leaves_feasible(self._version + 1):
            return None
        return sorted(self._informative, key=self._priority)[: self._groups_per_step]

    def _choice_of_stopping(self) -> list[int] | None:
        """Return the draws of a step of engines that stop; None: not yet."""
        assert self._version is not None
        is_running = bool(self._unstarted) or len(self._versions) > len(self._informative)
        if is_running and len(self._informative) < self._num_groups:
            return None
        chosen = self._in_places(sorted(self._informative, key=self._priority), self._sizes)
        if len(chosen) == self._num_groups:
            waits = self._max_staleness > 0 and not self._drops_stale
            return None if waits and not self._leaves_feasible(self._version + 1) else chosen
        if is_running:
            return None
        return self._in_places([*chosen, *sorted(self._replaced)], self._sizes | self._replaced)

    def _in_places(self, draws: Iterable[int], sizes: Mapping[int, int]) -> list[int]:
        """Return the first of these draws for which the step has places."""
        if not self._places:
            return list(draws)[: self._num_groups]
        left, chosen = Counter(self._places), []
        for draw in draws:
            if left[sizes[draw]]:
                left[sizes[draw]] -= 1
                chosen.append(draw)
        return chosen

    def _priority(self, draw: int) -> tuple[int, int, int]:
        """Order groups by version; of one version, groups that have not finished come last."""
        is_informative = self._informative.get(draw)
        rank = 2 if is_informative is None else int(not is_informative)
        return self._versions[draw], rank, draw

    def _leaves_feasible(self, step: int) -> bool:
        """Whether all groups but the N oldest finished ones are feasible from `step` on. Counts by
        version suffice, of which there are few: this is asked whenever a group has finished."""
        num_to_choose, num_left = self._groups_per_step, 0
        for version in sorted(self._num_of_version):
            num_chosen = min(num_to_choose, self._num_waiting[version])
            num_to_choose -= num_chosen
            num_left += (left := self._num_of_version[version] - num_chosen)
            trained_in = step + (num_left - 1) // self._groups_per_step  # the last of this version
            if left and version + self._max_staleness < trained_in:
                return False
        return num_left <= self._groups_per_step * (self._max_staleness + 1)

    def _late(self, draws: Iterable[int], step: int, *, waits: bool) -> list[int]:
        """Return the fewest of these groups without which the others are feasible from `step` on.
        If no step `waits` for groups, only those whose deadline has passed, and those above the
        maximum number."""
        late: list[int] = []
        num_kept, most = 0, self._groups_per_step * (self._max_staleness + 1)
        for draw in sorted(draws, key=self._priority):
            if num_kept == most:
                late.append(draw)
                continue
            trained_in = step + num_kept // self._groups_per_step if waits else step
            if self._versions[draw] + self._max_staleness < trained_in:
                late.append(draw)
            else:
                num_kept += 1
        return late

    def _admit(self, most: float = math.inf) -> int:
        """Raise the limit while there is room for more groups, of which it admits at most `most`;
        return how many."""
        num_admitted = 0
        while self._room and num_admitted < most:
            if self._limit not in self._resumed:
                self._unstarted.add(self._limit)
                num_admitted += 1
            self._limit += self._stride
        return num_admitted

    @property
    def _room(self) -> int:
        """The number of groups that may be added."""
        if self._extra_groups is None:
            most = self._groups_ahead + self._groups_per_step * self._is_open
        else:
            surplus = sum((self._num_ready - self._places).values()) if self._places else 0
            most = (self._num_groups + self._extra_groups + surplus) * self._is_open
        return max(0, most - len(self._versions) - len(self._unstarted))

    @property
    def _groups_ahead(self) -> int:
        """The number of groups that may be left by a decision: A in the module's docstring."""
        most = self._groups_per_step * self._max_staleness
        if not self._unfinished:
            return most
        return min(most, self._groups_per_step + max(self._unfinished))

    def _remove(self, draw: int) -> None:
        version = self._versions.pop(draw)
        self._num_of_version[version] -= 1
        if self._informative.pop(draw, None) is not None:
            self._num_waiting[version] -= 1
        if (size := self._sizes.pop(draw, None)) is not None:
            self._num_ready[size] -= 1
