"""Destination of all paths: one tensor for every box that a vLLM rank needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mcore_rl.model.boxes import Box, Boxes, extent, intersect, relative
from mcore_rl.model.tensors import TensorInfo


def _cut(data: torch.Tensor, box: Box) -> torch.Tensor:
    return data[tuple(slice(start, stop) for start, stop in box)]


class Destination:
    """Tensors of the shapes of the needed boxes, allocated once."""

    def __init__(self, needed: Boxes, tensors: Mapping[str, TensorInfo]) -> None:
        self._held: dict[str, list[tuple[Box, torch.Tensor]]] = {
            name: [
                (box, torch.zeros(extent(box), dtype=getattr(torch, tensors[name].dtype)))
                for box in boxes
            ]
            for name, boxes in needed.items()
            if boxes
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._held)

    @property
    def num_bytes(self) -> int:
        return sum(data.nbytes for data in self.parts())

    def parts(self) -> list[torch.Tensor]:
        """Return all tensors, in the order of `names` and of their `boxes`."""
        return [data for some in self._held.values() for _, data in some]

    def boxes(self, name: str) -> list[Box]:
        return [box for box, _ in self._held.get(name, ())]

    def fill(self, name: str, pieces: Iterable[tuple[Box, torch.Tensor]]) -> None:
        """Copy the needed parts of `pieces` of the tensor `name`."""
        for box, data in pieces:
            for needed, target in self._held.get(name, ()):
                shared = intersect(box, needed)
                if shared is not None:
                    source = _cut(data, relative(shared, box))
                    _cut(target, relative(shared, needed)).copy_(source)

    def fill_whole(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the needed parts of a whole tensor."""
        for needed, target in self._held.get(name, ()):
            target.copy_(_cut(tensor, needed))

    def clear(self) -> None:
        for part in self.parts():
            part.zero_()

    def differing(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the tensors whose bits differ from the checkpoint's."""
        return [
            name
            for name, some in self._held.items()
            if not all(_same_bits(_cut(weights[name], box), data) for box, data in some)
        ]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_kind = a.shape == b.shape and a.dtype == b.dtype
    return same_kind and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )
