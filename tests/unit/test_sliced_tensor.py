"""SlicedTensor compared with the whole tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.hybrid_engine.vllm.sliced_tensor import SlicedTensor
from mcore_rl.model.boxes import Box, disjoint, full_box


def _whole(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(*r) for r in box)]


def _sliced(whole: torch.Tensor, *boxes: Box) -> SlicedTensor:
    pieces = [(box, _cut(whole, box).clone()) for box in boxes]
    return SlicedTensor("w", whole.shape, whole.dtype, pieces)


def _stored(view: torch.Tensor) -> torch.Tensor:
    """The values that a loader's `param.copy_(view)` stores."""
    return torch.full(view.shape, -1.0).copy_(view)


KINDS = ("narrow", "slice", "select", "transpose", "unsqueeze", "chunk")


@st.composite
def _views(draw):
    """A shape, a random chain of loaders' view operations, and a cut into two pieces."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    steps, dims = [], list(shape)
    for _ in range(draw(st.integers(0, 5))):
        if not dims:
            break
        dim = draw(st.integers(-len(dims), len(dims) - 1))
        kind = draw(st.sampled_from(KINDS))
        if kind in ("narrow", "slice"):
            start = draw(st.integers(0, dims[dim] - 1))
            length = draw(st.integers(1, dims[dim] - start))
            steps.append((kind, dim, start, length))
            dims[dim] = length
        elif kind == "select":
            steps.append((kind, dim, draw(st.integers(-dims[dim], dims[dim] - 1))))
            dims.pop(dim)
        elif kind == "transpose":
            other = draw(st.integers(-len(dims), len(dims) - 1))
            steps.append((kind, dim, other))
            dims[dim], dims[other] = dims[other], dims[dim]
        elif kind == "unsqueeze":
            steps.append((kind, dim))
            dims.insert(dim % (len(dims) + 1), 1)
        else:
            steps.append((kind, 2, dim))
            dims[dim] = -(-dims[dim] // 2)
    return tuple(shape), steps, draw(st.integers(0, shape[0]))


def _follow(tensor: torch.Tensor, steps) -> torch.Tensor:
    for kind, *arguments in steps:
        if kind == "slice":
            dim, start, length = arguments
            index = [slice(None)] * tensor.dim()
            index[dim] = slice(start, start + length)
            tensor = tensor[tuple(index)]
        else:
            tensor = getattr(tensor, kind)(*arguments)
            tensor = tensor[0] if kind == "chunk" else tensor
    return tensor


@settings(deadline=None)
@given(_views())
def test_chain_of_views_reads_the_same_as_the_whole_tensor(case):
    shape, steps, cut = case
    whole = _whole(*shape)
    full = full_box(shape)
    pieces = [((0, cut), *full[1:]), ((cut, shape[0]), *full[1:])]
    sliced = _sliced(whole, *(p for p in pieces if p[0][0] < p[0][1]))
    expected, view = _follow(whole, steps), _follow(sliced, steps)
    assert isinstance(view, SlicedTensor)
    assert view.shape == expected.shape
    assert torch.equal(_stored(view), expected)


@settings(deadline=None)
@given(_views(), st.booleans())
def test_parts_are_stored_as_the_whole_and_reported_once(case, swapped):
    shape, steps, cut = case
    whole = _whole(*shape)
    full = full_box(shape)
    boxes = [((0, cut), *full[1:]), ((max(cut - 1, 0), shape[0]), *full[1:])]  # overlapping
    expected = _follow(whole, steps)
    target = torch.full(expected.shape[::-1] if swapped else expected.shape, -1.0)
    target = target.permute(list(range(target.dim()))[::-1]) if swapped else target
    reported = torch.zeros(shape, dtype=torch.int64)

    def on_write(name: str, box: Box, data: torch.Tensor) -> None:
        assert torch.equal(data, _cut(whole, box))
        _cut(reported, box).add_(1)

    sliced = _sliced(whole, *(b for b in boxes if b[0][0] < b[0][1]))
    target.copy_(_follow(SlicedTensor.observed("w", sliced, on_write=on_write), steps))
    assert torch.equal(target, expected)
    assert (int(reported.max()), int(reported.sum())) == (1, expected.numel())
    again = torch.full(expected.shape, -1.0)
    for rows in ((cut, shape[0]), (0, cut)):
        boxes = [(rows, *full[1:])] if rows[0] < rows[1] else []
        part = SlicedTensor.observed("w", _sliced(whole, *boxes), partial=True)
        again.copy_(_follow(part, steps))
    assert torch.equal(again, expected)


def test_sliced_tensor_has_the_attributes_of_the_whole():
    piece = torch.ones(2, 4, dtype=torch.bfloat16)
    sliced = SlicedTensor("w", (6, 4), torch.bfloat16, [(((2, 4), (0, 4)), piece)])
    assert (sliced.shape, sliced.dtype) == ((6, 4), torch.bfloat16)
    assert (sliced.numel(), sliced.nbytes) == (24, 48)
    assert sliced.device == torch.device("cpu")
    assert isinstance(sliced, torch.Tensor)
    sliced.shard_id = "q"  # vLLM's name mapper sets attributes
    assert sliced.shard_id == "q"


def test_read_of_missing_data_names_tensor_and_boxes():
    sliced = _sliced(_whole(8, 4), ((0, 2), (0, 4)), ((4, 6), (0, 4)))
    with pytest.raises(RuntimeError) as error:
        _stored(sliced.narrow(0, 1, 4))
    message = str(error.value)
    assert "w: [1:5, 0:4] of [8, 4] was read" in message
    assert "[2:4, 0:4] of it is not held here" in message
    assert "held: [0:2, 0:4], [4:6, 0:4]" in message


def test_any_operation_on_missing_data_raises():
    sliced = _sliced(_whole(8, 4), ((0, 2), (0, 4)))
    for operation in (torch.sum, torch.clone, lambda t: t.to(torch.float64), lambda t: t + 1):
        with pytest.raises(RuntimeError, match=r"is not held here"):
            operation(sliced)


def test_single_piece_is_read_without_a_copy():
    piece = torch.randn(4, 4)
    sliced = SlicedTensor("w", (8, 4), torch.float32, [(((4, 8), (0, 4)), piece)])
    read = sliced.narrow(0, 5, 2)._read()
    assert read.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
    assert torch.equal(read, piece[1:3])


def test_other_operations_compute_on_the_data():
    whole = _whole(4, 6)
    sliced = _sliced(whole, ((0, 4), (0, 3)), ((0, 4), (3, 6)))
    for operation in (
        lambda t: t.repeat_interleave(2, dim=1),
        lambda t: t.reshape(8, 3),
        lambda t: t.t().reshape(24),
        lambda t: t[::2],
        lambda t: torch.cat([t, t]),
        lambda t: t.t().contiguous().view(24),
        lambda t: t.as_strided((2,), (6,)),
    ):
        assert torch.equal(operation(sliced), operation(whole))
        assert torch.equal(operation(sliced), operation(whole))  # it can be read twice
    assert sliced[3, 5].item() == 23
    target = torch.zeros(3, 4, 6)
    target[1] = sliced
    assert torch.equal(target[1], whole)


def test_empty_slices_and_scalars_can_be_read():
    sliced = _sliced(_whole(8, 4), ((0, 2), (0, 4)))
    assert _stored(sliced.narrow(0, 8, 0)).shape == (0, 4)
    scalar = _sliced(torch.tensor(2.5), ())
    assert scalar.item() == 2.5 and scalar.reshape(1).tolist() == [2.5]


def test_writes_into_the_trainers_weights_are_refused():
    sliced = _sliced(_whole(4, 4), ((0, 4), (0, 4)))
    for write in (lambda: sliced.mul_(2), lambda: sliced[0].copy_(torch.zeros(4))):
        with pytest.raises(RuntimeError, match="lends the trainer's weights"):
            write()


def test_meta_pass_reports_no_write_but_fails_on_missing_data():
    reads = []
    sliced = SlicedTensor.observed(
        "w", _sliced(_whole(8, 4), ((0, 4), (0, 4))), on_write=lambda *of: reads.append(of[1])
    )
    torch.empty(2, 4, device="meta").copy_(sliced.narrow(0, 2, 2))
    assert reads == []
    with pytest.raises(RuntimeError, match="is not held here"):
        torch.empty(2, 4, device="meta").copy_(sliced.narrow(0, 4, 2))
    _stored(sliced.narrow(0, 2, 2))
    assert reads == [((2, 4), (0, 4))]


def test_recording_lists_the_boxes_that_are_read():
    reads = []
    sliced = SlicedTensor.recording(
        "w", (8, 6), torch.bfloat16, lambda name, box: reads.append((name, box))
    )
    torch.empty(2, 6, dtype=torch.bfloat16, device="meta").copy_(sliced.narrow(0, 2, 2))
    torch.empty(4, 6, device="meta").copy_(sliced.chunk(2)[1].to(torch.float32))
    assert reads == [("w", ((2, 4), (0, 6))), ("w", ((4, 8), (0, 6)))]
    assert disjoint(box for _, box in reads) == (((2, 8), (0, 6)),)


def test_observed_wraps_whole_and_sliced_tensors():
    whole, reads = _whole(4, 2), []
    for tensor in (whole, _sliced(whole, ((0, 4), (0, 2)))):
        observed = SlicedTensor.observed("w", tensor, on_write=lambda *of: reads.append(of[1]))
        assert torch.equal(_stored(observed.narrow(0, 1, 1)), whole[1:2])
    assert reads == [((1, 2), (0, 2))] * 2


def test_reported_data_is_that_of_the_target():
    reported = []
    view = SlicedTensor.observed("w", _whole(4), on_write=lambda *of: reported.append(of[2]))
    target = torch.zeros(2, 4)
    target[1].copy_(view)
    assert reported[0].data_ptr() == target[1].data_ptr()
    torch.zeros(4, dtype=torch.bfloat16).copy_(view)  # a cast may lose bits: the source is reported
    assert torch.equal(reported[1], _whole(4))
    assert (view * 2).sum() == 12  # a computation has no target
    assert torch.equal(reported[2], _whole(4))


def test_incomplete_part_cannot_be_computed_with():
    part = SlicedTensor.observed("w", _sliced(_whole(4, 2), ((0, 2), (0, 2))), partial=True)
    target = torch.full((4, 2), -1.0).copy_(part)
    assert target.tolist() == [[0, 1], [2, 3], [-1, -1], [-1, -1]]
    with pytest.raises(RuntimeError, match="is not held here"):
        part + 1
    with pytest.raises(RuntimeError, match="is not held here"):
        torch.zeros(3, 4, 2).copy_(part)  # broadcast


def test_released_tensor_cannot_be_read():
    for partial in (False, True):
        view = SlicedTensor.observed("w", _whole(4), partial=partial)
        half = view[:2]
        view.release()
        with pytest.raises(RuntimeError, match="after the next tensor had been requested"):
            _stored(half)


def test_recording_lists_tensors_used_in_computations():
    computed = []
    meta = torch.empty(4, 2, device="meta")
    copied = SlicedTensor.recording("a", (8, 2), torch.float32, lambda *_: None, computed.append)
    meta.copy_(copied[4:])
    assert computed == []
    meta.copy_(copied[4:] * 2)
    torch.empty(3, 8, 2, device="meta").copy_(copied)
    assert computed == ["a", "a"]


@pytest.mark.parametrize(
    ("box", "piece", "words"),
    [
        (((0, 9), (0, 4)), torch.zeros(9, 4), "reaches outside"),
        (((0, 2), (0, 4)), torch.zeros(3, 4), r"is \[3, 4\]"),
        (((0, 2), (0, 4)), torch.zeros(2, 4).bfloat16(), "torch.bfloat16"),
    ],
)
def test_mismatched_piece_is_refused(box, piece, words):
    with pytest.raises(RuntimeError, match=words):
        SlicedTensor("w", (8, 4), torch.float32, [(box, piece)])
