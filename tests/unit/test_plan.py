"""Moves cover every needed element exactly once, from a rank that holds it."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mcore_rl.hybrid_engine.plan.transfer_plan import make_plan
from mcore_rl.hybrid_engine.plan.trees import KnownGroups, Neighbourhoods
from mcore_rl.model.boxes import contains, full_box, intersect, uncovered, volume
from mcore_rl.model.tensors import TensorInfo
from tests.plans import covers_once

ROWS, COLUMNS = 12, 8
INFO = {"w": TensorInfo((ROWS, COLUMNS), "bfloat16", 2)}


@st.composite
def partitions(draw: st.DrawFn) -> list[tuple]:
    """The tensor cut into a grid of uneven boxes."""

    def cuts(size: int) -> list[tuple[int, int]]:
        inner = draw(st.sets(st.integers(1, size - 1), max_size=3))
        edges = [0, *sorted(inner), size]
        return list(zip(edges, edges[1:], strict=False))

    columns = cuts(COLUMNS)
    return [(row, column) for row in cuts(ROWS) for column in columns]


@st.composite
def holdings(draw: st.DrawFn) -> list[dict[str, list]]:
    """Every element on at least one of 4 ranks, in boxes of one grid or of two."""
    have: list[dict[str, list]] = [{"w": []} for _ in range(4)]
    for grid in draw(st.lists(partitions(), min_size=1, max_size=2)):
        for box in grid:
            for rank in draw(st.sets(st.integers(0, 3), min_size=1)):
                if all(intersect(box, other) is None for other in have[rank]["w"]):
                    have[rank]["w"].append(box)
    return have


@settings(max_examples=300, deadline=None)
@given(holdings(), st.lists(partitions(), min_size=4, max_size=4), st.data())
def test_every_needed_element_is_covered_exactly_once(
    have: list, grids: list, data: st.DataObject
) -> None:
    assume(not uncovered(full_box((ROWS, COLUMNS)), [b for rank in have for b in rank["w"]]))
    need = [{"w": [box for box in grid if data.draw(st.booleans())]} for grid in grids]
    plan = make_plan(INFO, order=["w"], have=have, need=need)
    for move in plan.moves:
        assert any(contains(box, move.box) for box in have[move.source]["w"])
        assert move.source not in move.receivers
        assert move.num_bytes == 2 * volume(move.box)
    for rank in range(4):
        arriving = [move.box for move in plan.moves if rank in move.receivers]
        for box in need[rank]["w"]:
            parts = [intersect(box, piece) for piece in [*arriving, *have[rank]["w"]]]
            assert covers_once(box, [part for part in parts if part is not None])
        # Nothing is received that is held already or not needed.
        missing = sum(volume(box) for box in need[rank]["w"]) - sum(
            volume(part)
            for box in need[rank]["w"]
            for held in have[rank]["w"]
            if (part := intersect(box, held)) is not None
        )
        assert plan.received_bytes(rank) == 2 * missing


@pytest.mark.parametrize(("groups", "sent"), [([], [2, 1, 0, 0]), ([[range(4)]], [1, 0, 0, 0])])
def test_box_for_several_ranks_is_forwarded(groups: list, sent: list) -> None:
    whole = full_box((ROWS, COLUMNS))
    plan = make_plan(
        INFO,
        order=["w"],
        have=[{"w": [whole]}, {}, {}, {}],
        need=[{"w": [whole]}] * 4,
        groups=KnownGroups(groups),
    )
    assert [(m.source, m.receivers) for m in plan.moves] == [(0, (1, 2, 3))]
    assert [plan.sent_bytes(rank) / (2 * ROWS * COLUMNS) for rank in range(4)] == sent


@pytest.mark.parametrize(
    ("node", "pipeline", "expected"),
    [
        ((0, 1, 0, 1), (0, 1, 1, 0), [(0, (2,)), (1, (3,))]),  # the node goes before the pipeline
        ((0, 1, 2, 3), (0, 1, 1, 0), [(0, (3,)), (1, (2,))]),  # else the pipeline decides
        ((0, 0, 0, 0), (0, 1, 1, 0), [(0, (3,)), (1, (2,))]),  # as it does inside a node
    ],
)
def test_nearest_holder_is_source(node: tuple, pipeline: tuple, expected: list) -> None:
    whole = [full_box((ROWS, COLUMNS))]
    plan = make_plan(
        INFO,
        order=["w"],
        have=[{"w": whole}, {"w": whole}, {}, {}],
        need=[{}, {}, {"w": whole}, {"w": whole}],
        near=Neighbourhoods(node, pipeline),
    )
    assert sorted((m.source, m.receivers) for m in plan.moves) == expected


def test_load_is_spread_over_replicas() -> None:
    tensors = {f"w{i}": TensorInfo((ROWS, COLUMNS), "bfloat16", 2) for i in range(8)}
    whole = {name: [full_box((ROWS, COLUMNS))] for name in tensors}
    plan = make_plan(
        tensors, order=list(tensors), have=[whole] * 4 + [{}] * 2, need=[{}] * 4 + [whole] * 2
    )
    assert [plan.sent_bytes(rank) for rank in range(6)] == [4 * 2 * ROWS * COLUMNS] * 4 + [0, 0]
    assert all(len(move.receivers) == 1 for move in plan.moves), "no holder serves both"


def test_plan_does_not_depend_on_shared_mappings() -> None:
    boxes = [((0, 4), (0, 8)), ((4, 12), (0, 8))]
    shared = {"w": boxes}
    options = {"order": ["w"], "need": [shared] * 4}
    have = [{"w": boxes[:1]}, {"w": boxes[1:]}, {"w": boxes[:1]}, {"w": boxes[1:]}]
    again = [have[0], have[1], have[0], have[1]]
    own = {"order": ["w"], "need": [{"w": list(boxes)} for _ in range(4)]}
    assert make_plan(INFO, have=have, **options) == make_plan(INFO, have=again, **own)


def test_box_that_no_rank_holds_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 needs w\[0:2, 0:8\]"):
        make_plan(
            INFO,
            order=["w"],
            have=[{"w": [((2, 12), (0, 8))]}, {}],
            need=[{}, {"w": [((0, 2), (0, 8))]}],
        )
