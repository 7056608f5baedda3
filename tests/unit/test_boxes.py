"""Boxes against the obvious reference: boolean masks over a small grid."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.model import boxes as bx
from tests.plans import covers_once

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=3)


@st.composite
def _grid(draw, max_boxes: int = 5):
    shape = tuple(draw(SHAPES))
    ranges = [
        st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda r: (min(r), max(r)))
        for n in shape
    ]
    return shape, draw(st.lists(st.tuples(*ranges), min_size=2, max_size=max_boxes))


def _counts(shape, boxes) -> np.ndarray:
    """How many of `boxes` each element of a grid of `shape` lies in."""
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[tuple(slice(*r) for r in box)] += 1
    return counts


@given(_grid())
def test_intersect_and_contains_agree_with_masks(grid):
    shape, (a, b, *_) = grid
    both = (_counts(shape, [a]) + _counts(shape, [b])) == 2
    shared = bx.intersect(a, b)
    assert np.array_equal(_counts(shape, [] if shared is None else [shared]).astype(bool), both)
    assert bx.contains(a, b) == bool(np.all(_counts(shape, [a]) >= _counts(shape, [b])))
    assert bx.volume(a) == _counts(shape, [a]).sum()


@given(_grid())
def test_subtract_is_disjoint_and_complete(grid):
    shape, (a, b, *_) = grid
    expected = np.where(_counts(shape, [b]) > 0, 0, _counts(shape, [a]))
    assert np.array_equal(_counts(shape, bx.subtract(a, b)), expected)


@given(_grid())
def test_uncovered_matches_masks(grid):
    shape, (box, *covers) = grid
    expected = np.where(_counts(shape, covers) > 0, 0, _counts(shape, [box]))
    assert np.array_equal(_counts(shape, bx.uncovered(box, covers)), expected)


@given(_grid())
def test_disjoint_covers_the_union_exactly_once(grid):
    shape, boxes = grid
    result = bx.disjoint(boxes)
    assert np.array_equal(_counts(shape, result), (_counts(shape, boxes) > 0).astype(int))
    assert bx.disjoint(reversed(boxes)) == result
    for a, b in itertools.combinations(result, 2):  # no two of them are one box
        hull = [(min(p[0], q[0]), max(p[1], q[1])) for p, q in zip(a, b, strict=True)]
        assert bx.volume(hull) > bx.volume(a) + bx.volume(b)


@given(_grid())
def test_covers_once_holds_exactly_for_a_partition(grid):
    shape, (box, *pieces) = grid
    exactly_once = np.array_equal(_counts(shape, pieces), _counts(shape, [box]))
    assert covers_once(box, pieces) == exactly_once


def test_disjoint_joins_the_shards_of_a_tensor_into_one_box():
    shards = [((r * 4, r * 4 + 4), (c * 3, c * 3 + 3)) for r in range(2) for c in range(2)]
    assert bx.disjoint(shards) == (((0, 8), (0, 6)),)


def test_relative_counts_from_the_corner():
    assert bx.relative(((5, 7), (2, 3)), ((4, 8), (2, 6))) == ((1, 3), (0, 1))
    with pytest.raises(AssertionError, match="does not lie in"):
        bx.relative(((0, 2),), ((1, 3),))


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4), st.data())
def test_a_flat_range_is_its_boxes_in_order(shape, data):
    numbers = np.arange(math.prod(shape)).reshape(shape)
    stop = data.draw(st.integers(0, numbers.size))
    start = data.draw(st.integers(0, stop))
    boxes = bx.boxes_of_flat_range(shape, start, stop)
    found = [numbers[tuple(slice(*ends) for ends in box)] for box in boxes]
    assert [n for part in found for n in part.flatten()] == list(range(start, stop))
    assert all(part.flags.c_contiguous and part.size for part in found)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_scalar_has_one_element():
    assert bx.full_box(()) == ()
    assert bx.volume(()) == 1
    assert bx.intersect((), ()) == ()
    assert bx.subtract((), ()) == []
    assert bx.disjoint([(), ()]) == ((),)
    assert bx.extent(()) == ()


def test_boxes_import_neither_torch_nor_the_hosts():
    code = (
        "import sys, mcore_rl.model.boxes\n"
        "assert not {'torch', 'vllm', 'megatron'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
