"""A vLLM model's modules while their weights are replaced in place (see `reload`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from mcore_rl.hybrid_engine.vllm.needs import (
    Loader,
    LoadRecord,
    WriteRecorder,
    has_kv_cache_scales,
    loadable_parameters,
    loader_of,
)

if TYPE_CHECKING:
    from mcore_rl.hybrid_engine.vllm.needs import LoadableParameter


class Layers:
    """The model's modules while they are loaded, with stand-ins for their parameters.

    The stand-ins are meta tensors: the model's `load_weights` looks up all of them before the first
    tensor arrives. Their loaders replace them by the tensors that are really written.
    `elements_read()` returns the number of elements that all loaders have read so far; `record` is
    None if needs are not yet known. Tensors for modules `shared` with another model are skipped.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        record: LoadRecord | None,
        elements_read: Callable[[], int],
        shared: frozenset[str] = frozenset(),
    ) -> None:
        self._model, self._elements_read = model, elements_read
        # Of Mamba-2 layers: views of the convolution's loaded weight, which a CPU packs elsewhere.
        views = {
            id(module.conv1d): module._buffers["conv_weights"]
            for module in model.modules()
            if "conv_weights" in module._buffers
        }
        self._layers = [
            _Layer(
                name,
                module,
                None if record is None else record.elements.get(name, 0),
                views.get(id(module)),
            )
            for name, module in model.named_modules()
            if any(tensor is not None for tensor in module._parameters.values())
        ]
        for layer in self._layers:
            for key, stand_in in layer.stand_ins.items():
                through = _pass_over if layer.name in shared else self._through(layer, key)
                stand_in.weight_loader = through
                layer.module._parameters[key] = stand_in

    def _through(self, layer: _Layer, key: str) -> Loader:
        """Return the loader of `layer`'s parameter `key`, writing into the real target."""
        stand_in, loader = layer.stand_ins[key], layer.loaders[key]

        @wraps(loader)
        def load(*args: Any, **kwargs: Any) -> Any:
            """Load into the target instead of the stand-in; the last element finishes the layer."""
            if layer.done:
                with WriteRecorder() as writes:  # other ranks' experts come here, but write nothing
                    result = loader(*args, **kwargs)
                if writes.wrote:
                    raise RuntimeError(f"{layer.name} was complete before all of it had arrived")
                return result
            target = layer.open()[key]
            before = self._elements_read()
            result = loader(
                *(target if value is stand_in else value for value in args),
                **{k: target if value is stand_in else value for k, value in kwargs.items()},
            )
            layer.loaded += self._elements_read() - before
            if layer.loaded and layer.loaded == layer.expected:
                layer.finish()
            return result

        return load

    @contextmanager
    def put_back_at_the_end(self) -> Iterator[None]:
        """Remove all stand-ins from the modules at the end of the context, even on failure."""
        try:
            yield
        finally:
            self.put_back()
            for layer in self._layers:
                layer.drop()

    def put_back(self) -> None:
        """Restore every module's own parameters."""
        for layer in self._layers:
            layer.put_back()

    def finish(self, dtype: torch.dtype) -> None:
        """Process the remaining layers. All needed tensors must have been loaded."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.layers.attention.attention import set_default_quant_scales

        for layer in self._layers:
            if layer.loaded and not layer.done:  # padded, or loaded before needs were learned
                layer.finish()
        fresh = {id(p) for layer in self._layers if layer.done for p in layer.live.values()}
        for layer in self._layers:
            # Only one of several tied modules is loaded, but each may keep a packed copy.
            if not layer.done and any(id(p) in fresh for p in layer.live.values()):
                layer.open_unloaded()
                layer.finish()
        module: Any  # with the methods of its class in vLLM
        for module in self._model.modules():
            if is_deferred_attention_layer(module):
                module.process_weights_after_loading(dtype)
                if has_kv_cache_scales(module):
                    # vLLM expects a checkpoint to set them, and dummy weights are random.
                    set_default_quant_scales(module)


class _Layer:
    """One module with its own parameters."""

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        expected: int | None,
        view: torch.Tensor | None = None,
    ) -> None:
        self.name, self._view = name, view
        self.module: Any = module  # with the attributes of its class in vLLM
        self.live: dict[str, torch.Tensor] = {
            key: p for key, p in module._parameters.items() if p is not None
        }
        self._saved = dict(module._parameters)
        self.stand_ins = loadable_parameters(module)
        self.loaders = {key: loader_of(stand_in) for key, stand_in in self.stand_ins.items()}
        self._conversions = {
            key: parts for key, loader in self.loaders.items() if (parts := _composed(loader))
        }
        self.loaders |= {key: loader for key, (loader, _) in self._conversions.items()}
        self.expected = expected
        if expected is None:
            self.expected = sum(_loadable_elements(t) for t in self.stand_ins.values())
        self.loaded = 0
        self.done = False
        self._targets: dict[str, LoadableParameter] = {}

    def open(self) -> dict[str, LoadableParameter]:
        """Return the tensors that loaders write into: the live memory if its format fits."""
        if not self._targets:
            if "cpu_linear" in vars(self.module):
                self.module.cpu_linear = _without_weights(self.name)  # frees the packed copy
            for key, stand_in in self.stand_ins.items():
                target = self._live_target(key)
                if target is None:
                    target = self._new_target(key)
                self._targets[key] = target
                if _loadable_elements(stand_in) < stand_in.numel():
                    target.data.zero_()  # padding must be zero, whatever kernels permute
        return self._targets

    def open_unloaded(self) -> None:
        """Use live memory that another module's loaders wrote as this layer's targets."""
        for key in self.stand_ins:
            target = self._live_target(key)
            if target is None:
                raise RuntimeError(
                    f"{self.name}.{key} shares its memory with a parameter that was reloaded, but "
                    "vLLM keeps it in another format"
                )
            self._targets[key] = target

    def _live_target(self, key: str) -> LoadableParameter | None:
        """Return the live memory as a loadable parameter; None if its format differs."""
        stand_in, live = self.stand_ins[key], self.live.get(key)
        if live is None or live.device.type != self._device.type:
            return None
        if (live.shape, live.dtype, live.stride()) != (
            stand_in.shape,
            stand_in.dtype,
            stand_in.stride(),
        ):
            return None
        return self._like_stand_in(live.data, key)

    def _new_target(self, key: str) -> LoadableParameter:
        stand_in = self.stand_ins[key]
        memory = torch.empty_strided(
            stand_in.shape, stand_in.stride(), dtype=stand_in.dtype, device=self._device
        )
        return self._like_stand_in(memory, key)

    def _like_stand_in(self, memory: torch.Tensor, key: str) -> LoadableParameter:
        memory.__class__ = self.stand_ins[key].__class__
        memory.__dict__ = self.stand_ins[key].__dict__.copy()
        loadable = cast("LoadableParameter", memory)
        loadable.weight_loader = self.loaders[key]
        return loadable

    @property
    def _device(self) -> torch.device:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        device: torch.device = get_layerwise_info(self.module).restore_device
        return device

    def finish(self) -> None:
        """Let vLLM process the loaded weights, and copy the result to where vLLM expects it."""
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        module = self.module
        for key, (_, convert) in self._conversions.items():
            self._targets[key].data.copy_(convert(self._targets[key].data))
        if self._view is not None:
            self._view.copy_(self._targets["weight"].data.view_as(self._view))
        module._parameters.update(self._targets)
        buffers = dict(module._buffers)
        # Quantisation methods set it so that they do not run twice on one set of weights.
        vars(module).pop("_already_called_process_weights_after_loading", None)
        method = getattr(module, "quant_method", None)
        kernel = _float8_kernel(method)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(module)
            vars(method).update(kernel)
            if hasattr(module, "update_param_tp_status"):
                module.update_param_tp_status()
        self.drop()
        _copy_back(module._parameters, self.live)
        _copy_back(module._buffers, {k: b for k, b in buffers.items() if b is not None})
        self.done = True
        self.put_back()

    def put_back(self) -> None:
        """Restore the module's own parameters."""
        self.module._parameters.clear()
        self.module._parameters.update(self._saved)

    def drop(self) -> None:
        """Release the loaded tensors."""
        self._targets.clear()


def _composed(loader: Loader) -> tuple[Loader, Callable[[torch.Tensor], torch.Tensor]] | None:
    """Return the loader and the conversion in vLLM's `composed_weight_loader`, else None.

    It converts the whole parameter at each call: a tensor that arrives in parts would be converted
    several times.
    """
    name = "composed_weight_loader.<locals>.composed_loader"
    if getattr(loader, "__qualname__", "") != name:
        return None
    inner = inspect.getclosurevars(loader).nonlocals
    return inner["loader"], inner["fn"]


def _copy_back(processed: dict[str, torch.Tensor | None], live: Mapping[str, torch.Tensor]) -> None:
    """Copy processed tensors into their live memory, and put the live tensors back one by one."""
    for key, tensor in live.items():
        result = processed.get(key)
        if result is not None and result is not tensor:
            tensor.data.copy_(result)
        processed[key] = tensor


def _float8_kernel(method: Any) -> dict[str, Any]:
    """Return what experts in FP8 blocks compute with, which processing weights replaces.

    It refers to the live scales, whose addresses CUDA graphs have captured. A new one would refer
    to those that processing returns, beside the live ones.
    """
    names = ("moe_kernel", "moe_quant_config") if hasattr(method, "fp8_backend") else ()
    return {name: getattr(method, name) for name in names}


def _loadable_elements(parameter: torch.Tensor) -> int:
    # Less than all where vLLM pads; older versions pad, and do not say so.
    return int(getattr(parameter, "weight_loader_numel", parameter.numel()))


def _pass_over(*args: Any, **kwargs: Any) -> None:
    """Load nothing: another model's reload loads this parameter."""


def _without_weights(name: str) -> Loader:
    def compute(*args: Any) -> NoReturn:
        raise RuntimeError(f"{name} has no weights: a reload was begun and not completed")

    return compute
