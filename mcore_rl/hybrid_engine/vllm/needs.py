"""A vLLM rank's needs: the slices of checkpoint tensors that vLLM's own loaders read.

The slices that a rank stores depend on the model, on TP and EP, on padding and on vLLM's fusion of
weights. This module does not repeat these rules. It replaces the model's parameters by meta tensors
and runs the model's own `load_weights` on stand-ins that hold no data and record what is read.
Nothing is loaded, and the model does not change.

The same run checks that the checkpoint fills every parameter, which vLLM does not warn about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.hybrid_engine.vllm.sliced_tensor import SlicedTensor
from mcore_rl.model.boxes import Box, disjoint, full_box, show, uncovered, volume

Metadata = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # checkpoint tensor -> (shape, dtype)
Needs = dict[str, tuple[Box, ...]]
Loader = Callable[..., Any]
_aten = torch.ops.aten


if TYPE_CHECKING:

    class LoadableParameter(torch.nn.Parameter):
        """A parameter as vLLM loads it: the attribute is set on the tensor."""

        weight_loader: Loader


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """A record of one rank's loaders on a checkpoint.

    Example: `needs` {"model.norm.weight": (((0, 64),),)}, `elements` {"model.norm": 64}.
    """

    needs: Needs  # disjoint, sorted boxes; empty for tensors that this rank does not need
    elements: Mapping[str, int]  # module -> number of elements that its parameters' loaders read
    computed: frozenset[str]  # tensors that loaders compute with: they need all slices at once


def learn(
    model: torch.nn.Module,
    tensor_metadata: Metadata,
    *,
    shared: frozenset[str] = frozenset(),
) -> LoadRecord:
    """Record what the loaders of `model` read of each tensor. Not collective.

    Call it in a context in which `load_weights` may be called. `tensor_metadata` uses the Hugging
    Face checkpoint's names, in any order. Modules `shared` with another model need nothing.
    Supports unquantised weights, in a floating dtype, and FP8 blocks with their scales.

    Raises RuntimeError naming a tensor that has no place in the model, or a parameter, and the part
    of it, that the tensors leave unfilled.
    """
    notes = _Notes(shared)
    with _on_meta(model, notes.inside) as parameters:
        with WriteRecorder() as writes:
            _load_stand_ins(model, tensor_metadata, notes)
    _require_filled([p for p in parameters if not p.modules <= shared], writes)
    return LoadRecord(
        needs={name: disjoint(notes.reads[name]) for name in tensor_metadata},
        elements=dict(notes.elements),
        computed=frozenset(notes.computed),
    )


class _Notes:
    """The loaders' reads by tensor and module; reads for `shared` modules do not count."""

    def __init__(self, shared: frozenset[str]) -> None:
        self._shared = shared
        self.reads: dict[str, list[Box]] = defaultdict(list)
        self.elements: dict[str, int] = defaultdict(int)
        self.computed: set[str] = set()
        self._module: str | None = None

    def read(self, name: str, box: Box) -> None:
        if self._module in self._shared:
            return
        self.reads[name].append(box)
        if self._module is not None:
            self.elements[self._module] += volume(box)

    def inside(self, module: str, loader: Loader) -> Loader:
        """Wrap `loader` so that its reads count for `module`."""

        @wraps(loader)
        def load(*args: Any, **kwargs: Any) -> Any:
            self._module = module
            try:
                return loader(*args, **kwargs)
            finally:
                self._module = None

        return load


def _load_stand_ins(model: Any, tensor_metadata: Metadata, notes: _Notes) -> None:
    at = "the first tensor"

    def stand_ins() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal at
        for name, (shape, dtype) in tensor_metadata.items():
            at = name
            yield (
                name,
                SlicedTensor.recording(name, shape, dtype, notes.read, notes.computed.add),
            )

    try:
        model.load_weights(stand_ins())
    except (ValueError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        raise RuntimeError(
            f"vLLM's {type(model).__name__} cannot load the checkpoint tensor {at}: {error}"
        ) from error


class _Parameter:
    """A parameter in the shape in which it is loaded, under all its names (tied weights)."""

    def __init__(self) -> None:
        self.modules: set[str] = set()  # modules that have the parameter
        self.stand_ins: dict[str, torch.Tensor] = {}  # name -> meta tensor


@contextmanager
def _on_meta(
    model: torch.nn.Module, wrap: Callable[[str, Loader], Loader]
) -> Iterator[list[_Parameter]]:
    """Replace the model's parameters by meta tensors of the shapes in which they are loaded.

    Their loaders are `wrap(module name, loader)`. Yields the parameters; restores all at the end.
    """
    modules = dict(model.named_modules())
    live = {name: dict(module._parameters) for name, module in modules.items()}
    buffers = {name: dict(module._buffers) for name, module in modules.items()}
    parameters: dict[int, _Parameter] = defaultdict(_Parameter)
    try:
        for name, module in modules.items():
            stand_ins = loadable_parameters(module)
            module._parameters.clear()
            for key, stand_in in stand_ins.items():
                stand_in.weight_loader = wrap(name, loader_of(stand_in))
                module._parameters[key] = stand_in
                qualified = f"{name}.{key}" if name else key
                real = live[name].get(key)
                parameter = parameters[id(stand_in if real is None else real)]
                parameter.stand_ins[qualified] = stand_in
                parameter.modules.add(name)
            for key, buffer in buffers[name].items():
                module._buffers[key] = None if buffer is None else buffer.to("meta")
        yield list(parameters.values())
    finally:
        for name, module in modules.items():
            for mine, real in (
                (module._parameters, live[name]),
                (module._buffers, buffers[name]),
            ):
                mine.clear()
                mine.update(real)


def loadable_parameters(module: torch.nn.Module) -> dict[str, LoadableParameter]:
    """Return meta tensors for a module's own parameters, as they are when a checkpoint is loaded.

    vLLM records their shapes, classes and attributes when it builds a model, for its layerwise
    reload. Later, kernels may keep weights in other shapes, and in additional parameters that no
    checkpoint has.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import (
        SKIP_MODULES,
        SKIP_TENSORS,
        to_meta_tensor,
    )
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    if has_kv_cache_scales(module):
        return {}
    built = get_layerwise_info(module).restore_metadata[0]
    skipped = SKIP_TENSORS if type(module).__name__ not in SKIP_MODULES else module._parameters
    # Parameters that vLLM does not record still have the shape in which they are loaded.
    now = {key: tensor for key, tensor in module._parameters.items() if tensor is not None}
    tensors = {key: tensor for key, tensor in built.items() if key not in SKIP_TENSORS}
    tensors |= {key: tensor for key, tensor in now.items() if key in skipped}
    return {
        key: restore_layer_refs(to_meta_tensor(tensor), module) for key, tensor in tensors.items()
    }


def has_kv_cache_scales(module: torch.nn.Module) -> bool:
    """Return whether an attention layer of a quantised model has parameters for scales of its KV
    cache. They have an effect only if that is quantised, too."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    return isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)


def loader_of(parameter: torch.Tensor) -> Loader:
    """Return a parameter's loader without the wrapper of vLLM's layerwise reload."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader

    loader: Loader = _get_original_loader(parameter)
    return loader


class WriteRecorder(TorchDispatchMode):
    """Recorder of the parts of meta tensors that are written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates it nowhere
        self._written: dict[int, list[torch.Tensor]] = defaultdict(list)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (_aten.copy_.default, _aten.fill_.Scalar, _aten.zero_.default):
            if args[0].is_meta:
                self._written[_storage(args[0])].append(args[0].detach())
        return func(*args, **(kwargs or {}))

    @property
    def wrote(self) -> bool:
        """Whether anything was written, even zeros."""
        return bool(self._written)

    def missing(self, tensor: torch.Tensor) -> str | None:
        """Describe the parts of `tensor` that were not written; None if nothing is missing."""
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


def _require_filled(parameters: list[_Parameter], writes: WriteRecorder) -> None:
    for parameter in parameters:
        missing = {name: writes.missing(t) for name, t in parameter.stand_ins.items()}
        if all(missing.values()):  # tied names: one is enough
            name, got = next(iter(missing.items()))
            raise RuntimeError(
                f"the checkpoint does not fill vLLM's parameter {name}: it got {got}; a tensor "
                "is missing or has the wrong shape"
            )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _box_of(view: torch.Tensor, base: torch.Tensor) -> Box | None:
    """Return the box of the contiguous `base` that `view` shows; None if it is not a box."""
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
    box, rest = [], int(view.storage_offset() - base.storage_offset())
    for size, stride, limit in zip(sizes, base.stride(), base.shape, strict=True):
        start, rest = divmod(rest, max(stride, 1))
        if start + size > limit:
            return None
        box.append((start, start + size))
    return tuple(box)
