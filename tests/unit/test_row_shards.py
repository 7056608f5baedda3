"""Rows of parameters: any cut covers the whole, each element once and in its place."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from mcore_rl.model.boxes import Box, contains, extent, full_box, uncovered, volume
from mcore_rl.model.weight_map import (
    ShardCoordinates,
    box_of_rows,
    map_parameter,
    pieces_within,
    rows_of_flat_range,
)
from mcore_rl.model.weight_rules import Piece
from tests.megatron_parameters import SPECS, stage_parameters
from tests.model_shapes import small_shape


def cut(value: np.ndarray, box: Box) -> np.ndarray:
    return value[tuple(slice(start, stop) for start, stop in box)]


def cut_in_three(num_rows: int, draw: random.Random) -> list[tuple[int, int]]:
    edges = [0, *sorted(draw.choices(range(num_rows + 1), k=2)), num_rows]
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize("spec", ["local", "transformer_engine"])
@pytest.mark.parametrize("latent", [True, False])
def test_parts_of_ranks_cover_the_parameter(latent, spec):
    shape, draw = small_shape(num_layers=2, num_experts=4, latent=latent), random.Random(spec)
    at = ShardCoordinates(1, 2, 1, 2, 0, 1, layers=(0, 1))
    shapes = stage_parameters(shape, SPECS[spec], tp_size=2, ep_size=2, layers=(0, 1))
    num_empty = 0
    for name, local_shape in shapes.items():
        whole = map_parameter(name, local_shape, shape, at)
        parts: list[Piece] = []
        for first, last in cut_in_three(local_shape[0], draw):
            held = box_of_rows(local_shape, first, last - first)
            mine = list(pieces_within(whole, held))
            for piece in mine:
                assert contains(full_box(extent(held)), piece.local_box)
                assert extent(piece.local_box) == extent(piece.checkpoint_box)
            num_empty += not mine
            parts += mine
        for piece in whole:
            boxes = [part.checkpoint_box for part in parts if part.tensor == piece.tensor]
            assert not uncovered(piece.checkpoint_box, boxes), name
        num_elements = [sum(volume(p.checkpoint_box) for p in some) for some in (parts, whole)]
        assert num_elements[0] == num_elements[1], name
    assert num_empty > 0


def test_part_holds_the_values_of_its_box():
    """Two stacked tensors without their outer columns, read through rows 2 to 7."""
    tensors = {"a": np.arange(40).reshape(5, 8), "b": np.arange(100, 132).reshape(4, 8)}
    whole = [
        Piece("a", ((1, 5), (2, 6)), ((0, 4), (0, 4))),
        Piece("b", ((0, 4), (4, 8)), ((4, 8), (0, 4))),
    ]
    parameter = np.empty((8, 4), dtype=int)
    for piece in whole:
        cut(parameter, piece.local_box)[:] = cut(tensors[piece.tensor], piece.checkpoint_box)
    held = box_of_rows(parameter.shape, 2, 5)
    pieces = list(pieces_within(whole, held))
    assert [(p.tensor, p.checkpoint_box, p.local_box) for p in pieces] == [
        ("a", ((3, 5), (2, 6)), ((0, 2), (0, 4))),
        ("b", ((0, 3), (4, 8)), ((2, 5), (0, 4))),
    ]
    rows = cut(parameter, held)
    for piece in pieces:
        expected = cut(tensors[piece.tensor], piece.checkpoint_box)
        assert (cut(rows, piece.local_box) == expected).all()


def test_whole_parameters_are_unchanged():
    whole = [Piece("a", ((1, 5), (2, 6)), ((0, 4), (0, 4)))]
    assert list(pieces_within(whole, full_box((4, 4)))) == whole
    scalar = [Piece("s", (), ())]
    assert list(pieces_within(scalar, box_of_rows((), 0, 1))) == scalar


@pytest.mark.parametrize(
    ("shape", "flat", "rows"),
    [
        ((6, 4), (8, 20), (2, 5)),
        ((6, 4), (0, 24), (0, 6)),
        ((7,), (3, 5), (3, 5)),
        ((2, 3, 4), (12, 24), (1, 2)),
        ((6, 4), (5, 5), (0, 0)),  # empty anywhere
    ],
)
def test_flat_ranges_are_rows(shape, flat, rows):
    assert rows_of_flat_range("p", shape, *flat) == rows


@pytest.mark.parametrize("flat", [(2, 8), (4, 10)])
def test_flat_range_within_a_row_is_refused(flat):
    with pytest.raises(RuntimeError, match=r"layers\.0\.p: .* \[6, 4\], expected whole rows of 4"):
        rows_of_flat_range("layers.0.p", (6, 4), *flat)
