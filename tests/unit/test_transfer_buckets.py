"""Rounds of a transfer: every element once, and no rank above its share in any round."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.plan.buckets import (
    POST,
    PREPARE,
    Frame,
    cut,
    frame_of,
    make_rounds,
    place,
    slot_bytes,
    steps,
)
from mcore_rl.hybrid_engine.plan.transfer_plan import Move, Plan
from mcore_rl.hybrid_engine.transfer.transfer import TransferStats
from mcore_rl.hybrid_engine.transfer.transport import covered_seconds
from mcore_rl.model.boxes import Box, volume
from tests.plans import direct

NUM_RANKS = 5


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    starts = draw(st.lists(st.integers(0, 3), max_size=4))
    return tuple((start, start + draw(st.integers(0, 7))) for start in starts)


@settings(deadline=None)
@given(boxes(), st.integers(1, 40))
def test_cut_covers_a_box_once_in_row_major_order(box, limit):
    shape = tuple(stop for _, stop in box)
    order = np.arange(int(np.prod(shape))).reshape(shape)
    pieces = list(cut(box, limit))
    assert all(0 < volume(piece) <= limit for piece in pieces)
    elements = [order[tuple(slice(*r) for r in piece)].ravel() for piece in pieces]
    expected = order[tuple(slice(*r) for r in box)].ravel()
    assert np.array_equal(np.concatenate([*elements, expected[:0]]), expected)


def test_cut_splits_a_row_and_a_fused_expert_that_do_not_fit():
    assert len(list(cut(((0, 1), (0, 100)), 30))) == 4
    pieces = list(cut(((2, 4), (0, 6), (0, 5)), 10))
    assert len(pieces) == 6 and {volume(piece) for piece in pieces} == {10}


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, dict[str, int]]:
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=5))
    itemsizes = {f"t{i}": size for i, size in enumerate(sizes)}
    moves = []
    for tensor, itemsize in itemsizes.items():
        for _ in range(draw(st.integers(1, 4))):
            ranks = draw(
                st.lists(st.integers(0, NUM_RANKS - 1), min_size=2, max_size=4, unique=True)
            )
            box = draw(boxes())
            moves.append(Move(tensor, box, direct(ranks[0], ranks[1:]), volume(box) * itemsize))
    return Plan(tuple(moves)), itemsizes


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(plans(), st.booleans(), st.integers(0, 300))
def test_rounds_send_every_element_once_within_the_share_of_every_rank(drawn, with_delta, more):
    plan, itemsizes = drawn
    frame = frame_of(itemsizes, with_delta=with_delta)
    share = frame.total_bytes(frame.alignment) + more
    rounds = make_rounds(plan, itemsizes, slot_bytes=share, frame=frame)
    assert list(rounds) == sorted(rounds)
    sent: dict[tuple, int] = defaultdict(int)
    for number, messages in rounds.items():
        assert len({m.tree for m in messages}) == len(messages)
        held: dict[int, int] = defaultdict(int)
        for message in messages:
            for rank in message.tree.ranks:
                held[rank] += frame.total_bytes(message.num_bytes)
            end = 0
            for part in message.parts:
                assert part.offset == end and part.offset % itemsizes[part.tensor] == 0
                end += part.num_bytes
                sent[part.tensor, message.tree] += part.num_bytes
            assert end == message.num_bytes
        assert all(bytes_ <= share for bytes_ in held.values()), (number, dict(held))
    planned: dict[tuple, int] = defaultdict(int)
    for move in plan.moves:
        planned[move.tensor, move.tree] += move.num_bytes
    assert sent == {key: size for key, size in planned.items() if size}
    for rank in range(NUM_RANKS):
        mine = {
            number: own
            for number, messages in rounds.items()
            if (own := [m for m in messages if rank in m.tree.ranks])
        }
        assert mine == make_rounds(plan, itemsizes, slot_bytes=share, frame=frame, rank=rank)
        for bucket in place(mine, frame):
            assert [b.start for b in bucket[1:]] == [a.end for a in bucket[:-1]]
            assert bucket[-1].end <= share


def test_disjoint_groups_share_rounds():
    moves = [Move(f"t{i}", ((0, 8),), direct(2 * (i % 2), [2 * (i % 2) + 1]), 8) for i in range(16)]
    itemsizes = {move.tensor: 1 for move in moves}
    rounds = make_rounds(Plan(tuple(moves)), itemsizes, slot_bytes=32, frame=Frame(1, False))
    assert [sum(m.num_bytes for m in messages) for messages in rounds.values()] == [64, 64]


def test_delta_message_has_room_for_size_and_bitmap():
    frame = Frame(8, True)
    assert frame.total_bytes(5) == 8 + 8 + 8
    assert frame.front_bytes(65 * 64) == 8 + 72


@pytest.mark.parametrize(("with_delta", "smallest"), [(False, 8), (True, 72)])
def test_bucket_below_one_element_is_a_usage_error(with_delta, smallest):
    frame = frame_of({"a": 4, "b": 2}, with_delta=with_delta)
    num_slots = 3 if with_delta else 2
    assert slot_bytes(smallest, num_slots, frame) == smallest // num_slots
    with pytest.raises(UsageError, match=f"--rl-reshard-bucket-mb.* {smallest} bytes or more"):
        slot_bytes(smallest - 1, num_slots, frame)


@given(
    st.lists(st.sets(st.integers(0, 12), max_size=8).map(sorted), min_size=2, max_size=4),
    st.sampled_from([0, 1]),
)
def test_ranks_take_steps_of_shared_rounds_in_one_order(rounds_of, ahead):
    orders = []
    for rounds in rounds_of:
        taken = steps(rounds, ahead=ahead)
        assert sorted(taken) == sorted((w, b) for w in (PREPARE, POST) for b in range(len(rounds)))
        for bucket in range(len(rounds)):
            # Three buffers rotate with delta, two without.
            posted = taken.index((POST, bucket))
            prepared = [b for what, b in taken[:posted] if what == PREPARE]
            assert bucket in prepared and max(prepared) <= bucket + ahead
        orders.append([(what, rounds[bucket]) for what, bucket in taken])
    for a in orders:
        for b in orders:
            assert [step for step in a if step in b] == [step for step in b if step in a]


def test_covered_seconds_counts_overlaps_once():
    assert covered_seconds([]) == 0
    assert covered_seconds([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == 4.0


def test_hidden_share_is_relative_to_the_time_in_flight():
    assert TransferStats(in_flight_seconds=4.0, wait_seconds=1.0).hidden_share == 0.75
    assert TransferStats(in_flight_seconds=4.0, wait_seconds=4.5).hidden_share == 0.0
    assert TransferStats().hidden_share == 1.0  # nothing was sent
