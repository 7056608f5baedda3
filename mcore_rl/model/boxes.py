"""Arithmetic on boxes: axis-aligned ranges of a tensor's elements.

A box is a half-open range (start, stop) per dimension, in the coordinates of the full tensor. The
only box of a scalar is `()`, with volume 1. Weight maps, needs and transfer plans consist of boxes,
so "each element exactly once" can be checked with integers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

Box = tuple[tuple[int, int], ...]
Boxes = Mapping[str, Sequence[Box]]  # tensor -> disjoint boxes


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a complete tensor of `shape`."""
    return tuple((0, n) for n in shape)


def extent(box: Box) -> tuple[int, ...]:
    """Return the shape of the slice that `box` selects."""
    return tuple(stop - start for start, stop in box)


def slices(box: Box) -> tuple[slice, ...]:
    """Return the index of `box` in the full tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def volume(box: Box) -> int:
    """Return the number of elements in `box`."""
    return math.prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of `a` and `b`, or None if it is empty."""
    parts = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        parts.append((start, stop))
    return tuple(parts)


def contains(outer: Box, inner: Box) -> bool:
    """Return whether every element of `inner` lies in `outer`."""
    if volume(inner) == 0:
        return True
    return all(
        o_start <= i_start and i_stop <= o_stop
        for (o_start, o_stop), (i_start, i_stop) in zip(outer, inner, strict=True)
    )


def relative(inner: Box, outer: Box) -> Box:
    """Return `inner` in coordinates relative to the corner of `outer`, which must contain it."""
    assert contains(outer, inner), f"{show(inner)} does not lie in {show(outer)}"
    return tuple(
        (start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(inner, outer, strict=True)
    )


def boxes_of_flat_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return elements start to stop of a tensor of `shape`, in row-major order, as boxes.

    The boxes are in that order, disjoint and not empty, and each is contiguous in memory. There are
    at most 2 len(shape) - 1 boxes. The range must lie in the tensor.
    """
    assert 0 <= start <= stop <= math.prod(shape), f"{start}:{stop} reaches outside {shape}"
    if not shape:
        return [()] if start < stop else []
    rest = shape[1:]
    row = math.prod(rest)
    boxes: list[Box] = []
    at = start
    while at < stop:
        index, inside = divmod(at, row)
        if inside == 0 and at + row <= stop:
            whole = (index, stop // row)
            boxes.append((whole, *full_box(rest)))
            at = whole[1] * row
        else:
            end = min(stop, (index + 1) * row)
            part = boxes_of_flat_range(rest, inside, inside + end - at)
            boxes += [((index, index + 1), *box) for box in part]
            at = end
    return boxes


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return `box` without `hole` as disjoint boxes, at most two per dimension."""
    shared = intersect(box, hole)
    if shared is None:
        return [box] if volume(box) else []
    parts: list[Box] = []
    rest = list(box)
    for dim, (start, stop) in enumerate(shared):
        low, high = rest[dim]
        for piece in ((low, start), (stop, high)):
            if piece[0] < piece[1]:
                parts.append((*rest[:dim], piece, *rest[dim + 1 :]))
        rest[dim] = (start, stop)
    return parts


def uncovered(box: Box, covers: Iterable[Box]) -> list[Box]:
    """Return the part of `box` that is outside all `covers`, as disjoint boxes."""
    rest = [box] if volume(box) else []
    for cover in covers:
        rest = [part for piece in rest for part in subtract(piece, cover)]
    return rest


def disjoint(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Return the union of `boxes` as sorted disjoint boxes; no two of them form a larger box."""
    parts: list[Box] = []
    for box in sorted(set(boxes), key=lambda b: (-volume(b), b)):
        parts.extend(uncovered(box, parts))
    while (joined := _first_union(parts)) is not None:
        i, j, union = joined
        parts[i] = union
        del parts[j]
    return tuple(sorted(parts))


def _first_union(parts: Sequence[Box]) -> tuple[int, int, Box] | None:
    """Return the first two indices whose boxes form one box, and that box."""
    for i, j in itertools.combinations(range(len(parts)), 2):
        if (union := _join(parts[i], parts[j])) is not None:
            return i, j, union
    return None


def _join(a: Box, b: Box) -> Box | None:
    """Return the union of two disjoint boxes if it is a box, else None."""
    differing = [dim for dim, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if len(differing) != 1:
        return None
    dim = differing[0]
    low, high = sorted((a[dim], b[dim]))
    if low[1] != high[0]:
        return None
    return (*a[:dim], (low[0], high[1]), *a[dim + 1 :])


def show(box: Box) -> str:
    """Return `box` in slice notation: "[0:4, 2:3]"."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
