"""A rank's share of the model, with the weights that engines hold in FP8 blocks quantised.

A slice may cut a block, whose scale depends on the complete block. Before a hand-over, every rank
therefore computes the largest |value| of each block's part that it holds, and the ranks exchange
those of the blocks that any of them holds in part. Slices are cast when they are read: no rank
holds a quantised copy of its share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.megatron.float8 import cast_rows, largest_by_block, scales_from
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.boxes import (
    Box,
    Boxes,
    contains,
    disjoint,
    extent,
    intersect,
    relative,
    slices,
    volume,
)
from mcore_rl.model.float8_blocks import BLOCK, Float8Weights, blocks_of, scale_name
from mcore_rl.model.tensors import TensorInfo

_Shapes = Mapping[str, tuple[int, ...]]


class Float8Shards:
    """`ModelShards` with `quantised` weights in FP8 blocks, and their scales as tensors.

    Call `share` once, with all ranks' boxes, and `prepare` after every change of the parameters.
    `read` then casts: float8_e4m3fn(value x (1 / scale)), as DeepGEMM and vLLM do.
    """

    def __init__(
        self, shards: ModelShards, tensors: Mapping[str, TensorInfo], quantised: Float8Weights
    ) -> None:
        """`tensors` are the checkpoint's, before quantisation."""
        self._shards, self._powers_of_two = shards, quantised.powers_of_two
        self._shapes = {name: tensors[name].shape for name in quantised.weights if name in tensors}
        self._weight_of = {scale_name(name): name for name in self._shapes}
        held = [name for name in shards.tensors() if name in self._shapes]
        # This rank's scales in one vector, and the boxes of each weight's scales in it.
        self._places, self._num_scales = _places({n: self.boxes(scale_name(n)) for n in held})
        self._scales = torch.empty(0)
        # Positions, in the vector of shared blocks and in this rank's, of those that both have.
        self._num_shared = 0
        self._shared = self._own = torch.empty(0, dtype=torch.int64)

    def boxes(self, tensor: str) -> tuple[Box, ...]:
        """Return the boxes of `tensor` on this rank; scales are held with each part of a block."""
        if tensor not in self._weight_of:
            return self._shards.boxes(tensor)
        return disjoint(map(blocks_of, self._shards.boxes(self._weight_of[tensor])))

    def share(self, have: Sequence[Boxes]) -> None:
        """Find the blocks that ranks hold in part; `have[rank]` are that rank's boxes.

        Not collective. The result is the same on all ranks, except for what each holds itself.
        """
        blocks = list(_cut_blocks(have, self._shapes))
        own = [self._position(*block) for block in blocks]
        pairs = [(number, at) for number, at in enumerate(own) if at is not None]
        self._num_shared = len(blocks)
        indices = torch.tensor(pairs, dtype=torch.int64, device=self._shards.device).view(-1, 2)
        self._shared, self._own = indices.unbind(1)

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the scales of this rank's blocks. Collective if any block is cut."""
        device = self._shards.device
        largest = torch.zeros(self._num_scales, dtype=torch.float32, device=device)
        for name in self._places:
            for box in self._shards.boxes(name):
                largest_here = largest_by_block(self._shards.read(name, box), box)
                for part, view in self._views(largest, name, blocks_of(box)):
                    view.copy_(
                        torch.maximum(view, largest_here[slices(relative(part, blocks_of(box)))])
                    )
        if self._num_shared:
            shared = torch.zeros(self._num_shared, dtype=torch.float32, device=device)
            shared[self._shared] = largest[self._own]
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
            largest[self._own] = shared[self._shared]
        self._scales = scales_from(largest, powers_of_two=self._powers_of_two)

    def read(self, tensor: str, box: Box, at: Any = ...) -> torch.Tensor:
        """Return the values of `box`, which must lie in one held box, or those that `at` selects.

        `at` is an index into the rows of a quantised weight.
        """
        if tensor in self._weight_of:
            return self._scales_in(self._weight_of[tensor], box)[at]
        values = self._shards.read(tensor, box, at)
        if tensor not in self._shapes:
            return values
        rows = torch.arange(*box[0], device=values.device)[at]
        return cast_rows(values, self._scales_in(tensor, blocks_of(box)), box, rows)

    def _scales_in(self, weight: str, box: Box) -> torch.Tensor:
        """Return the scales of `box`, in blocks."""
        views = list(self._views(self._scales, weight, box))
        if sum(volume(part) for part, _ in views) != volume(box):
            raise RuntimeError(f"scales of {weight} were read on a rank that does not hold them")
        if len(views) == 1:
            return views[0][1]
        whole = torch.empty(extent(box), dtype=torch.float32, device=self._scales.device)
        for part, view in views:
            whole[slices(relative(part, box))] = view
        return whole

    def _views(
        self, vector: torch.Tensor, weight: str, box: Box
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the parts of `box`, in blocks, that `vector` has, and views of them."""
        for held, offset in self._places.get(weight, ()):
            part = intersect(held, box)
            if part is not None:
                whole = vector[offset : offset + volume(held)].view(extent(held))
                yield part, whole[slices(relative(part, held))]

    def _position(self, weight: str, row: int, column: int) -> int | None:
        """Return where the vector of this rank's scales has a block's."""
        block = ((row, row + 1), (column, column + 1))
        for held, offset in self._places.get(weight, ()):
            if contains(held, block):
                (first_row, _), (first, last) = held
                return offset + (row - first_row) * (last - first) + column - first
        return None


def _places(boxes: Mapping[str, Sequence[Box]]) -> tuple[dict[str, list[tuple[Box, int]]], int]:
    """Return the offset of each box in a vector that has all of them, and its length."""
    places: dict[str, list[tuple[Box, int]]] = {}
    offset = 0
    for name, some in boxes.items():
        places[name] = []
        for box in some:
            places[name].append((box, offset))
            offset += volume(box)
    return places, offset


def _cut_blocks(have: Sequence[Boxes], shapes: _Shapes) -> Iterator[tuple[str, int, int]]:
    """Yield (weight, row, column) of the blocks that some box in `have` holds in part, in order."""
    boxes: dict[str, set[Box]] = {}
    for holdings in {id(each): each for each in have}.values():  # many ranks share one object
        for name, some in holdings.items():
            if name in shapes:
                boxes.setdefault(name, set()).update(some)
    for name in sorted(boxes):
        cut: set[tuple[int, int]] = set()
        for box in boxes[name]:
            cut.update(_cut_by(box, shapes[name]))
        for row, column in sorted(cut):
            yield name, row, column


def _cut_by(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the blocks of a weight of `shape` that `box` holds in part."""
    rows, columns = (range(*ends) for ends in blocks_of(box))
    cut_rows, cut_columns = (_cut_ends(ends, size) for ends, size in zip(box, shape, strict=True))
    yield from ((row, column) for row in cut_rows for column in columns)
    yield from ((row, column) for column in cut_columns for row in rows)


def _cut_ends(ends: tuple[int, int], size: int) -> Collection[int]:
    start, stop = ends
    return {end // BLOCK for end in (start, stop) if end % BLOCK and end != size}
