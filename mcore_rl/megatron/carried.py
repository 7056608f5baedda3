"""Checkpoint tensors that engines need but nothing trains: the drafter's MTP layers.

They are not parameters, so no Megatron rank holds them. Each rank reads the slices that its own
engine needs, once, and keeps them in host memory. At a hand-over they are local and do not travel.
Each engine has its own copy, as it has of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, read_boxes
from mcore_rl.model.boxes import Box, contains, relative, show, slices
from mcore_rl.model.tensors import TensorInfo


class CarriedTensors:
    """This rank's slices of a checkpoint's MTP layers, with the interface of `ModelShards`."""

    def __init__(self, checkpoint: HFCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._held: dict[str, list[tuple[Box, torch.Tensor]]] = {}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors that may be needed."""
        return self._checkpoint.mtp

    @property
    def num_bytes(self) -> int:
        """Bytes held by this rank, in host memory."""
        return sum(data.nbytes for held in self._held.values() for _, data in held)

    def hold(self, needs: Mapping[str, Sequence[Box]]) -> None:
        """Read the boxes of these tensors that `needs` names, and drop those held before.
        Not collective. Raises UsageError for values that are not finite."""
        self._held = {
            name: list(zip(boxes, read_boxes(self._checkpoint, name, boxes), strict=True))
            for name, boxes in needs.items()
            if name in self.tensors and boxes
        }

    def boxes(self, tensor: str) -> tuple[Box, ...]:
        """Return the boxes of `tensor` that this rank holds."""
        return tuple(box for box, _ in self._held.get(tensor, ()))

    def read(self, tensor: str, box: Box, at: Any = ...) -> torch.Tensor:
        """Return the values of `box`, or those that `at` selects, in host memory.
        `box` must lie in one held box."""
        for held, data in self._held.get(tensor, ()):
            if contains(held, box):
                return data[slices(relative(box, held))][at]
        raise RuntimeError(f"{tensor}{show(box)} was read on a rank that does not hold it")
