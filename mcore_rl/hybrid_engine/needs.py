"""What a vLLM rank needs of every checkpoint tensor, learnt from vLLM's own loaders.

Which slice of which tensor a rank stores depends on the model, on TP and EP, on padding and on how
vLLM fuses weights. Instead of writing that down a second time, the model's own `load_weights` is
run on stand-ins that hold no data and note what is read, with the model's parameters exchanged for
meta tensors. Nothing is loaded and nothing of the model changes.

The same run shows whether the checkpoint fills every parameter, which no warning of vLLM does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.hybrid_engine.boxes import Box, disjoint, full_box, show, uncovered, volume
from mcore_rl.hybrid_engine.sliced_tensor import SlicedTensor

if TYPE_CHECKING:
    from mcore_rl.hybrid_engine.vllm_engine import VLLMEngine

Metadata = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # checkpoint tensor -> (shape, dtype)
_aten = torch.ops.aten


def learn_needs(engine: VLLMEngine, tensor_metadata: Metadata) -> dict[str, tuple[Box, ...]]:
    """The boxes of each checkpoint tensor that this rank of `engine` reads: disjoint, sorted.

    Tensors this rank does not need map to an empty tuple. Not collective; the order of
    `tensor_metadata` does not matter, its names are those of the Hugging Face checkpoint. Covers
    unquantised checkpoints (one tensor per weight, in a floating dtype).

    Raises RuntimeError naming the tensor if the model has no place for one, and naming the
    parameter and the part of it if the tensors together leave one unfilled.
    """
    reads: dict[str, list[Box]] = defaultdict(list)
    with engine.loading_context(), _on_meta(engine.model) as parameters:
        with _WriteRecorder() as writes:
            _load_stand_ins(engine.model, tensor_metadata, reads)
    _require_filled(parameters, writes)
    return {name: disjoint(reads[name]) for name in tensor_metadata}


def _load_stand_ins(
    model: torch.nn.Module, tensor_metadata: Metadata, reads: Mapping[str, list[Box]]
) -> None:
    at = "the first tensor"

    def stand_ins() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal at
        for name, (shape, dtype) in tensor_metadata.items():
            at = name
            note = lambda _, box, name=name: reads[name].append(box)  # noqa: E731
            yield name, SlicedTensor.recording(name, shape, dtype, note)

    try:
        model.load_weights(stand_ins())
    except (ValueError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        raise RuntimeError(
            f"vLLM's {type(model).__name__} cannot load the checkpoint tensor {at}: {error}"
        ) from error


class _Parameter:
    """A parameter in the shape in which it is loaded, under all names it has (tied weights)."""

    def __init__(self) -> None:
        self.stand_ins: dict[str, torch.Tensor] = {}  # name -> meta tensor


@contextmanager
def _on_meta(model: torch.nn.Module) -> Iterator[list[_Parameter]]:
    """Exchange the model's tensors for meta tensors of the shapes in which they are loaded.

    vLLM notes those shapes when it builds a model, for its layerwise reload; afterwards kernels may
    keep weights in other shapes. Yields the parameters; puts every tensor back at the end.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

    modules = dict(model.named_modules())
    saved = {
        name: (dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set))
        for name, m in modules.items()
    }
    parameters: dict[int, _Parameter] = defaultdict(_Parameter)
    try:
        for name, module in modules.items():
            restore_layer_on_meta(module, get_layerwise_info(module))
            for key, tensor in module._parameters.items():
                if tensor is None:
                    continue
                module._parameters[key] = stand_in = _loadable_stand_in(tensor)
                real = saved[name][0].get(key, tensor)
                qualified = f"{name}.{key}" if name else key
                parameters[id(real)].stand_ins[qualified] = stand_in
        yield list(parameters.values())
    finally:
        for name, module in modules.items():
            for mine, real in zip(
                (module._parameters, module._buffers, module._non_persistent_buffers_set),
                saved[name],
                strict=True,
            ):
                mine.clear()
                mine.update(real)


def _loadable_stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the meta device with its loader, without the wrapper of an earlier reload."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    stand_in = to_meta_tensor(tensor)
    if hasattr(tensor, "weight_loader"):
        stand_in.weight_loader = _get_original_loader(tensor)
    return stand_in


class _WriteRecorder(TorchDispatchMode):
    """Notes which parts of which meta tensors are written."""

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[int, list[torch.Tensor]] = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (_aten.copy_.default, _aten.fill_.Scalar, _aten.zero_.default):
            if args[0].is_meta:
                self._written[_storage(args[0])].append(args[0].detach())
        return func(*args, **(kwargs or {}))

    def missing(self, tensor: torch.Tensor) -> str | None:
        """What of `tensor` was not written, in words; None if nothing is missing."""
        views = self._written[_storage(tensor)]
        boxes = [_box_of(view, tensor) for view in views]
        known = [box for box in boxes if box is not None]
        expected = getattr(tensor, "weight_loader_numel", tensor.numel())  # less where padded
        if expected < tensor.numel() or len(known) < len(boxes):
            loaded = sum(view.numel() for view in views)
            return None if loaded >= expected else f"{loaded} of {expected} elements"
        gaps = uncovered(full_box(tensor.shape), disjoint(known))
        if not gaps:
            return None
        missing = sum(volume(gap) for gap in gaps)
        return f"nothing for {show(gaps[0])}, {missing} of {tensor.numel()} elements missing"


def _require_filled(parameters: list[_Parameter], writes: _WriteRecorder) -> None:
    for parameter in parameters:
        missing = {name: writes.missing(t) for name, t in parameter.stand_ins.items()}
        if all(missing.values()):  # of tied names, one is enough
            name, found = next(iter(missing.items()))
            raise RuntimeError(
                f"the checkpoint does not fill vLLM's parameter {name}: it got {found}; a tensor "
                "is missing or has the wrong shape"
            )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _box_of(view: torch.Tensor, base: torch.Tensor) -> Box | None:
    """Which box of the contiguous `base` its `view` is; None if it is no box."""
    if not base.is_contiguous():
        return None
    sizes = [1] * base.dim()
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        try:
            dim = next(d for d, s in enumerate(base.stride()) if s == stride and base.shape[d] > 1)
        except StopIteration:
            return None
        sizes[dim] = size
    box, rest = [], view.storage_offset() - base.storage_offset()
    for size, stride, limit in zip(sizes, base.stride(), base.shape, strict=True):
        start, rest = divmod(rest, max(stride, 1))
        if start + size > limit:
            return None
        box.append((start, start + size))
    return tuple(box)
