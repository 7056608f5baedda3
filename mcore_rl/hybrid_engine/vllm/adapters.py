"""Adapters in vLLM's LoRA layers: written in place, slice by slice, by the layers' own `set_lora`.

An engine has one adapter, in the only slot of its LoRA layers, and every request uses it. Its
factors are known by their names in an adapter's file. A layer's `set_lora` takes complete factors
and cuts out what its rank stores. It gets `SlicedTensor`s, as vLLM's weight loaders do (see
`needs` and `reload`): what a rank needs is recorded without data, and each element is observed in
the memory that vLLM computes with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.vllm.needs import Metadata, Needs
from mcore_rl.hybrid_engine.vllm.reload import Weights
from mcore_rl.hybrid_engine.vllm.sliced_tensor import Pieces, SlicedTensor, WriteObserver, pieces_of
from mcore_rl.model.boxes import Box, disjoint
from mcore_rl.model.lora import Lora, factor_names, vllm_rank

_ID = 1  # of the adapter, in requests
_BUFFERS = ("lora_a_stacked", "lora_b_stacked")
StandIn = Callable[[str], torch.Tensor]


def lora_arguments(lora: Lora) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for these adapters."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": vllm_rank(lora.rank),
        # By the last parts of their names, as vLLM knows also those that it fuses.
        "lora_target_modules": sorted({layer.rsplit(".", 1)[-1] for layer in lora.modules}),
    }


def adapter_request() -> Any:
    """Return vLLM's `LoRARequest` for the adapter of an engine."""
    from vllm.lora.request import LoRARequest

    # vLLM would read the path if it did not have the adapter, and fail.
    return LoRARequest("trained", _ID, "/weights/are/handed/over")


class AdapterSlot:
    """The adapter of one vLLM model. `runner` is vLLM's model runner.

    Raises UsageError naming a layer with an adapter for which vLLM has no LoRA layer.
    """

    def __init__(self, runner: Any, lora: Lora) -> None:
        self._runner, self._lora = runner, lora
        self._metadata: Metadata = {}
        self._place()  # checks the layers

    def learn_needs(self, tensor_metadata: Metadata) -> Needs:
        """Return the boxes that this rank stores of each factor; not collective."""
        reads: dict[str, list[Box]] = defaultdict(list)

        def note(name: str, box: Box) -> None:
            reads[name].append(box)

        def stand_in(name: str) -> torch.Tensor:
            shape, dtype = tensor_metadata[name]
            return SlicedTensor.recording(name, shape, dtype, note)

        with self._on_meta():
            self._set(0, stand_in)
        self._metadata = dict(tensor_metadata)
        return {name: disjoint(reads[name]) for name in tensor_metadata}

    @torch.no_grad()
    def load(self, weights: Weights, on_write: WriteObserver | None = None) -> list[str]:
        """Replace the adapter; return the names of factors not needed here. Not collective.

        The contracts are those of `Reloader.load`. All pieces are held until the last one has
        arrived: a second copy of what this rank stores.
        """
        pieces: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
        given: dict[str, None] = {}
        for name, tensor in weights:
            if name not in self._metadata:
                raise RuntimeError(f"{name} has no place in the adapter of this engine")
            given[name] = None
            pieces[name].extend((box, data.clone()) for box, data in pieces_of(tensor))
        read: set[str] = set()

        def note(name: str, box: Box, data: torch.Tensor) -> None:
            read.add(name)
            if on_write is not None:
                on_write(name, box, data)

        self._set(self._activate(), partial(self._arrived, pieces, note))
        return [name for name in given if name not in read]

    def _arrived(
        self, pieces: Mapping[str, Pieces], note: WriteObserver, name: str
    ) -> torch.Tensor:
        shape, dtype = self._metadata[name]
        whole = SlicedTensor(name, shape, dtype, pieces.get(name, ()))
        return SlicedTensor.observed(name, whole, on_write=note)

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of what the LoRA layers of this rank store, padding included."""
        for module_name, module in self._modules.items():
            for buffer in _BUFFERS:
                for number, stacked in enumerate(getattr(module, buffer)):
                    yield f"{module_name}.{buffer}.{number}", stacked[0, 0]

    @property
    def _manager(self) -> Any:
        return self._runner.lora_manager._adapter_manager

    @property
    def _modules(self) -> Mapping[str, Any]:
        """vLLM's LoRA layers by name."""
        modules: Mapping[str, Any] = self._manager.modules
        return modules

    def _activate(self) -> int:
        """Put an adapter of zeros into the slot; return the slot's number.

        Everything is set anew, because a sleeping engine may have lost its memory.
        """
        manager = self._runner.lora_manager
        manager.remove_all_adapters()
        manager.add_dummy_lora(adapter_request(), rank=1)
        self._manager.activate_adapter(_ID)
        slot: int = self._manager.lora_index_to_id.index(_ID)
        return slot

    def _set(self, slot: int, factor: StandIn) -> None:
        """Let each LoRA layer store its adapters, of which `factor(name)` are the factors."""
        for module_name, layers in self._place().items():
            module = self._modules[module_name]
            names = [factor_names(layer) if layer else None for layer in layers]
            a, b = (
                [None if pair is None else factor(pair[which]) for pair in names]
                for which in (0, 1)
            )
            if module_name in self._manager.packed_modules:
                module.set_lora(slot, a, b)
            else:
                module.set_lora(slot, a[0], b[0])

    def _place(self) -> dict[str, list[str | None]]:
        """Return module -> the layers that it fuses, None for one without an adapter."""
        places: dict[str, list[str | None]] = {}
        missing = dict.fromkeys(self._lora.modules)
        for module_name in self._modules:
            fused = self._manager.packed_modules.get(module_name, [module_name])
            layers = [layer if layer in self._lora.modules else None for layer in fused]
            if any(layers):
                places[module_name] = layers
            for layer in fused:
                missing.pop(layer, None)
        if missing:
            raise UsageError(
                f"needs a LoRA layer of vLLM for {next(iter(missing))}, and it has none",
                flag="--rl-lora-rollout adapters",
                remedy="give --rl-lora-rollout merged",
            )
        return places

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Replace the memory of the LoRA layers by meta tensors; restore it at the end."""
        live = {
            (module, buffer): getattr(module, buffer)
            for module in self._modules.values()
            for buffer in _BUFFERS
        }
        try:
            for (module, buffer), tensors in live.items():
                setattr(module, buffer, tuple(tensor.to("meta") for tensor in tensors))
            yield
        finally:
            for (module, buffer), tensors in live.items():
                setattr(module, buffer, tensors)
