"""A rank's shards in memory: what a checkpoint is loaded into, and exported from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_rl.model.boxes import Box, full_box


class Shards:
    """Boxes of some tensors, and the values that were written to them."""

    def __init__(self, boxes: Mapping[str, Sequence[Box]]) -> None:
        self.held = boxes
        self.values: dict[tuple[str, Box], torch.Tensor] = {}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Shards that hold these tensors whole."""
        shards = cls({name: [full_box(tuple(each.shape))] for name, each in tensors.items()})
        shards.values = {(name, shards.held[name][0]): each for name, each in tensors.items()}
        return shards

    def tensors(self) -> tuple[str, ...]:
        return tuple(self.held)

    def boxes(self, tensor: str) -> tuple[Box, ...]:
        return tuple(self.held.get(tensor, ()))

    def write(self, tensor: str, box: Box, data: torch.Tensor) -> None:
        self.values[tensor, box] = data

    def read(self, tensor: str, box: Box, at: Any = ...) -> torch.Tensor:
        return self.values[tensor, box][at]

    def zero_padding(self) -> None:
        pass
