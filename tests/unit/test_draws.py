"""Draws that several TP groups share over a store; the groups are objects in one process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.rollout.admission import Admission, Finished, StepDecision
from mcore_rl.rollout.draws import Draws, StepStart
from mcore_rl.rollout.group_sampler import Rules

SIZE, NUM_STEPS = 3, 8
Differs = Callable[[int], bool]
SIZES = st.lists(st.sampled_from([2, 3, 5]), min_size=1, max_size=12)


def members(count: int, *, next_draw: int = 0, **admission: int) -> list[Draws]:
    store = dist.HashStore()
    given = {"groups_per_step": SIZE, "max_staleness": 1, **admission}
    return [
        Draws(
            dist.PrefixStore("run", store),
            next_draw,
            None if member else Admission(next_draw=next_draw, **given),
        )
        for member in range(count)
    ]


def flush(group: list[Draws]) -> None:
    """As at a barrier: all have sent, then the coordinator has read."""
    for member in (*group, group[0]):
        member.flush()


@pytest.mark.parametrize("seed", range(20))
def test_every_draw_is_started_by_one_member_and_trained_once(seed: int) -> None:
    rng = random.Random(seed)
    most, next_draw = rng.randint(1, 3), rng.choice([0, 40])
    group = members(
        rng.randint(1, 4), next_draw=next_draw, max_staleness=most, max_refills=rng.randint(0, 2)
    )
    running: list[tuple[Draws, int]] = []
    started: dict[int, int] = {}  # draw -> version
    decisions: list[StepDecision] = []
    for version in range(1, NUM_STEPS + 1):
        flush(group)
        assert group[0].begin_step(version).stale == ()
        waiting = list(group)
        found = []
        while waiting:
            member = rng.choice(group)
            if rng.random() < 0.5 and (draw := member.next_draw()) is not None:
                assert draw not in started
                started[draw] = version
                member.start(draw, version)
                running.append((member, draw))
            elif running and rng.random() < 0.7:
                owner, draw = running.pop(rng.randrange(len(running)))
                owner.finish(draw, Finished(is_informative=rng.random() < 0.6))
            if rng.random() < 0.5:
                member.flush()
            member = rng.choice(waiting)
            if (decision := member.decision()) is not None:
                found.append(decision)
                waiting.remove(member)
        assert found == [found[0]] * len(group)  # the same for all
        decisions.append(found[0])
        assert len(found[0].taken) == SIZE
        assert all(version - started[draw] <= most for draw in found[0].taken)
    flush(group)
    seen = Counter(draw for each in decisions for draw in (*each.taken, *each.dropped))
    assert set(seen.values()) == {1}
    admission = group[0].admission
    assert admission is not None
    in_last = set(group[0]._dropped)  # since the last decision
    assert {*seen, *in_last, *admission.outstanding} == set(range(next_draw, admission.limit))
    assert set(started) <= set(range(next_draw, admission.limit))


def test_a_draw_above_the_limit_is_kept_for_later() -> None:
    first, second = members(2)
    assert first.next_draw() is None and second.next_draw() is None  # no step has begun
    first.begin_step(1)
    assert [first.next_draw() for _ in range(4)] == [0, 2, 3, 4]
    assert second.next_draw() == 1
    assert [second.next_draw(), first.next_draw(), second.next_draw()] == [5, None, None]


def test_decisions_leave_no_keys_behind() -> None:
    store = dist.HashStore()
    admission = Admission(groups_per_step=1, max_staleness=1, next_draw=0)
    first, second = Draws(store, 0, admission), Draws(store, 0, None)
    for version in range(1, 6):
        flush([first, second])
        first.begin_step(version)
        while (draw := second.next_draw()) is not None:
            second.start(draw, version)
            second.finish(draw, Finished(is_informative=True))
        second.flush()
        assert first.decision() == second.decision() is not None
    # Three counters and the last decision.
    assert store.num_keys() <= 4


def test_a_member_that_cannot_go_on_stops_all_until_they_begin_again() -> None:
    first, second = members(2)
    assert not first.must_stop() and not second.must_stop()
    second.stop_all()
    assert first.must_stop() and second.must_stop()
    for each in (first, second):
        each.forget_stops()
    assert not first.must_stop() and not second.must_stop()


# Engines that stop at each decision


class Step:
    """A step of engines that stop, which act in random order: each has up to two groups, which it
    finishes in any order. `sizes` are those of the draws of each block."""

    def __init__(
        self,
        rules: Rules,
        num_engines: int,
        *,
        seed: int = 0,
        sizes: Sequence[int] = (),
        num_round_robin: int = 0,
        order: Sequence[int] = (),
    ) -> None:
        self.rng, self.sizes, store = random.Random(seed), sizes, dist.HashStore()
        self.admission = Admission(
            groups_per_step=rules.groups_per_step,
            max_staleness=rules.max_staleness,
            next_draw=0,
            max_refills=rules.max_refills,
            extra_groups=rules.extra_groups,
        )
        self.members = [
            Draws(store, 0, self.admission if n == 0 else None, member=n, num_members=num_engines)
            for n in range(num_engines)
        ]
        self.start: StepStart = self.members[0].begin_step(
            1, sizes=sizes if len({*sizes}) > 1 else ()
        )
        for member in self.members:
            member.restart(
                self.start,
                order=order,
                num_round_robin=num_round_robin,
                is_last=rules.max_refills is None,
            )
        self.got: list[list[int]] = [[] for _ in self.members]
        self.running: list[list[int]] = [[] for _ in self.members]
        self.decisions: dict[int, StepDecision] = {}

    def run(self, differs: Differs, is_valid: Differs = lambda draw: True) -> StepDecision:
        for _ in range(10_000):
            waiting = [n for n in range(len(self.members)) if n not in self.decisions]
            if not waiting:
                assert len({*self.decisions.values()}) == 1
                return self.decisions[0]
            self._act(self.rng.choice(waiting), differs, is_valid)
        raise AssertionError("the engines wait for each other")

    def _act(self, number: int, differs: Differs, is_valid: Differs) -> None:
        member, running = self.members[number], self.running[number]
        if len(running) < 2 and self.rng.random() < 0.6:
            if (draw := member.next_draw()) is not None:
                self.got[number].append(draw)
                running.append(draw)
                member.start(draw, 1)
        elif running:
            draw = running.pop(self.rng.randrange(len(running)))
            size = self.sizes[draw % len(self.sizes)] if self.sizes else 0
            member.finish(draw, Finished(differs(draw), is_valid(draw), size))
        if self.rng.random() < 0.5 and (decision := member.decision()) is not None:
            self.decisions[number] = decision

    @property
    def draws(self) -> list[int]:
        return sorted(draw for of_engine in self.got for draw in of_engine)


def fewest(sizes: Sequence[int], most: int, differs: Differs) -> list[int]:
    """Return the draws until as many groups of each size differ as a block of draws has."""
    draws: list[int] = []

    def lack(size: int) -> bool:
        found = [draw for draw in draws if differs(draw) and sizes[draw % len(sizes)] == size]
        return len(found) < sizes.count(size)

    while any(map(lack, sizes)) and len(draws) < most:
        draws.append(len(draws))
    return draws


@settings(max_examples=200, deadline=None)
@given(
    sizes=SIZES,
    max_refills=st.integers(0, 4),
    num_engines=st.integers(1, 5),
    informative=st.lists(st.booleans(), min_size=60, max_size=60),
    seed=st.integers(0, 1000),
    num_round_robin=st.sampled_from([0, 1, 2]),
)
def test_draws_are_the_fewest_with_enough_groups_that_differ(
    sizes: Sequence[int],
    max_refills: int,
    num_engines: int,
    informative: Sequence[bool],
    seed: int,
    num_round_robin: int,
) -> None:
    def differs(draw: int) -> bool:
        return informative[draw % 60]

    num_round_robin = min(num_round_robin, len(sizes) // num_engines)
    rules = Rules(len(sizes), max_refills=max_refills)
    step = Step(rules, num_engines, seed=seed, sizes=sizes, num_round_robin=num_round_robin)
    decision = step.run(differs)
    assert step.draws == fewest(sizes, len(sizes) * (1 + max_refills), differs)
    taken_sizes = Counter(sizes[draw % len(sizes)] for draw in decision.taken)
    assert taken_sizes == Counter(sizes)
    # Places that remain are filled in the order of the draws.
    for size in taken_sizes:
        fits = [draw for draw in step.draws if sizes[draw % len(sizes)] == size]
        in_order = sorted(fits, key=lambda draw: (not differs(draw), draw))
        assert {*in_order[: sizes.count(size)]} <= {*decision.taken}
    assert {*decision.taken, *decision.dropped} | {
        draw for draw in step.draws if differs(draw)
    } == {*step.draws}


@settings(max_examples=100, deadline=None)
@given(
    sizes=SIZES,
    oversample=st.floats(1.1, 3.0),
    num_engines=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_oversampling_takes_groups_of_each_size(
    sizes: Sequence[int], oversample: float, num_engines: int, seed: int
) -> None:
    extra = int(len(sizes) * (oversample - 1))
    step = Step(Rules(len(sizes), extra_groups=extra), num_engines, seed=seed, sizes=sizes)
    decision = step.run(lambda draw: True)
    assert Counter(sizes[draw % len(sizes)] for draw in decision.taken) == Counter(sizes)
    for member in (*step.members, step.members[0]):
        member.flush()
    end = step.admission.end_step()
    assert {*end.dropped} == {*step.draws} - {*decision.taken}
    assert (end.started, end.pending) == (len(step.draws), 0)
    assert end.next_draw == step.draws[-1] + 1


def test_first_caller_does_not_get_the_first_draws_of_others() -> None:
    first, second = Step(Rules(7), 2, num_round_robin=2).members
    assert [first.next_draw() for _ in range(4)] == [0, 2, 4, 5]
    assert [second.next_draw() for _ in range(4)] == [1, 3, 6, None]
    assert second.is_exhausted and not first.is_exhausted
    assert first.next_draw() is None and first.is_exhausted


def test_draws_start_in_the_given_order() -> None:
    first, second = Step(Rules(6), 2, num_round_robin=2, order=(3, 0, 2, 1)).members
    assert [first.next_draw() for _ in range(3)] == [3, 2, 4]
    assert [second.next_draw() for _ in range(3)] == [0, 1, 5]


@pytest.mark.parametrize("num_engines", [1, 3])
def test_every_draw_starts_once_without_comparison(num_engines: int) -> None:
    step = Step(Rules(10), num_engines, seed=1)
    assert step.run(lambda draw: False).taken == tuple(range(10))
    assert step.draws == list(range(10))


def test_no_group_is_replaced_before_a_reward_is_valid() -> None:
    rules = Rules(4, max_refills=8)
    step = Step(rules, 2)
    step.run(lambda draw: False, lambda draw: False)
    assert step.draws == [0, 1, 2, 3]
    admission = Step(rules, 1).admission
    for draw in range(4):
        admission.start(draw, 1)
    for draw in range(3):
        admission.finish(draw, Finished(is_informative=False, is_valid=False))
    assert (admission.limit, admission.decide()) == (4, None)  # the last group may have a reward
    admission.finish(3, Finished(is_informative=False, is_valid=True))
    assert admission.limit == 8


def test_a_step_begins_after_the_draws_that_have_started() -> None:
    """Draws that may start when a step is decided are the first of the next one."""
    admission = Step(Rules(2, extra_groups=2), 1).admission
    for draw in (0, 1):
        admission.start(draw, 1)
        admission.finish(draw)
    assert admission.limit == 4
    assert admission.decide() == StepDecision((0, 1))
    assert (admission.end_step().next_draw, admission.outstanding) == (2, {})
    admission.begin_step(2, next_draw=2)
    assert (admission.limit, admission.num_unstarted) == (6, 4)


def test_what_a_decision_leaves_continues_within_the_staleness_limit() -> None:
    """The next step waits for a group that has reached the limit, not for a younger one."""
    admission = Step(Rules(2, max_staleness=1, extra_groups=2), 1).admission
    for draw in range(4):
        admission.start(draw, 1)
    for draw in (0, 1):
        admission.finish(draw)
    assert admission.decide() == StepDecision((0, 1))
    assert admission.end_step().pending == 2
    admission.begin_step(2, next_draw=4)
    for draw in (4, 5):
        admission.start(draw, 2)
        admission.finish(draw)
    assert admission.decide() is None
    admission.finish(2)
    assert admission.decide() is None
    admission.finish(3)
    assert admission.decide() == StepDecision((2, 3))


def test_a_group_at_the_staleness_limit_without_information_releases_its_place() -> None:
    step = Step(Rules(2, max_staleness=1, extra_groups=1, max_refills=3), 1)
    admission = step.admission
    for draw in range(3):
        admission.start(draw, 1)
    for draw in (0, 1):
        admission.finish(draw)
    admission.decide()
    admission.end_step()
    admission.begin_step(2, next_draw=3)
    for draw in (3, 4):
        admission.start(draw, 2)
        admission.finish(draw)
    assert admission.decide() is None
    admission.finish(2, Finished(is_informative=False))
    assert admission.decide() == StepDecision((3, 4), dropped=(2,))
