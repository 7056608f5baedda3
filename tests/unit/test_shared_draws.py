"""Draws that several TP groups share over a store; the groups are objects in one process."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch.distributed as dist

from mcore_rl.rollout.admission import Admission
from mcore_rl.rollout.shared_draws import SharedDraws, StepDecision

SIZE, NUM_STEPS = 3, 8


def members(count: int, *, next_draw: int = 0, **admission: int) -> list[SharedDraws]:
    store = dist.HashStore()
    given = {"groups_per_step": SIZE, "max_staleness": 1, **admission}
    return [
        SharedDraws(
            dist.PrefixStore("run", store),
            next_draw,
            None if member else Admission(next_draw=next_draw, **given),
        )
        for member in range(count)
    ]


def flush(group: list[SharedDraws]) -> None:
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
    running: list[tuple[SharedDraws, int]] = []
    started: dict[int, int] = {}  # draw -> version
    decisions: list[StepDecision] = []
    for version in range(1, NUM_STEPS + 1):
        flush(group)
        assert group[0].begin_step(version) == ()
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
                owner.finish(draw, is_informative=rng.random() < 0.6)
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
    first, second = SharedDraws(store, 0, admission), SharedDraws(store, 0, None)
    for version in range(1, 6):
        flush([first, second])
        first.begin_step(version)
        while (draw := second.next_draw()) is not None:
            second.start(draw, version)
            second.finish(draw, is_informative=True)
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
