"""A checkpoint tensor of which this rank holds only slices, for loaders that expect all of it.

vLLM's weight loaders take whole checkpoint tensors and cut out what their rank stores. A
`SlicedTensor` has the full tensor's shape and dtype, follows the cutting (slice, narrow, select,
chunk, transpose, ...) as arithmetic on boxes, and hands out data only when a loader finally reads:
from the pieces it holds, or not at all. So no rank ever needs a full tensor, and a read outside the
pieces is an error instead of a wrong weight.

The same class without data records what a loader would read (see `needs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from mcore_rl.hybrid_engine.boxes import (
    Box,
    contains,
    extent,
    full_box,
    intersect,
    relative,
    show,
    uncovered,
    volume,
)

ReadObserver = Callable[[str, Box], None]
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """The checkpoint tensor behind all views of it; `pieces` is None where only reads are noted."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Box, torch.Tensor], ...] | None
    on_read: ReadObserver | None

    def read(self, box: Box) -> torch.Tensor:
        """The elements of `box`: a view where one piece holds them all, else put together."""
        self.require(box)
        if volume(box) == 0:
            return torch.empty(extent(box), dtype=self.dtype, device=self.device)
        if self.on_read is not None:
            self.on_read(self.name, box)
        if self.pieces is None:
            return torch.empty(extent(box), dtype=self.dtype, device="meta")
        for held, data in self.pieces:
            if contains(held, box):
                return _cut(data, relative(box, held))
        result = torch.empty(extent(box), dtype=self.dtype, device=self.device)
        for held, data in self.pieces:
            shared = intersect(held, box)
            if shared is not None:
                _cut(result, relative(shared, box)).copy_(_cut(data, relative(shared, held)))
        return result

    @property
    def device(self) -> torch.device:
        return self.pieces[0][1].device if self.pieces else torch.device("cpu")

    def require(self, box: Box) -> None:
        """Raise RuntimeError unless every element of `box` is held."""
        if self.pieces is None:
            return
        missing = uncovered(box, [held for held, _ in self.pieces])
        if missing:
            held = ", ".join(show(held) for held, _ in self.pieces) or "nothing"
            raise RuntimeError(
                f"{self.name}: {show(box)} of {list(self.shape)} was read, {show(missing[0])} of "
                f"it is not held here; held: {held}"
            )


class SlicedTensor(torch.Tensor):
    """Stand-in for the checkpoint tensor `name` of `shape` and `dtype`, made of `pieces`.

    `pieces` are (box, tensor) pairs: the tensor has the box's extent and holds those elements. They
    may overlap, need not cover the tensor, and must stay unchanged for as long as the stand-in or
    a view of it lives: vLLM's layerwise reload keeps them until the layer is complete, and reads
    them then. Reading what no piece holds raises RuntimeError; so does writing.

    `on_read(name, box)` is called whenever data is handed out. A copy into a meta tensor, by which
    layerwise reload counts elements before it loads, hands out none.

    `SlicedTensor.recording` has no pieces: any box may be read, `on_read` hears of each, and the
    data are meta tensors.
    """

    _source: _Source
    _box: Box  # what this view shows of the source
    _dims: tuple[
        int | None, ...
    ]  # dimension of the source behind each of the view's; None: unsqueezed

    @staticmethod
    def __new__(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        pieces: Sequence[tuple[Box, torch.Tensor]],
        on_read: ReadObserver | None = None,
    ) -> SlicedTensor:
        shape = tuple(shape)
        for box, data in pieces:
            if not contains(full_box(shape), box):
                raise RuntimeError(f"{name}: piece {show(box)} reaches outside {list(shape)}")
            if tuple(data.shape) != extent(box) or data.dtype != dtype:
                raise RuntimeError(
                    f"{name}: piece {show(box)} of {dtype} is {list(data.shape)} of {data.dtype}"
                )
        return cls._view(
            _Source(name, shape, dtype, tuple(pieces), on_read),
            full_box(shape),
            tuple(range(len(shape))),
        )

    @classmethod
    def recording(
        cls, name: str, shape: Sequence[int], dtype: torch.dtype, on_read: ReadObserver
    ) -> SlicedTensor:
        """A stand-in that holds no data and tells `on_read` what is read of it."""
        shape = tuple(shape)
        source = _Source(name, shape, dtype, None, on_read)
        return cls._view(source, full_box(shape), tuple(range(len(shape))))

    @classmethod
    def observed(cls, name: str, tensor: torch.Tensor, on_read: ReadObserver) -> SlicedTensor:
        """`tensor`, whole or already a SlicedTensor, such that `on_read` hears of its reads."""
        if isinstance(tensor, SlicedTensor):
            assert tensor._source.pieces is not None, f"{name} has no data to load"
            return cls(name, tensor.shape, tensor.dtype, tensor._source.pieces, on_read)
        return cls(name, tensor.shape, tensor.dtype, [(full_box(tensor.shape), tensor)], on_read)

    @classmethod
    def _view(cls, source: _Source, box: Box, dims: tuple[int | None, ...]) -> SlicedTensor:
        sizes = extent(box)
        view = torch.Tensor._make_wrapper_subclass(
            cls,
            [1 if dim is None else sizes[dim] for dim in dims],
            dtype=source.dtype,
            device=source.device,
        )
        view._source, view._box, view._dims = source, box, dims
        return view

    def _read(self) -> torch.Tensor:
        """This view's elements as a plain tensor."""
        data = self._source.read(self._box)
        kept = [dim for dim in self._dims if dim is not None]
        dropped = [dim for dim in range(data.dim()) if dim not in kept]  # of extent 1: selected
        data = data.permute([*kept, *dropped])
        data = data[(...,) + (0,) * len(dropped)] if dropped else data
        for position, dim in enumerate(self._dims):
            if dim is None:
                data = data.unsqueeze(position)
        return data

    def __repr__(self) -> str:
        source = self._source
        return f"SlicedTensor({source.name}{show(self._box)} of {list(source.shape)}, {self.dtype})"

    # Views go through __torch_dispatch__; __torch_function__ would wrap plain results again.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        follow = _FOLLOWED.get(func)
        if follow is not None:
            result = follow(*args, **kwargs)
            if result is not None:
                return result
        if func is _aten.copy_.default and args[0].is_meta and not isinstance(args[0], cls):
            args[1]._count()
            return args[0]
        _refuse_writes(func, args, kwargs)
        prepare = _contiguous if func in _LAYOUT_SENSITIVE else _plain
        return func(*tree_map(prepare, args), **tree_map(prepare, kwargs))

    def _count(self) -> None:
        """What a copy into a meta tensor does: fail early, but hand out nothing."""
        self._source.require(self._box)
        if self._source.pieces is None:
            self._source.read(self._box)

    def _with_range(self, dim: int, start: int, length: int) -> SlicedTensor | None:
        """This view with `length` elements from `start` along its dimension `dim`."""
        of_source = self._dims[dim]
        if of_source is None:
            return _same(self) if (start, length) == (0, 1) else None
        origin = self._box[of_source][0]
        cut = (origin + start, origin + start + length)
        box = (*self._box[:of_source], cut, *self._box[of_source + 1 :])
        return self._view(self._source, box, self._dims)


def _cut(data: torch.Tensor, box: Box) -> torch.Tensor:
    return data[tuple(slice(start, stop) for start, stop in box)]


def _plain(value: Any) -> Any:
    return value._read() if isinstance(value, SlicedTensor) else value


def _contiguous(value: Any) -> Any:
    # Not `contiguous`: `as_strided` also looks at the storage around a view.
    return value._read().clone(memory_format=torch.contiguous_format) if _is_ours(value) else value


def _is_ours(value: Any) -> bool:
    return isinstance(value, SlicedTensor)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and _is_ours(value):
            raise RuntimeError(f"{func} writes into {value!r}, which lends the trainer's weights")
    out = kwargs.get("out")
    if _is_ours(out):
        raise RuntimeError(f"{func} writes into {out!r}, which lends the trainer's weights")


# What follows an operation returns the view it makes, or None where it is no view of a box.
_View = SlicedTensor | None
_Views = list[SlicedTensor] | None


def _slice(
    view: SlicedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> _View:
    if step != 1:
        return None
    size = view.shape[dim]
    start, end = (
        default if at is None else min(max(at + size if at < 0 else at, 0), size)
        for at, default in ((start, 0), (end, size))
    )
    return view._with_range(dim, start, max(end - start, 0))


def _select(view: SlicedTensor, dim: int, index: int) -> _View:
    size = view.shape[dim]
    if not -size <= index < size:
        return None  # let the operation itself raise
    dim %= view.dim()
    cut = view._with_range(dim, index % size, 1)
    if cut is None:
        return None
    return cut._view(cut._source, cut._box, cut._dims[:dim] + cut._dims[dim + 1 :])


def _transpose(view: SlicedTensor, dim0: int, dim1: int) -> _View:
    order = list(range(view.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(view, order)


def _permute(view: SlicedTensor, dims: Sequence[int]) -> _View:
    return view._view(view._source, view._box, tuple(view._dims[dim] for dim in dims))


def _t(view: SlicedTensor) -> _View:
    return _permute(view, range(view.dim())[::-1])


def _unsqueeze(view: SlicedTensor, dim: int) -> _View:
    dim %= view.dim() + 1
    return view._view(view._source, view._box, (*view._dims[:dim], None, *view._dims[dim:]))


def _same(view: SlicedTensor, *args: Any, **kwargs: Any) -> _View:
    return view._view(view._source, view._box, view._dims)


def _same_shape(view: SlicedTensor, shape: Sequence[int], *args: Any, **kwargs: Any) -> _View:
    numel = view.numel()
    known = abs(torch.Size(shape).numel()) or 1
    resolved = tuple(numel // known if n == -1 else n for n in shape)
    return _same(view) if resolved == tuple(view.shape) else None


def _split(view: SlicedTensor, size: int, dim: int = 0) -> _Views:
    total = view.shape[dim]
    return _split_sizes(view, [min(size, total - at) for at in range(0, total, size)], dim)


def _split_sizes(view: SlicedTensor, sizes: Sequence[int], dim: int = 0) -> _Views:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [view._with_range(dim, at, n) for at, n in zip(starts, sizes, strict=True)]
    return None if any(part is None for part in parts) else parts


def _unbind(view: SlicedTensor, dim: int = 0) -> _Views:
    parts = [_select(view, dim, index) for index in range(view.shape[dim])]
    return None if any(part is None for part in parts) else parts


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.transpose.int: _transpose,
    _aten.permute.default: _permute,
    _aten.t.default: _t,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_sizes,
    _aten.unbind.int: _unbind,
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.lift_fresh.default: _same,
    _aten.view.default: _same_shape,
    _aten._unsafe_view.default: _same_shape,
    _aten.expand.default: _same_shape,
}
_LAYOUT_SENSITIVE = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten._reshape_alias.default,
    _aten.as_strided.default,
}
