"""Who draws what: any interleaving of engines ends with the same draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.rollout.dealing import Deal, LocalCounters, Wanted

Differs = Callable[[int], bool]


def dealt(
    wanted: Wanted, num_engines: int, differs: Differs, *, seed: int, in_turn: int | None = 0
) -> list[list[int]]:
    """What each engine gets where they act in an order drawn at random, each with up to two groups
    in hand, which it finishes in any order; so many draws of each are dealt in turn."""
    counters, rng = LocalCounters(), random.Random(seed)
    deals = [
        Deal(wanted, counters, "step", turn=(number, num_engines), num_in_turn=in_turn)
        for number in range(num_engines)
    ]
    got: list[list[int]] = [[] for _ in deals]
    running: list[list[int]] = [[] for _ in deals]
    for _ in range(10_000):
        open_ones = [n for n, deal in enumerate(deals) if running[n] or not deal.is_over]
        if not open_ones:
            return got
        one = rng.choice(open_ones)
        if len(running[one]) < 2 and rng.random() < 0.6:
            if (draw := deals[one].next()) is not None:
                got[one].append(draw)
                running[one].append(draw)
        elif running[one]:
            draw = running[one].pop(rng.randrange(len(running[one])))
            deals[one].finished(differs=differs(draw), is_valid=True)
    raise AssertionError("they wait for each other")


def fewest(groups: int, most: int, differs: Differs) -> list[int]:
    """Draws until there are enough that differ."""
    draws: list[int] = []
    while sum(map(differs, draws)) < groups and len(draws) < most:
        draws.append(len(draws))
    return draws


@settings(max_examples=200, deadline=None)
@given(
    groups=st.integers(1, 12),
    max_refills=st.integers(0, 4),
    num_engines=st.integers(1, 5),
    teaches=st.lists(st.booleans(), min_size=60, max_size=60),
    seed=st.integers(0, 1000),
    in_turn=st.sampled_from([0, 1, 2, 5, None]),
)
def test_draws_are_the_fewest_with_enough_groups_that_differ(
    groups: int,
    max_refills: int,
    num_engines: int,
    teaches: Sequence[bool],
    seed: int,
    in_turn: int | None,
) -> None:
    wanted = Wanted.of(groups, max_refills=max_refills)

    def differs(draw: int) -> bool:
        return teaches[draw % 60]

    got = dealt(wanted, num_engines, differs, seed=seed, in_turn=in_turn)
    draws = sorted(draw for of_engine in got for draw in of_engine)
    assert draws == fewest(groups, groups * (1 + max_refills), differs)


def test_who_asks_first_does_not_get_what_others_begin_with() -> None:
    counters = LocalCounters()
    first, second = (
        Deal(Wanted.of(7), counters, "step", turn=(number, 2), num_in_turn=2) for number in (0, 1)
    )
    assert [first.next() for _ in range(4)] == [0, 2, 4, 5]
    assert [second.next() for _ in range(4)] == [1, 3, 6, None] and second.is_over
    assert first.next() is None and first.is_over


@pytest.mark.parametrize("num_engines", [1, 3])
def test_all_are_drawn_once_where_groups_are_not_compared(num_engines: int) -> None:
    got = dealt(Wanted.of(10), num_engines, lambda draw: False, seed=1)
    assert sorted(draw for of_engine in got for draw in of_engine) == list(range(10))


def test_in_turn_everybody_gets_the_same_whoever_is_fast() -> None:
    differs = [True, False, False, True, True, False, True, True, True, True].__getitem__
    wanted = Wanted.of(4, max_refills=2)
    found = {str(dealt(wanted, 2, differs, seed=seed, in_turn=None)) for seed in range(30)}
    assert found == {"[[0, 2, 4, 6], [1, 3, 5]]"}
    otherwise = {str(dealt(wanted, 2, differs, seed=seed)) for seed in range(30)}
    assert len(otherwise) > 1


def test_more_are_started_than_are_wanted() -> None:
    wanted = Wanted.of(4, oversample=1.5)
    assert (wanted.started, wanted.most) == (6, 6)
    counters = LocalCounters()
    deal = Deal(wanted, counters, "step")
    assert [deal.next() for _ in range(7)] == [0, 1, 2, 3, 4, 5, None] and deal.is_over
    for _ in range(3):
        deal.finished(differs=True, is_valid=True)
    assert not deal.has_enough()
    deal.finished(differs=True, is_valid=True)
    assert deal.has_enough() and deal.last == 5


def test_nothing_is_drawn_again_where_every_reward_fails() -> None:
    deal = Deal(Wanted.of(4, max_refills=8), LocalCounters(), "step")
    assert [deal.next() for _ in range(5)] == [0, 1, 2, 3, None]
    for _ in range(3):
        deal.finished(differs=False, is_valid=False)
    assert deal.next() is None and not deal.is_over  # the last may have a reward
    deal.finished(differs=False, is_valid=False)
    assert deal.next() is None and deal.is_over


def test_one_reward_that_is_there_is_enough_to_draw_again() -> None:
    deal = Deal(Wanted.of(2, max_refills=8), LocalCounters(), "step")
    assert [deal.next(), deal.next()] == [0, 1]
    deal.finished(differs=False, is_valid=False)
    assert deal.next() is None
    deal.finished(differs=False, is_valid=True)
    assert [deal.next(), deal.next(), deal.next()] == [2, 3, None]


def test_steps_do_not_meet() -> None:
    counters = LocalCounters()
    first, second = (Deal(Wanted.of(2), counters, key) for key in ("a", "b"))
    assert [first.next(), second.next(), first.next(), second.next()] == [0, 0, 1, 1]
