"""SlicedTensor against the whole tensor it stands for."""

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
    """What a loader's `param.copy_(view)` stores."""
    return torch.full(view.shape, -1.0).copy_(view)


KINDS = ("narrow", "slice", "select", "transpose", "unsqueeze", "chunk")


@st.composite
def _views(draw):
    """A shape, a random chain of the view operations loaders use, and a cut into two pieces."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    steps, dims = [], list(shape)
    for _ in range(draw(st.integers(0, 5))):
        if not dims:
            break
        dim = draw(st.integers(-len(dims), len(dims) - 1))
        kind = draw(
            st.sampled_from(["narrow", "slice", "select", "transpose", "unsqueeze", "chunk"])
        )
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
def test_a_chain_of_views_reads_what_the_whole_tensor_has(case):
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
def test_what_comes_in_parts_is_stored_as_if_whole_and_told_of_once(case, swapped):
    shape, steps, cut = case
    whole = _whole(*shape)
    full = full_box(shape)
    boxes = [((0, cut), *full[1:]), ((max(cut - 1, 0), shape[0]), *full[1:])]  # overlapping
    expected = _follow(whole, steps)
    target = torch.full(expected.shape[::-1] if swapped else expected.shape, -1.0)
    target = target.permute(list(range(target.dim()))[::-1]) if swapped else target
    told = torch.zeros(shape, dtype=torch.int64)

    def on_write(name: str, box: Box, data: torch.Tensor) -> None:
        assert torch.equal(data, _cut(whole, box))
        _cut(told, box).add_(1)

    sliced = _sliced(whole, *(b for b in boxes if b[0][0] < b[0][1]))
    target.copy_(_follow(SlicedTensor.observed("w", sliced, on_write=on_write), steps))
    assert torch.equal(target, expected)
    assert (int(told.max()), int(told.sum())) == (1, expected.numel())
    again = torch.full(expected.shape, -1.0)
    for rows in ((cut, shape[0]), (0, cut)):
        boxes = [(rows, *full[1:])] if rows[0] < rows[1] else []
        part = SlicedTensor.observed("w", _sliced(whole, *boxes), partial=True)
        again.copy_(_follow(part, steps))
    assert torch.equal(again, expected)


def test_it_looks_like_the_whole_tensor():
    piece = torch.ones(2, 4, dtype=torch.bfloat16)
    sliced = SlicedTensor("w", (6, 4), torch.bfloat16, [(((2, 4), (0, 4)), piece)])
    assert (sliced.shape, sliced.dtype) == ((6, 4), torch.bfloat16)
    assert (sliced.numel(), sliced.nbytes) == (24, 48)
    assert sliced.device == torch.device("cpu")
    assert isinstance(sliced, torch.Tensor)
    sliced.shard_id = "q"  # vLLM's name mapper hangs attributes on what it is given
    assert sliced.shard_id == "q"


def test_reading_what_is_not_held_names_tensor_and_boxes():
    sliced = _sliced(_whole(8, 4), ((0, 2), (0, 4)), ((4, 6), (0, 4)))
    with pytest.raises(RuntimeError) as error:
        _stored(sliced.narrow(0, 1, 4))
    message = str(error.value)
    assert "w: [1:5, 0:4] of [8, 4] was read" in message
    assert "[2:4, 0:4] of it is not held here" in message
    assert "held: [0:2, 0:4], [4:6, 0:4]" in message


def test_reading_all_of_a_slice_raises_for_any_operation():
    sliced = _sliced(_whole(8, 4), ((0, 2), (0, 4)))
    for operation in (torch.sum, torch.clone, lambda t: t.to(torch.float64), lambda t: t + 1):
        with pytest.raises(RuntimeError, match=r"is not held here"):
            operation(sliced)


def test_one_piece_is_lent_without_a_copy():
    piece = torch.randn(4, 4)
    sliced = SlicedTensor("w", (8, 4), torch.float32, [(((4, 8), (0, 4)), piece)])
    read = sliced.narrow(0, 5, 2)._read()
    assert read.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
    assert torch.equal(read, piece[1:3])


def test_it_can_be_read_twice():
    whole = _whole(8, 4)
    view = _sliced(whole, ((0, 4), (0, 4)), ((4, 8), (0, 4))).narrow(1, 1, 2)
    assert torch.equal(_stored(view), whole[:, 1:3])
    assert torch.equal(_stored(view), whole[:, 1:3])


def test_any_other_operation_computes_on_the_data():
    whole = _whole(4, 6)
    sliced = _sliced(whole, ((0, 4), (0, 3)), ((0, 4), (3, 6)))
    assert torch.equal(sliced.repeat_interleave(2, dim=1), whole.repeat_interleave(2, dim=1))
    assert torch.equal(sliced.reshape(8, 3), whole.reshape(8, 3))
    assert torch.equal(sliced.t().reshape(24), whole.t().reshape(24))
    assert torch.equal(sliced[::2], whole[::2])
    assert torch.equal(torch.cat([sliced, sliced]), torch.cat([whole, whole]))
    assert torch.equal(sliced.t().contiguous().view(24), whole.t().contiguous().view(24))
    assert torch.equal(sliced.as_strided((2,), (6,)), whole.as_strided((2,), (6,)))
    assert sliced[3, 5].item() == 23
    target = torch.zeros(3, 4, 6)
    target[1] = sliced
    assert torch.equal(target[1], whole)


def test_an_empty_slice_needs_no_data():
    sliced = _sliced(_whole(8, 4), ((0, 2), (0, 4)))
    assert _stored(sliced.narrow(0, 8, 0)).shape == (0, 4)


def test_a_scalar_can_be_read():
    sliced = _sliced(torch.tensor(2.5), ())
    assert sliced.item() == 2.5
    assert sliced.reshape(1).tolist() == [2.5]


def test_writing_into_lent_weights_is_refused():
    sliced = _sliced(_whole(4, 4), ((0, 4), (0, 4)))
    for write in (lambda: sliced.mul_(2), lambda: sliced[0].copy_(torch.zeros(4))):
        with pytest.raises(RuntimeError, match="lends the trainer's weights"):
            write()


def test_the_counting_pass_hands_out_nothing_but_fails_early():
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


def test_recording_notes_what_is_read_and_holds_nothing():
    reads = []
    sliced = SlicedTensor.recording(
        "w", (8, 6), torch.bfloat16, lambda name, box: reads.append((name, box))
    )
    torch.empty(2, 6, dtype=torch.bfloat16, device="meta").copy_(sliced.narrow(0, 2, 2))
    torch.empty(4, 6, device="meta").copy_(sliced.chunk(2)[1].to(torch.float32))
    assert reads == [("w", ((2, 4), (0, 6))), ("w", ((4, 8), (0, 6)))]
    assert disjoint(box for _, box in reads) == (((2, 8), (0, 6)),)


def test_observed_wraps_whole_and_sliced_tensors_alike():
    whole, reads = _whole(4, 2), []
    for tensor in (whole, _sliced(whole, ((0, 4), (0, 2)))):
        observed = SlicedTensor.observed("w", tensor, on_write=lambda *of: reads.append(of[1]))
        assert torch.equal(_stored(observed.narrow(0, 1, 1)), whole[1:2])
    assert reads == [((1, 2), (0, 2))] * 2


def test_what_is_told_is_what_stands_in_the_target():
    told = []
    view = SlicedTensor.observed("w", _whole(4), on_write=lambda *of: told.append(of[2]))
    target = torch.zeros(2, 4)
    target[1].copy_(view)
    assert told[0].data_ptr() == target[1].data_ptr()
    torch.zeros(4, dtype=torch.bfloat16).copy_(view)  # a cast may lose bits: then what was given
    assert torch.equal(told[1], _whole(4))
    assert (view * 2).sum() == 12  # nor is there a target where a loader computes
    assert torch.equal(told[2], _whole(4))


def test_a_part_that_lacks_something_cannot_be_computed_with():
    part = SlicedTensor.observed("w", _sliced(_whole(4, 2), ((0, 2), (0, 2))), partial=True)
    target = torch.full((4, 2), -1.0).copy_(part)
    assert target.tolist() == [[0, 1], [2, 3], [-1, -1], [-1, -1]]
    with pytest.raises(RuntimeError, match="is not held here"):
        part + 1
    with pytest.raises(RuntimeError, match="is not held here"):
        torch.zeros(3, 4, 2).copy_(part)  # broadcast


def test_a_released_tensor_cannot_be_read():
    for partial in (False, True):
        view = SlicedTensor.observed("w", _whole(4), partial=partial)
        half = view[:2]
        view.release()
        with pytest.raises(RuntimeError, match="after the next tensor had been asked for"):
            _stored(half)


def test_recording_tells_of_tensors_that_are_computed_with():
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
def test_a_piece_that_does_not_fit_is_refused(box, piece, words):
    with pytest.raises(RuntimeError, match=words):
        SlicedTensor("w", (8, 4), torch.float32, [(box, piece)])
