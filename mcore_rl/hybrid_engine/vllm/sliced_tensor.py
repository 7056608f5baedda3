"""A checkpoint tensor with only this rank's slices, for loaders that expect the full tensor.

vLLM's weight loaders take full checkpoint tensors and cut out what their rank stores. A
`SlicedTensor` has the full tensor's shape and dtype, tracks the cutting (slice, narrow, select,
chunk, transpose, ...) as arithmetic on boxes, and returns data only when a loader finally reads it:
from its pieces, or not at all. Thus no rank ever needs a full tensor, and a read outside the pieces
is an error instead of a wrong weight.

A loader ends with `parameter_view.copy_(tensor_view)`, which copies each piece directly to its
place without assembling the pieces first. A tensor may therefore also come in several parts.

The same class without data records what a loader would read (see `needs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from mcore_rl.model.boxes import (
    Box,
    contains,
    extent,
    full_box,
    intersect,
    relative,
    show,
    slices,
    subtract,
    uncovered,
    volume,
)

Pieces = Sequence[tuple[Box, torch.Tensor]]
ReadObserver = Callable[[str, Box], None]
WriteObserver = Callable[[str, Box, torch.Tensor], None]
_aten = torch.ops.aten


@dataclass(slots=True, eq=False)
class _Source:
    """The checkpoint tensor behind all its views; `pieces` is None if reads are only recorded."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Box, torch.Tensor], ...] | None
    on_read: ReadObserver | None = None  # without pieces
    on_write: WriteObserver | None = None  # with pieces
    on_compute: Callable[[str], None] | None = None
    partial: bool = False  # a copy writes what is held and leaves the rest to another part
    released: bool = False
    device: torch.device = torch.device("cpu")

    def __post_init__(self) -> None:
        if self.pieces:
            self.device = self.pieces[0][1].device

    def read(self, box: Box) -> torch.Tensor:
        """Return the elements of `box`: a view if one piece holds them all, else a copy."""
        self.require(box)
        if volume(box) == 0:
            return torch.empty(extent(box), dtype=self.dtype, device=self.device)
        if self.on_compute is not None:
            self.on_compute(self.name)
        data = self._gathered(box)
        self.notify(box, data)
        return data

    def _gathered(self, box: Box) -> torch.Tensor:
        if self.pieces is None:
            return torch.empty(extent(box), dtype=self.dtype, device="meta")
        for held, data in self.pieces:
            if contains(held, box):
                return data[slices(relative(box, held))]
        result = torch.empty(extent(box), dtype=self.dtype, device=self.device)
        for held, data in self.pieces:
            shared = intersect(held, box)
            if shared is not None:
                result[slices(relative(shared, box))] = data[slices(relative(shared, held))]
        return result

    def parts_of(self, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the held part of `box` as disjoint (box, data), each element once."""
        rest = [box]
        for held, data in self.pieces or ():
            for part in rest:
                shared = intersect(held, part)
                if shared is not None:
                    yield shared, data[slices(relative(shared, held))]
            rest = [left for part in rest for left in subtract(part, held)]

    def notify(self, box: Box, data: torch.Tensor) -> None:
        if self.on_read is not None:
            self.on_read(self.name, box)
        if self.on_write is not None:
            self.on_write(self.name, box, data)

    def require(self, box: Box) -> None:
        """Raise RuntimeError unless every element of `box` is held."""
        if self.pieces is None:
            return
        if self.released:
            raise RuntimeError(
                f"{self.name}: {show(box)} was read after the next tensor had been requested, when "
                "its memory may hold something else"
            )
        missing = uncovered(box, [held for held, _ in self.pieces])
        if missing:
            held = ", ".join(show(held) for held, _ in self.pieces) or "nothing"
            raise RuntimeError(
                f"{self.name}: {show(box)} of {list(self.shape)} was read, {show(missing[0])} of "
                f"it is not held here; held: {held}"
            )


class SlicedTensor(torch.Tensor):
    """Stand-in for the checkpoint tensor `name` of `shape` and `dtype`, made of `pieces`.

    `pieces` are (box, tensor) pairs; the tensor has the box's extent and holds its elements. Pieces
    may overlap, need not cover the tensor, and must stay unchanged until `release` is called, or
    while the stand-in or a view of it lives. Reading elements that no piece holds raises
    RuntimeError, as does writing.

    With `SlicedTensor.observed`, `on_write(name, box, data)` is called whenever data is returned,
    for each piece that is copied from. After a copy, `data` are the elements now in the target, of
    the box's extent, or the piece's own if the copy changes the dtype. A copy into a meta tensor,
    with which vLLM's layerwise reload counts elements, returns no data.

    `SlicedTensor.recording` has no pieces: any box may be read, `on_read(name, box)` is called for
    each, and the data are meta tensors.
    """

    _source: _Source
    _box: Box  # the box of the source that this view shows
    _dims: tuple[
        int | None, ...
    ]  # the source's dimension behind each of the view's; None: unsqueezed

    @staticmethod
    def __new__(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        pieces: Sequence[tuple[Box, torch.Tensor]],
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
            _Source(name, shape, dtype, tuple(pieces)),
            full_box(shape),
            tuple(range(len(shape))),
        )

    @classmethod
    def recording(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        on_read: ReadObserver,
        on_compute: Callable[[str], None] | None = None,
    ) -> SlicedTensor:
        """Return a stand-in without data that calls `on_read` for what is read.

        `on_compute(name)` is called if a loader does more with it than cut and copy.
        """
        shape = tuple(shape)
        source = _Source(name, shape, dtype, None, on_read, on_compute=on_compute)
        return cls._view(source, full_box(shape), tuple(range(len(shape))))

    @classmethod
    def observed(
        cls,
        name: str,
        tensor: torch.Tensor,
        *,
        on_write: WriteObserver | None = None,
        partial: bool = False,
    ) -> SlicedTensor:
        """Wrap `tensor`, full or already a SlicedTensor, so that `on_write` is called.

        With `partial` a copy writes what is held and leaves the rest of its target unchanged.
        """
        view = cls(name, tensor.shape, tensor.dtype, pieces_of(tensor))
        view._source.on_write, view._source.partial = on_write, partial
        return view

    def release(self) -> None:
        """Release the pieces; reading afterwards raises RuntimeError."""
        self._source.pieces, self._source.released = (), True

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
        """Return this view's elements as a plain tensor."""
        data = self._source.read(self._box)
        kept = [dim for dim in self._dims if dim is not None]
        dropped = [dim for dim in range(data.dim()) if dim not in kept]  # of extent 1: selected
        data = data.permute([*kept, *dropped])
        data = data[(...,) + (0,) * len(dropped)] if dropped else data
        for position, dim in enumerate(self._dims):
            if dim is None:
                data = data.unsqueeze(position)
        return data

    def __repr__(self) -> str:  # type: ignore[override]  # without contents to print, as torch's has
        source = self._source
        return f"SlicedTensor({source.name}{show(self._box)} of {list(source.shape)}, {self.dtype})"

    # Views use __torch_dispatch__; __torch_function__ would wrap plain results again. torch's stub
    # gives both the types of the functions that disable them.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        follow = _FOLLOWED.get(func)
        if follow is not None:
            result = follow(*args, **kwargs)
            if result is not None:
                return result
        if func is _aten.copy_.default and not isinstance(args[0], cls):
            target, view = args[:2]
            if target.shape == view.shape:  # else it is broadcast
                view._count() if target.is_meta else view._copy_into(target)
                return target
        _refuse_writes(func, args, kwargs)
        prepare = _contiguous if func in _LAYOUT_SENSITIVE else _plain
        return func(*tree_map(prepare, args), **tree_map(prepare, kwargs))

    def _count(self) -> None:
        """Check or record a copy into a meta tensor, without returning data."""
        source = self._source
        if source.pieces is not None:
            source.require(self._box)
        elif source.on_read is not None and volume(self._box):
            source.on_read(source.name, self._box)

    def _copy_into(self, target: torch.Tensor) -> None:
        """Copy the held pieces to their places in `target`, a plain tensor of this view's shape."""
        source = self._source
        if source.released or not source.partial:
            source.require(self._box)
        with torch._C.DisableTorchFunctionSubclass():  # of vLLM's parameters
            for box, data in source.parts_of(self._box):
                stored = self._place_of(box, target)
                stored.copy_(data)
                source.notify(box, stored if stored.dtype == data.dtype else data)

    def _place_of(self, box: Box, target: torch.Tensor) -> torch.Tensor:
        """Return the part of `target` for `box`, as a view with the source's dimensions."""
        cut = relative(box, self._box)
        index = [0 if dim is None else slice(*cut[dim]) for dim in self._dims]
        kept = [dim for dim in self._dims if dim is not None]
        part = target.detach()[tuple(index)].permute([kept.index(dim) for dim in sorted(kept)])
        for dim in range(len(box)):
            if dim not in kept:  # selected, of extent 1
                part = part.unsqueeze(dim)
        return part

    def _with_range(self, dim: int, start: int, length: int) -> SlicedTensor | None:
        """Return this view with `length` elements from `start` along its dimension `dim`."""
        of_source = self._dims[dim]
        if of_source is None:
            return _same(self) if (start, length) == (0, 1) else None
        origin = self._box[of_source][0]
        cut = (origin + start, origin + start + length)
        box = (*self._box[:of_source], cut, *self._box[of_source + 1 :])
        return self._view(self._source, box, self._dims)


def pieces_of(tensor: torch.Tensor) -> Pieces:
    """Return the pieces of a SlicedTensor, or all of a plain tensor as one piece."""
    if not isinstance(tensor, SlicedTensor):
        return [(full_box(tensor.shape), tensor)]
    pieces = tensor._source.pieces
    assert pieces is not None, f"{tensor!r} has no data to load"
    return pieces


def _plain(value: Any) -> Any:
    return value._read() if isinstance(value, SlicedTensor) else value


def _contiguous(value: Any) -> Any:
    if not isinstance(value, SlicedTensor):
        return value
    # Not `contiguous`: `as_strided` also uses the storage around a view.
    return value._read().clone(memory_format=torch.contiguous_format)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(value, SlicedTensor):
            raise RuntimeError(f"{func} writes into {value!r}, which lends the trainer's weights")
    out = kwargs.get("out")
    if isinstance(out, SlicedTensor):
        raise RuntimeError(f"{func} writes into {out!r}, which lends the trainer's weights")


# These functions return the view that an operation makes, or None if it is not a view of a box.
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
    return _all_or_none(parts)


def _all_or_none(parts: Sequence[_View]) -> _Views:
    known = [part for part in parts if part is not None]
    return known if len(known) == len(parts) else None


def _unbind(view: SlicedTensor, dim: int = 0) -> _Views:
    parts = [_select(view, dim, index) for index in range(view.shape[dim])]
    return _all_or_none(parts)


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
