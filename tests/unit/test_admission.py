"""Admission of draws and the choice of groups: exhaustive references and random runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.rollout.admission import Admission, AdmissionCounts, Finished

SEEDS = st.integers(0, 2**32 - 1).map(random.Random)


def taken(admission: Admission) -> tuple[int, ...] | None:
    """Decide, and return the draws of the step."""
    decision = admission.decide()
    return None if decision is None else decision.taken


@cache
def can_be_trained(deadlines: tuple[int, ...], step: int, size: int) -> bool:
    """Whether steps from `step` on can train all groups by their deadlines; tries everything."""
    if not deadlines:
        return True
    if min(deadlines) < step:
        return False
    everyone = range(len(deadlines))
    return any(
        can_be_trained(tuple(deadlines[i] for i in everyone if i not in chosen), step + 1, size)
        for chosen in combinations(everyone, min(size, len(deadlines)))
    )


def most_trained(deadlines: list[int], step: int, size: int) -> int:
    """The largest number of groups that can be trained by their deadlines."""
    return max(
        count
        for count in range(len(deadlines) + 1)
        if any(can_be_trained(some, step, size) for some in combinations(deadlines, count))
    )


def reference_choice(
    versions: dict[int, int], finished: Iterable[int], step: int, limit: int, most: int, size: int
) -> tuple[int, ...] | None:
    """The oldest choice of finished groups that leaves all others, and draws up to the limit that
    start now, a place by their deadlines."""
    in_order = sorted(finished, key=lambda draw: (versions[draw], draw))
    for chosen in combinations(in_order, size):
        left = [versions[draw] + most for draw in versions if draw not in chosen]
        if can_be_trained(tuple(sorted([*left, *[step + most] * limit])), step + 1, size):
            return tuple(sorted(chosen))
    return None


@given(SEEDS, st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=300)
def test_decision_is_the_oldest_of_all_possible_ones(
    rng: random.Random, size: int, most: int
) -> None:
    """`size` groups per step with a staleness of at most `most`."""
    groups = {-draw: rng.randint(9 - most, 9) for draw in range(1, rng.randint(1, 8))}
    admission = Admission(groups_per_step=size, max_staleness=most, next_draw=0, groups=groups)
    finished_early = [draw for draw in groups if rng.random() < 0.3]
    for draw in finished_early:
        assert admission.finish(draw)
    dropped = admission.begin_step(9)
    kept = {draw: version for draw, version in groups.items() if draw not in dropped}
    deadlines = sorted(version + most for version in groups.values())
    assert len(kept) == most_trained(deadlines, 9, size)
    assert can_be_trained(tuple(sorted(version + most for version in kept.values())), 9, size)
    finished = {draw for draw in finished_early if draw in kept}
    for draw in sorted(kept.keys() - finished, key=lambda draw: rng.random()):
        if rng.random() < 0.7:
            assert admission.finish(draw)
            finished.add(draw)
    # What was discarded starts again, before others.
    room = size * (most + 1) - len(kept)
    assert admission.restarted == dropped[:room]
    num_startable = admission.limit
    assert num_startable == room - len(admission.restarted)
    expected = reference_choice(kept, finished, 9, room, most, size)
    assert taken(admission) == expected
    if len(finished) == len(kept) and not room:
        assert expected is not None


class Run:
    """A run in which draws start and groups finish in any order, with its own books."""

    def __init__(
        self,
        rng: random.Random,
        *,
        size: int,
        most: int,
        refills: int | None,
        drops: bool,
        next_draw: int = 0,
    ) -> None:
        self.rng, self.size, self.most, self.refills, self.drops = rng, size, most, refills, drops
        self.admission = self._new(next_draw, {})
        self.first_draw, self.version = next_draw, 0
        self.started: dict[int, int] = {}  # version by draw, of all draws
        self.in_flight: set[int] = set()
        self.finished: dict[int, bool] = {}  # whether informative
        self.ends: dict[int, str] = {}  # what became of a draw
        self.num_refills = self.num_steps = self.num_dropped = 0
        self.deferred: set[int] = set()  # draws that have lost their group
        self.has_shrunk = False  # the bound, since the last step

    def _new(self, next_draw: int, groups: dict[int, int]) -> Admission:
        return Admission(
            groups_per_step=self.size,
            max_staleness=self.most,
            next_draw=next_draw,
            max_refills=self.refills,
            drops_stale=self.drops,
            groups=groups,
        )

    def begin_step(self) -> None:
        self.version += 1
        self.num_steps += 1
        dropped = self.admission.begin_step(self.version)
        if not self.drops and not self.has_shrunk:
            assert not dropped
        for draw in dropped:
            if self.has_shrunk:
                self.in_flight.discard(draw)
                self.finished.pop(draw, None)
                self.deferred.add(draw)
            else:
                assert self.started[draw] < self.version - self.most
                self._end(draw, "stale")
        self.has_shrunk = False
        for draw in self.admission.restarted:
            self.deferred.remove(draw)
            self.started[draw] = self.version
            self.in_flight.add(draw)

    def startable(self) -> list[int]:
        draws = range(self.first_draw, self.admission.limit)
        return [draw for draw in draws if draw not in self.started]

    def start(self) -> None:
        draw = self.rng.choice(self.startable())
        self.admission.start(draw, self.version)
        self.started[draw] = self.version
        self.in_flight.add(draw)
        assert len(self.in_flight) + len(self.finished) <= (self.most + 1) * self.size

    def finish(self) -> None:
        draw = self.rng.choice(sorted(self.in_flight))
        is_informative = self.refills is None or self.rng.random() < 0.5
        is_replaced = not is_informative and (
            self.num_refills < self.size * (self.refills or 0) * self.num_steps
        )
        assert self.admission.finish(draw, Finished(is_informative=is_informative)) != is_replaced
        if is_replaced:
            self.num_refills += 1
            self._end(draw, "uninformative")
        else:
            self.in_flight.remove(draw)
            self.finished[draw] = is_informative

    def decide(self) -> bool:
        order = sorted(
            self.finished,
            key=lambda draw: (self.started[draw], not self.finished[draw], draw),
        )
        chosen = taken(self.admission)
        if chosen is None:
            assert self.startable() or self.in_flight, "nothing can change the decision"
            return False
        assert list(chosen) == sorted(order[: self.size])
        for draw in chosen:
            assert 0 <= self.version - self.started[draw] <= self.most
            self._end(draw, "trained")
        return True

    def step(self) -> None:
        """One step, and what happens until the next."""
        self.begin_step()
        decided = False
        while not decided or self.rng.random() < 0.8:
            actions = [self.start] * bool(self.startable()) + [self.finish] * bool(self.in_flight)
            if not decided:
                decided = self.decide()
            elif not actions:
                break
            else:
                self.rng.choice(actions)()
                continue
            if actions and not decided:
                self.rng.choice(actions)()

    def resume(self) -> None:
        """Continue with another object, as after a checkpoint; draws that had not started are now
        in flight."""
        outstanding = self.admission.outstanding
        unstarted = {*self.startable(), *self.deferred}
        assert set(outstanding) == {*self.in_flight, *self.finished, *unstarted}
        self.deferred = set()
        for draw in unstarted:
            self.started[draw] = self.version + 1
            self.in_flight.add(draw)
        assert outstanding == {draw: self.started[draw] for draw in outstanding}
        self.admission = self._new(self.admission.limit, outstanding)
        self.num_refills = self.num_steps = 0
        for draw in self.finished:
            assert self.admission.finish(draw, Finished(is_informative=self.finished[draw]))

    def check_books(self) -> None:
        places = self.ends.keys() | self.in_flight | self.finished.keys() | self.deferred
        assert places == self.started.keys()
        assert not self.deferred & (self.ends.keys() | self.in_flight | self.finished.keys())
        assert not self.ends.keys() & (self.in_flight | self.finished.keys())
        admitted = set(range(self.first_draw, self.admission.limit))
        assert admitted == {*self.started, *self.startable()}

    def _end(self, draw: int, what: str) -> None:
        assert draw not in self.ends
        self.ends[draw] = what
        self.in_flight.discard(draw)
        self.finished.pop(draw, None)


@given(SEEDS, st.integers(1, 5), st.integers(0, 4), st.sampled_from([None, 0, 1, 3]), st.booleans())
@settings(max_examples=300)
def test_each_draw_is_trained_once_within_the_staleness_or_counted(
    rng: random.Random, size: int, most: int, refills: int | None, drops: bool
) -> None:
    run = Run(rng, size=size, most=most, refills=refills, drops=drops, next_draw=rng.randint(0, 99))
    for step in range(1, 13):
        run.step()
        run.check_books()
        ends = Counter(run.ends.values())
        assert ends["trained"] == step * size
        assert run.admission.counts() == AdmissionCounts(
            started=len(run.started),
            uninformative=ends["uninformative"],
            stale=ends["stale"],
            in_flight=len(run.in_flight),
            waiting=len(run.finished),
        )


@given(SEEDS, st.integers(1, 4), st.integers(0, 3), st.sampled_from([None, 2]), st.booleans())
@settings(max_examples=200)
def test_resumed_run_continues_the_same_draws(
    rng: random.Random, size: int, most: int, refills: int | None, drops: bool
) -> None:
    run = Run(rng, size=size, most=most, refills=refills, drops=drops)
    for step in range(1, 9):
        run.step()
        if rng.random() < 0.5:
            run.resume()
        run.check_books()
        assert Counter(run.ends.values())["trained"] == step * size


@given(SEEDS, st.integers(1, 4), st.integers(1, 4), st.sampled_from([None, 2]))
@settings(max_examples=200)
def test_run_that_resumes_with_another_bound_loses_no_draw(
    rng: random.Random, size: int, most: int, refills: int | None
) -> None:
    run = Run(rng, size=size, most=most, refills=refills, drops=False)
    for step in range(1, 16):
        run.step()
        if rng.random() < 0.3:
            run.most = rng.randint(1, 4)
            run.resume()
            run.has_shrunk = True
        run.check_books()
        ends = Counter(run.ends.values())
        assert ends["trained"] == step * size and not ends["stale"]
    first = min(run.in_flight | run.finished.keys() | run.deferred, default=0)
    for _ in range(2 * most + 10):
        run.step()
    assert first in run.ends, "the oldest draw is trained, even if it has started again"


class Course:
    """Steps that take turns with training in simulated seconds. Any number of groups is sampled at
    the same time, each in the seconds that `sample` returns for its draw and the step."""

    def __init__(self, size: int, most: int, sample: Callable[[int, int], float]) -> None:
        self.admission = Admission(groups_per_step=size, max_staleness=most, next_draw=0)
        self._sample = sample
        self._now, self._next_draw, self.version = 0.0, 0, 0
        self._ends: dict[int, float] = {}  # of groups in flight
        self._versions: dict[int, int] = {}
        self.staleness: list[float] = []  # of each step, mean
        self.waited: list[float] = []  # seconds of each step

    def step(self, train_seconds: float) -> None:
        self.version += 1
        assert self.admission.begin_step(self.version) == ()
        began = self._now
        self._start()
        while (chosen := taken(self.admission)) is None:
            self._pass(min(self._ends.values()))
            self._start()
        self.waited.append(self._now - began)
        ages = [self.version - self._versions.pop(draw) for draw in chosen]
        self.staleness.append(sum(ages) / len(ages))
        self._start()
        self._pass(self._now + train_seconds)

    def _start(self) -> None:
        while self._next_draw < self.admission.limit:
            draw, self._next_draw = self._next_draw, self._next_draw + 1
            self.admission.start(draw, self.version)
            self._versions[draw] = self.version
            self._ends[draw] = self._now + self._sample(draw, self.version)

    def _pass(self, until: float) -> None:
        """Let time pass, in which no draw is admitted."""
        for draw in sorted(self._ends, key=lambda draw: (self._ends[draw], draw)):
            if self._ends[draw] <= until:
                del self._ends[draw]
                self.admission.finish(draw)
        self._now = until


@pytest.mark.parametrize("most", [1, 2, 4])
def test_groups_start_one_step_ahead_where_trainers_are_slower(most: int) -> None:
    run = Course(4, most, lambda draw, version: 3.0)
    for _ in range(30):
        run.step(10.0)
    assert run.staleness[most] == most, "without a measurement groups start as early as they may"
    assert run.waited[1:] == [0.0] * 29
    assert run.staleness[2 * most + 1 :] == [1.0] * (29 - 2 * most)


def test_groups_that_take_several_steps_start_as_many_steps_ahead() -> None:
    """Each takes two and a half steps of trainers."""
    run = Course(4, 6, lambda draw, version: 25.0)
    for _ in range(60):
        run.step(10.0)
    assert run.waited[30:] == [0.0] * 30
    assert run.staleness[30:] == [3.0] * 30


def test_a_few_long_groups_start_no_others_early() -> None:
    """One of 8 groups takes three steps, within which only its deadline is."""
    run = Course(8, 4, lambda draw, version: 25.0 if draw % 8 == 0 else 3.0)
    for _ in range(60):
        run.step(10.0)
    assert run.waited[20:] == [0.0] * 40
    assert sum(run.staleness[20:]) / 40 < 1.5


def test_groups_start_as_early_as_they_may_where_engines_are_slower() -> None:
    """A group takes ten steps of trainers."""
    run = Course(4, 3, lambda draw, version: 100.0)
    for _ in range(20):
        run.step(10.0)
    assert run.staleness[3:] == [3.0] * 17
    assert run.admission.limit == 4 * (20 + 3), "all that the bound allows are admitted"


def test_groups_ahead_follow_engines_whose_speed_changes() -> None:
    """Groups take half a step, then three, then half a step again."""
    run = Course(4, 4, lambda draw, version: 28.0 if 30 <= version < 60 else 5.0)
    for _ in range(100):
        run.step(10.0)
    assert run.staleness[15:29] == [1.0] * 14
    # The first slow groups are waited for, about as long as they take: others start at once.
    assert sum(run.waited[29:60]) < 30.0 and run.waited[36:60] == [0.0] * 24
    assert max(run.staleness[45:59]) <= 4.0
    assert run.staleness[85:] == [1.0] * 15
    assert run.waited[60:] == [0.0] * 40


def admission(size: int, most: int, **options: object) -> Admission:
    options = {"next_draw": 0} | options
    return Admission(groups_per_step=size, max_staleness=most, **options)  # type: ignore[arg-type]


def started(admission: Admission, draws: Iterable[int], version: int) -> None:
    for draw in draws:
        admission.start(draw, version)


def test_limit_admits_a_step_of_groups_with_each_version() -> None:
    run = admission(2, 1, next_draw=10)
    assert run.limit == 10
    run.begin_step(5)
    assert run.limit == 14
    started(run, range(10, 14), 5)
    for draw in (12, 11, 10):
        run.finish(draw)
    assert taken(run) == (10, 11)
    assert run.limit == 14, "groups of version 5 would not all be trained by version 6"
    assert run.begin_step(6) == ()
    assert run.limit == 16


def test_decision_waits_for_a_group_at_its_deadline() -> None:
    run = admission(1, 1)
    run.begin_step(1)
    started(run, [0, 1], 1)
    run.finish(1)
    assert taken(run) == (1,), "group 0 can still be trained with version 2"
    run.begin_step(2)
    run.start(2, 2)
    run.finish(2)
    assert taken(run) is None
    run.finish(0)
    assert taken(run) == (0,)


def test_decision_waits_for_deadlines_that_would_coincide() -> None:
    """Two groups with deadlines in the next step, which trains one: one is trained now."""
    run = admission(1, 2, groups={1: 1, 2: 1}, next_draw=3)
    run.begin_step(2)
    run.start(3, 2)
    run.finish(3)
    assert taken(run) is None
    run.finish(2)
    assert taken(run) == (2,)


def test_late_groups_are_dropped_instead_of_awaited() -> None:
    run = admission(1, 1, drops_stale=True)
    run.begin_step(1)
    started(run, [0, 1], 1)
    run.finish(1)
    assert taken(run) == (1,)
    assert run.begin_step(2) == (), "group 0 could still finish in time"
    run.start(2, 2)
    run.finish(2)
    assert taken(run) == (2,)
    assert run.begin_step(3) == (0,)
    assert not run.finish(0), "it had ended before its engine knew that it was dropped"
    assert run.limit == 5, "another draw replaces it"
    assert run.counts() == AdmissionCounts(
        started=3, uninformative=0, stale=1, in_flight=0, waiting=0
    )


def test_groups_without_information_are_replaced_while_refills_are_left() -> None:
    run = admission(2, 1, max_refills=1)
    run.begin_step(1)
    started(run, range(4), 1)
    useless = Finished(is_informative=False)
    assert [run.finish(draw, useless) for draw in range(3)] == [False, False, True]
    assert run.limit == 6
    assert run.finish(3)
    started(run, [4, 5], 1)
    assert run.finish(4)
    assert taken(run) == (3, 4), "of one version, a group without information comes last"
    run.begin_step(2)
    started(run, [6, 7], 2)
    assert run.finish(6)
    run.finish(5)
    assert taken(run) == (2, 5), "but before groups of later versions"
    assert run.counts().uninformative == 2


def test_informative_or_not_has_no_effect_without_dynamic_sampling() -> None:
    run = admission(1, 1)
    run.begin_step(1)
    started(run, [0, 1], 1)
    assert run.finish(0, Finished(is_informative=False)) and run.finish(1)
    assert taken(run) == (0,)


def test_versions_of_a_lost_continuation_count_as_the_resumed_one() -> None:
    run = admission(1, 1, next_draw=2, groups={0: 7, 1: 8, 5: 9})
    run.finish(5)
    assert run.begin_step(4) == (1,), "two steps train two of three groups; 5 has finished"
    assert run.restarted == () and run.outstanding == {0: 4, 1: 5, 5: 4}
    assert taken(run) == (5,)
    assert run.begin_step(5) == () and run.restarted == (1,), "it starts again, before others"
    assert run.limit == 2
    run.finish(1)
    assert taken(run) is None, "group 0 counts as started with version 4"
    run.finish(0)
    assert taken(run) == (0,)
    for version, trained in ((6, 1), (7, 2), (8, 3)):
        run.begin_step(version)
        assert run.restarted == () and run.limit == version - 3
        run.start(version - 4, version)
        run.finish(version - 4)
        assert taken(run) == (trained,)
    run.begin_step(9)
    assert run.limit == 7, "draw 5 was trained before"
    with pytest.raises(AssertionError, match="draw 5 may not start"):
        run.start(5, 9)
    run.start(6, 9)


def test_resumed_groups_above_the_maximum_are_discarded() -> None:
    """A run that lost its last steps may have more groups than it may have at a time. Finished ones
    are kept first."""
    for drops in (False, True):
        run = admission(2, 1, drops_stale=drops, groups=dict.fromkeys(range(7), 9), next_draw=3)
        run.finish(6)
        assert run.begin_step(4) == (3, 4, 5)
        assert (run.limit, run.counts().in_flight, run.counts().waiting) == (3, 3, 1)
        assert run.counts().stale == (3 if drops else 0)
        assert run.outstanding.keys() - {0, 1, 2, 6} == (set() if drops else {3, 4, 5})


def test_wrong_order_of_calls_is_refused() -> None:
    run = admission(1, 1)
    with pytest.raises(AssertionError, match="no step has begun"):
        run.decide()
    run.begin_step(3)
    with pytest.raises(AssertionError, match="not decided"):
        run.begin_step(4)
    run.start(0, 3)
    run.finish(0)
    for wrong in (lambda: run.start(0, 3), lambda: run.start(2, 3), lambda: run.start(1, 2)):
        with pytest.raises(AssertionError):
            wrong()
    with pytest.raises(AssertionError, match="finished already"):
        run.finish(0)
    run.decide()
    with pytest.raises(AssertionError, match="not in flight"):
        run.finish(0)
    with pytest.raises(AssertionError, match="do not increase"):
        run.begin_step(3)
