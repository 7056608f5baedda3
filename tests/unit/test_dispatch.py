"""Assignment of draws to engines: any interleaving of engines ends with the same draws."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.rollout.dispatch import Dispatcher, LocalCounters, SamplingTarget

Differs = Callable[[int], bool]
SIZES = st.lists(st.sampled_from([2, 3, 5]), min_size=1, max_size=12)


def dispatched(
    target: SamplingTarget,
    num_engines: int,
    differs: Differs,
    *,
    seed: int,
    num_round_robin: int | None = 0,
    sizes: Sequence[int] = (),
) -> list[list[int]]:
    """Return each engine's draws. Engines act in random order, each with up to two groups,
    which it finishes in any order. `sizes` are those of the draws of each block."""
    counters, rng = LocalCounters(), random.Random(seed)
    dispatchers = [
        Dispatcher(
            target,
            counters,
            "step",
            round_robin=(number, num_engines),
            num_round_robin=num_round_robin,
            places=Counter(sizes),
        )
        for number in range(num_engines)
    ]
    got: list[list[int]] = [[] for _ in dispatchers]
    running: list[list[int]] = [[] for _ in dispatchers]
    for _ in range(10_000):
        active = [n for n in range(num_engines) if running[n] or not dispatchers[n].is_exhausted]
        if not active:
            return got
        engine = rng.choice(active)
        if len(running[engine]) < 2 and rng.random() < 0.6:
            if (draw := dispatchers[engine].next_draw()) is not None:
                got[engine].append(draw)
                running[engine].append(draw)
        elif running[engine]:
            draw = running[engine].pop(rng.randrange(len(running[engine])))
            size = sizes[draw % len(sizes)] if sizes else 0
            dispatchers[engine].record_group(size=size, differs=differs(draw), is_valid=True)
    raise AssertionError("the engines wait for each other")


def next_draws(dispatcher: Dispatcher, count: int) -> list[int | None]:
    return [dispatcher.next_draw() for _ in range(count)]


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
    num_round_robin=st.sampled_from([0, 1, 2, 5, None]),
)
def test_draws_are_the_fewest_with_enough_groups_that_differ(
    sizes: Sequence[int],
    max_refills: int,
    num_engines: int,
    informative: Sequence[bool],
    seed: int,
    num_round_robin: int | None,
) -> None:
    target = SamplingTarget.of(len(sizes), max_refills=max_refills)

    def differs(draw: int) -> bool:
        return informative[draw % 60]

    got = dispatched(
        target,
        num_engines,
        differs,
        seed=seed,
        num_round_robin=num_round_robin,
        sizes=sizes if len(set(sizes)) > 1 else (),
    )
    draws = sorted(draw for of_engine in got for draw in of_engine)
    assert draws == fewest(sizes, len(sizes) * (1 + max_refills), differs)


@settings(max_examples=100, deadline=None)
@given(
    sizes=SIZES,
    oversample=st.floats(1.1, 3.0),
    num_parts=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_oversampling_takes_the_first_groups_of_each_size(
    sizes: Sequence[int], oversample: float, num_parts: int, seed: int
) -> None:
    """Also if each of several dispatchers has a part of the target, and every n-th draw."""
    rng, taken = random.Random(seed), []
    whole = SamplingTarget.of(len(sizes), oversample=oversample)
    for part in range(num_parts):
        dispatcher = Dispatcher(
            whole.share(part, num_parts),
            LocalCounters(),
            "step",
            numbering=(part, num_parts),
            places=Counter(sizes[part::num_parts]),
        )
        running = []
        while (draw := dispatcher.next_draw()) is not None:
            running.append(draw)
        for draw in rng.sample(running, len(running)):
            if dispatcher.has_enough():
                break
            size = sizes[draw % len(sizes)]
            if dispatcher.record_group(size=size) <= dispatcher.places(size):
                taken.append(size)
        assert dispatcher.has_enough()
    assert Counter(taken) == Counter(sizes)


def test_first_caller_does_not_get_the_first_draws_of_others() -> None:
    counters = LocalCounters()
    first, second = (
        Dispatcher(
            SamplingTarget.of(7), counters, "step", round_robin=(number, 2), num_round_robin=2
        )
        for number in (0, 1)
    )
    assert next_draws(first, 4) == [0, 2, 4, 5]
    assert next_draws(second, 4) == [1, 3, 6, None]
    assert next_draws(first, 1) == [None]
    assert first.is_exhausted and second.is_exhausted


@pytest.mark.parametrize("num_engines", [1, 3])
def test_every_draw_is_dispatched_once_without_comparison(num_engines: int) -> None:
    got = dispatched(SamplingTarget.of(10), num_engines, lambda draw: False, seed=1)
    assert sorted(draw for of_engine in got for draw in of_engine) == list(range(10))


def test_round_robin_assignment_does_not_depend_on_speed() -> None:
    differs = [True, False, False, True, True, False, True, True, True, True].__getitem__
    target = SamplingTarget.of(4, max_refills=2)
    found = {
        str(dispatched(target, 2, differs, seed=seed, num_round_robin=None)) for seed in range(30)
    }
    assert found == {"[[0, 2, 4, 6], [1, 3, 5]]"}
    otherwise = {str(dispatched(target, 2, differs, seed=seed)) for seed in range(30)}
    assert len(otherwise) > 1


def test_oversampling_starts_more_groups_than_it_takes() -> None:
    target = SamplingTarget.of(4, oversample=1.5)
    assert (target.num_started, target.max_draws) == (6, 6)
    dispatcher = Dispatcher(target, LocalCounters(), "step")
    assert next_draws(dispatcher, 7) == [0, 1, 2, 3, 4, 5, None]
    assert dispatcher.is_exhausted
    for _ in range(3):
        dispatcher.record_group(differs=True, is_valid=True)
    assert not dispatcher.has_enough()
    dispatcher.record_group(differs=True, is_valid=True)
    assert dispatcher.has_enough()


def test_no_group_is_replaced_when_every_reward_fails() -> None:
    dispatcher = Dispatcher(SamplingTarget.of(4, max_refills=8), LocalCounters(), "step")
    assert next_draws(dispatcher, 5) == [0, 1, 2, 3, None]
    for _ in range(3):
        dispatcher.record_group(differs=False, is_valid=False)
    assert next_draws(dispatcher, 1) == [None]
    assert not dispatcher.is_exhausted  # the last group may have a reward
    dispatcher.record_group(differs=False, is_valid=False)
    assert next_draws(dispatcher, 1) == [None]
    assert dispatcher.is_exhausted


def test_one_valid_reward_allows_replacements() -> None:
    dispatcher = Dispatcher(SamplingTarget.of(2, max_refills=8), LocalCounters(), "step")
    assert next_draws(dispatcher, 2) == [0, 1]
    dispatcher.record_group(differs=False, is_valid=False)
    assert next_draws(dispatcher, 1) == [None]
    dispatcher.record_group(differs=False, is_valid=True)
    assert next_draws(dispatcher, 3) == [2, 3, None]


def test_steps_have_separate_counters() -> None:
    counters = LocalCounters()
    first, second = (Dispatcher(SamplingTarget.of(2), counters, key) for key in ("a", "b"))
    assert [next_draws(each, 1) for each in (first, second, first, second)] == [[0], [0], [1], [1]]
