"""A rank's share of the model, addressed by checkpoint tensor and box.

It connects `weight_map` (pure) to the parameters and buffers of this rank's model chunks. If
Megatron-FSDP shards parameters over data parallelism, the share is this rank's rows.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.dither import dithered
from mcore_rl.megatron.fsdp_buffers import LocalWeight, local_weights
from mcore_rl.megatron.lora import Adapter, FactorShards, adapters_of, is_adapter
from mcore_rl.model.boxes import Box, contains, extent, full_box, relative, show, slices, uncovered
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import TrainLayout
from mcore_rl.model.tensors import TensorInfo
from mcore_rl.model.weight_map import ShardCoordinates, box_of_rows, map_parameter, pieces_within


@dataclass(frozen=True, slots=True)
class _Held:
    """A box of a checkpoint tensor, and its location in the rows held by this rank."""

    box: Box
    name: str
    parameter: torch.Tensor
    local_box: Box


class ModelShards:
    """The slices of the checkpoint that this rank's model chunks hold.

    `read` returns and `write` takes the checkpoint's dtype, for any dtype of the parameter. A
    router's bias is float32 in both; a float32 run of a bfloat16 checkpoint rounds at hand-over.
    With `dithers` it rounds from `dithered` values, so that small updates arrive in the mean.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        shape: ModelShape,
        layout: TrainLayout,
        rank: int,
        tensors: Mapping[str, TensorInfo],
        *,
        dithers: bool = False,
    ) -> None:
        self.shape, self._dithers = shape, dithers
        self._infos = tensors
        self._held: dict[str, list[_Held]] = defaultdict(list)
        self._padding: list[torch.Tensor] = []
        self._adapters: dict[str, Adapter] = {}
        for chunk in chunks:
            if (adapters := adapters_of(chunk)) is not None:
                self._adapters |= adapters.by_tensor
            at = ShardCoordinates.of(layout, rank, megatron_adapter.stage_layers(chunk))
            for weight in _weights(chunk):
                self._add(weight, shape, at)

    def _add(self, weight: LocalWeight, shape: ModelShape, at: ShardCoordinates) -> None:
        value = weight.data
        held = box_of_rows(weight.shape, weight.first_row, len(value) if value.dim() else 1)
        whole = map_parameter(weight.name, weight.shape, shape, at)
        pieces = list(pieces_within(whole, held))
        for piece in pieces:
            self._held[piece.tensor].append(
                _Held(piece.checkpoint_box, weight.name, value, piece.local_box)
            )
        for gap in uncovered(full_box(value.shape), [piece.local_box for piece in pieces]):
            if "word_embeddings" not in weight.name and "output_layer" not in weight.name:
                raise RuntimeError(f"{weight.name}{show(gap)} has no counterpart in the checkpoint")
            self._padding.append(value[slices(gap)])

    @property
    def factors(self) -> FactorShards:
        """The factors of this rank's adapters."""
        return FactorShards(self._adapters.values())

    def of_base(self) -> ModelShards:
        """Return the same slices without adapters."""
        base = copy.copy(self)
        base._adapters = {}
        return base

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self._held.values()))[0].parameter.device

    def tensors(self) -> tuple[str, ...]:
        """Return the checkpoint tensors of which this rank holds any part."""
        return tuple(self._held)

    def boxes(self, tensor: str) -> tuple[Box, ...]:
        """Return the distinct boxes of `tensor` on this rank (which may hold a tied one twice)."""
        return tuple(dict.fromkeys(held.box for held in self._held.get(tensor, ())))

    def read(self, tensor: str, box: Box, at: Any = ...) -> torch.Tensor:
        """Return the values of `box`, which must lie in one held box, in the checkpoint's dtype.

        Adapters are merged. `at` is an index into the box's elements, by default all of them; of a
        weight with an adapter, into its rows.
        """
        for held in self._held.get(tensor, ()):
            if contains(held.box, box):
                data = held.parameter.detach()[slices(held.local_box)]
                data = data[slices(relative(box, held.box))]
                data = data[at]
                if (adapter := self._adapters.get(tensor)) is not None:
                    data = adapter.added_to(data, box, at)
                dtype = getattr(torch, self._infos[tensor].dtype)
                if self._dithers and dtype.itemsize < data.itemsize == 4:
                    places = [torch.arange(*ends, device=data.device) for ends in box]
                    data = dithered(data, dtype, places, at)
                return data.to(dtype)
        raise RuntimeError(f"{tensor}{show(box)} was read on a rank that does not hold it")

    @torch.no_grad()
    def write(self, tensor: str, box: Box, data: torch.Tensor) -> None:
        """Set a held box in every parameter that holds it, cast to the parameter's dtype."""
        for held in self._held[tensor]:
            if held.box == box:
                held.parameter[slices(held.local_box)] = data.view(extent(box))

    @torch.no_grad()
    def zero_padding(self) -> None:
        """Zero the vocabulary's padding rows."""
        for rows in self._padding:
            rows.zero_()


def _weights(chunk: torch.nn.Module) -> Iterator[LocalWeight]:
    """Yield this rank's part of the parameters without adapters, and the persistent buffers."""
    yield from (w for w in local_weights(chunk) if not is_adapter(w.name))
    for prefix, module in chunk.named_modules():
        # Megatron keeps the routing bias in float32, but restores it only lazily after bfloat16().
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                full_name = f"{prefix}.{name}" if prefix else name
                yield LocalWeight(full_name, tuple(buffer.shape), 0, buffer)
