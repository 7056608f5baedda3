"""Hashes of slices, the cells they are compared by, and what a watched read adds to them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.hybrid_engine.plan.cells import make_cells
from mcore_rl.hybrid_engine.proof import slice_hash as slice_hash_module
from mcore_rl.hybrid_engine.proof.attest import Attestor
from mcore_rl.hybrid_engine.proof.slice_hash import Place, Sample, tensor_key
from mcore_rl.model.boxes import Box, contains, extent, intersect, uncovered
from mcore_rl.model.tensors import TensorInfo
from tests.plans import covers_once

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8)
KEY = tensor_key("model.layers.0.mlp.experts.3.up_proj.weight", 1)


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0):
    """Random bits, so that every bit of an element is used."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


def slice_hash(
    data: torch.Tensor, box: Box, shape: tuple[int, ...], key: int, sample: Sample | None = None
) -> int:
    """The hash of `data`, which is `box` of a tensor of `shape`, 0 <= hash < 2^64."""
    assert tuple(data.shape) == extent(box)
    place = Place(box, shape, data.element_size())
    rows = place.rows(sample)
    return int(place.hash(data, key, rows, cuts=(place.index(rows),))) % 2**64


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def cut(data: torch.Tensor, box: Box) -> torch.Tensor:
    return data[tuple(slice(*r) for r in box)]


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box]]:
    """A tensor of any dtype, and boxes that cover it, from repeated cuts at random places."""
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    data = values(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        (start, stop) = box[dim]
        at = draw(st.integers(start, stop))
        for part in ((start, at), (at, stop)):
            boxes.append((*box[:dim], part, *box[dim + 1 :]))
    return data, boxes


@settings(max_examples=300, deadline=None)
@given(cut_tensors(), st.booleans(), st.integers(0, 40))
def test_hashes_of_parts_add_up_to_the_hash_of_the_whole(
    cutting: tuple[torch.Tensor, list[Box]], sampled: bool, version: int
) -> None:
    data, boxes = cutting
    shape = tuple(data.shape)
    sample = Sample("w", version, 3) if sampled else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_hash_module, "SMALL_BYTES", 0)  # sample these small tensors, too
        patch.setattr(slice_hash_module, "CHUNK_BYTES", 64)  # and in several chunks
        parts = [slice_hash(cut(data, box), box, shape, KEY, sample) for box in boxes]
        assert sum(parts) % 2**64 == slice_hash(data, whole(shape), shape, KEY, sample)


def reference(data: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """The formula of the module's docstring, element by element, in Python's integers."""
    per_lane = 8 // data.element_size()
    size = data.element_size()
    total = 0
    for row in range(data.shape[0]):
        for column in range(data.shape[1]):
            raw = bytes(data[row, column].reshape(1).view(torch.uint8).tolist())
            lane, position = divmod(box[1][0] + column, per_lane)
            bits = (b"\0" * (size * position) + raw).ljust(8, b"\0")
            low = int.from_bytes(bits[:4], "little")
            high = int.from_bytes(bits[4:], "little", signed=True)
            r, c, d = (
                slice_hash_module.mixed(
                    slice_hash_module.name_number(kind) + (KEY >> shift) % 4096 + number, 1
                )[0]
                | 1
                for kind, shift, number in (
                    ("row", 36, box[0][0] + row),
                    ("lane", 12, lane),
                    ("high", 24, lane),
                )
            )
            total += int(r) * (int(c) * (low + (high << 32)) + int(d) * high)
    return total * KEY % 2**64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_hash_matches_the_reference_formula(dtype: torch.dtype) -> None:
    shape, box = (9, 21), ((2, 6), (3, 16))
    data = cut(values(shape, dtype), box)
    expected = reference(data, box, shape)
    assert slice_hash(data, box, shape, KEY) == expected
    # However it lies in memory.
    assert slice_hash(data.t().contiguous().t(), box, shape, KEY) == expected


@settings(max_examples=100, deadline=None)
@given(cut_tensors(), st.booleans())
def test_device_hash_matches_the_host_hash(
    cutting: tuple[torch.Tensor, list[Box]], sampled: bool
) -> None:
    """Their operations, on this device: none other is here."""
    data, boxes = cutting
    sample = Sample("w", 5, 3) if sampled else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_hash_module, "SMALL_BYTES", 0)
        patch.setattr(slice_hash_module, "DEVICE_CHUNK_BYTES", 64)
        for box in boxes:
            place = Place(box, tuple(data.shape), data.element_size())
            rows = place.rows(sample)
            here = cut(data, box)[place.index(rows)]
            on_host = place.hash(here, KEY, rows)
            assert isinstance(on_host, int)
            if here.numel():
                elsewhere = place.hash_on_device(here, KEY, rows)
                assert int(elsewhere) % 2**64 == on_host


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(DTYPES), st.data())
def test_a_flipped_bit_changes_the_hash(dtype: torch.dtype, data: st.DataObject) -> None:
    shape = (5, 11)
    tensor = values(shape, dtype)
    before = slice_hash(tensor, whole(shape), shape, KEY)
    flipped = tensor.clone()
    octets = flipped.view(-1).view(torch.uint8)
    octets[data.draw(st.integers(0, len(octets) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert slice_hash(flipped, whole(shape), shape, KEY) != before


def test_flips_at_the_same_place_of_several_lanes_change_the_hash() -> None:
    """Two flips at the same place of two lanes: what one 64-bit product a lane would not see."""
    shape = (3, 16)
    zeros = torch.zeros(shape, dtype=torch.uint8)
    for bit in range(64):
        seen = set()
        for rows in ((0,), (1,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
            flipped = zeros.clone()
            for row in rows:
                flipped[row, bit // 8] = 1 << bit % 8
            seen.add(slice_hash(flipped, whole(shape), shape, KEY))
        assert len(seen) == 6 and 0 not in seen


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[[1, 0, *range(2, 8)]],
        lambda t: t[:, [1, 0, *range(2, 16)]],
        lambda t: t[:, [4, 1, 2, 3, 0, *range(5, 16)]],
        lambda t: t.roll(1, 0),
        lambda t: t.roll(1, 1),
        lambda t: t.roll(4, 1),
        lambda t: t.flip(0),
        lambda t: t.view(2, 4, 16).transpose(0, 1).reshape(8, 16),
        lambda t: -t,
    ],
    ids="rows columns lanes row_shift shift lane_shift flip interleave sign".split(),
)
def test_moved_elements_change_the_hash(change) -> None:
    shape = (8, 16)
    tensor = values(shape)
    before = slice_hash(tensor, whole(shape), shape, KEY)
    assert slice_hash(change(tensor).contiguous(), whole(shape), shape, KEY) != before


def test_key_depends_on_tensor_version_and_seed() -> None:
    keys = {
        tensor_key(name, version, seed)
        for name in ("experts.0", "experts.1")
        for version in (1, 2)
        for seed in (0, 1)
    }
    assert len(keys) == 8 and all(key % 2 == 1 for key in keys)
    # So that two exchanged experts do not cancel out in a sum over both.
    a, b = values((4, 8), seed=1), values((4, 8), seed=2)
    first, second = (tensor_key(f"experts.{i}", 1) for i in range(2))
    box = whole((4, 8))
    right = slice_hash(a, box, (4, 8), first) + slice_hash(b, box, (4, 8), second)
    wrong = slice_hash(b, box, (4, 8), first) + slice_hash(a, box, (4, 8), second)
    assert (right - wrong) % 2**64


@pytest.mark.parametrize("num_rows", [1, 16, 100])
def test_samples_cover_every_row_once_in_a_period(num_rows: int) -> None:
    seen = [row for v in range(5, 21) for row in Sample("w", v, 16).rows(0, num_rows)]
    assert sorted(seen) == list(range(num_rows))
    # A part of the range has its share of the same rows.
    sample = Sample("w", 7, 16)
    parts = [*sample.rows(0, 37), *sample.rows(37, 100)]
    assert parts == list(sample.rows(0, 100))
    assert len({Sample(f"w{i}", 7, 16).rows(0, 100) for i in range(100)}) > 10, "not all alike"


def test_sample_sees_a_change_once_in_a_period() -> None:
    shape = (96, 512)  # more than 64 KiB
    tensor = values(shape)
    changed = tensor.clone()
    changed.view(torch.int16)[41, 7] ^= 1
    different = [
        slice_hash(changed, whole(shape), shape, KEY, sample)
        != slice_hash(tensor, whole(shape), shape, KEY, sample)
        for sample in (Sample("w", version, 16) for version in range(16))
    ]
    assert sum(different) == 1
    # Small tensors are hashed whole every time.
    small, sample = (64, 512), Sample("w", 3, 16)
    changed = values(small)
    before = slice_hash(changed, whole(small), small, KEY, sample)
    for row in range(64):
        changed.view(torch.int16)[row, 0] ^= 1
        assert slice_hash(changed, whole(small), small, KEY, sample) != before


INFO = {
    "w": TensorInfo((12, 8), "bfloat16", 2),
    "norm": TensorInfo((8,), "bfloat16", 2),
    "unused": TensorInfo((4, 4), "bfloat16", 2),
}
HAVE = [
    {"w": [((0, 6), (0, 8))], "norm": [((0, 8),)], "unused": [((0, 4), (0, 4))]},
    {"w": [((6, 12), (0, 8))], "norm": [((0, 8),)]},
    {"w": [((0, 6), (0, 8))], "norm": [((0, 8),)]},
]
NEED = [
    {"w": [((0, 12), (0, 4))], "norm": [((0, 8),)]},
    {"w": [((0, 12), (4, 8))], "norm": [((0, 8),)]},
    {"w": [((3, 9), (0, 8))], "unused": []},
]


def test_cells_cover_needed_boxes_once_and_are_never_split() -> None:
    cells = make_cells(INFO, HAVE, NEED)
    assert cells.keys() == {"w", "norm"}
    assert covers_once(((0, 12), (0, 8)), [c.box for c in cells["w"]])
    for boxes in (h["w"][0] for h in (*HAVE, *NEED)):
        for cell in cells["w"]:
            assert contains(boxes, cell.box) or intersect(boxes, cell.box) is None
    for cell in (*cells["w"], *cells["norm"]):
        assert cell.owner in cell.holders
        for rank, held in enumerate(HAVE):
            assert (rank in cell.holders) == contains(held[cell.tensor][0], cell.box)
    assert sorted(c.number for group in cells.values() for c in group) == list(range(9))


def test_cells_are_spread_evenly_over_holders() -> None:
    shape = (8, 8)
    tensors = {f"w{i}": TensorInfo(shape, "bfloat16", 2) for i in range(40)}
    boxes = [{name: [whole(shape)] for name in tensors} for _ in range(4)]
    owners = [c.owner for group in make_cells(tensors, boxes, boxes).values() for c in group]
    assert [owners.count(rank) for rank in range(4)] == [10] * 4


def test_needed_slice_without_a_holder_is_refused() -> None:
    have = [{"w": [((0, 6), (0, 8))]}, {}, {}]
    with pytest.raises(RuntimeError, match=r"rank 0 needs w\[6:12, 0:4\] and no rank holds it"):
        make_cells(INFO, have, [NEED[0] | {"norm": []}, {}, {}])


@st.composite
def reads(draw: st.DrawFn) -> list[Box]:
    boxes = []
    for _ in range(draw(st.integers(1, 5))):
        rows = sorted(draw(st.tuples(st.integers(0, 12), st.integers(0, 12))))
        columns = sorted(draw(st.tuples(st.integers(0, 8), st.integers(0, 8))))
        if rows[0] < rows[1] and columns[0] < columns[1]:
            boxes.append((tuple(rows), tuple(columns)))
    return boxes


@pytest.mark.usefixtures("world_of_one")
@settings(max_examples=100, deadline=None)
@given(reads())
def test_loaded_parts_add_up_to_the_hashes_of_the_cells(boxes: list[Box]) -> None:
    data, box_of_all = values((12, 8)), whole((12, 8))
    have: list = [{"w": [((0, 6), (0, 8)), ((6, 12), (0, 8))]}]
    attestor = Attestor(INFO, have, [{"w": [box_of_all]}], mode="full")
    attestor.begin(1, cut_of(data))
    disjoint: list[Box] = []
    for box in boxes:
        disjoint += uncovered(box, disjoint)
    for box in (*disjoint, *uncovered(box_of_all, disjoint)):
        assert {m.problem[:14] for m in attestor.finish().mismatches} == {"was not loaded"}
        attestor.note("w", box, cut(data, box))
    assert attestor.finish().ok
    # An element that is loaded twice is as wrong as one that is not loaded.
    attestor.note("w", ((0, 1), (0, 1)), data[:1, :1])
    assert [m.problem for m in attestor.finish().mismatches] == [
        "was not loaded (49 of 48 elements were)"
    ]


def cut_of(data: torch.Tensor):
    return lambda tensor, box, at: cut(data, box)[at]
