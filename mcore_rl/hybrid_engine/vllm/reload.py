"""In-place reload of a vLLM model, slice by slice: slices are written on arrival and not kept.

vLLM's own layerwise reload keeps all it is given until a layer is complete, builds a second set of
the layer's parameters, loads into it and copies. Here the model's own loaders run on each tensor as
it arrives. They write into the memory of the live parameters if vLLM keeps these in the shape in
which they are loaded. On CUDA without quantisation these are all parameters, so memory holds only
the slice in addition to the model. If vLLM keeps them otherwise (packed, on CPU), the layer's first
tensor creates parameters in the checkpoint's shape, which live until its last tensor has arrived:
at most a second copy of one layer's parameters, as long as tensors arrive layer by layer.

A layer is complete when its loaders have read as many elements as when needs were learned. vLLM's
own post-processing then runs on it (packing, permuting), and the result is copied to where vLLM's
kernels and CUDA graphs expect it. Attention layers, which derive weights from other layers, are
processed last.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.vllm.live_layers import Layers
from mcore_rl.hybrid_engine.vllm.needs import LoadRecord, Metadata, Needs, learn
from mcore_rl.hybrid_engine.vllm.sliced_tensor import Pieces, SlicedTensor, WriteObserver, pieces_of
from mcore_rl.model.boxes import Box, intersect, relative, show, slices, uncovered, volume

Weights = Iterable[tuple[str, torch.Tensor]]
# Loads weights, of which it may observe what is written; returns the names not needed here.
Load = Callable[[Weights, WriteObserver | None], list[str]]
# vLLM's kernels of experts, unquantised or in FP8 blocks, that tests have reloaded; others store
# weights differently.
_RELOADABLE = (
    *("TRITON", "BATCHED_TRITON", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "CPU"),
    "DEEPGEMM",
)
# vLLM's kernels of linear layers in FP8 blocks that tests have reloaded.
_RELOADABLE_FLOAT8 = (
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    "DeepGemmFp8BlockScaledMMKernel",
    "TritonFp8BlockScaledMMKernel",
)


class Reloader:
    """Reloader of one vLLM model, for any number of reloads. Holds the model weakly.

    `vllm_config` is the model's configuration. A reloader needs no engine, so it also works in a
    worker or for a model that does not run. Raises UsageError if a layer's kernel is not known to
    be reloadable.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        *,
        sharing_with: torch.nn.Module | None = None,
    ) -> None:
        """The reload of `sharing_with`, another model, loads the modules that both share."""
        _require_reloadable(model)
        self._model, self._config = weakref.ref(model), vllm_config
        others = set() if sharing_with is None else set(map(id, sharing_with.modules()))
        self._shared = frozenset(n for n, module in model.named_modules() if id(module) in others)
        self._metadata: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._record: LoadRecord | None = None

    @property
    def model(self) -> Any:
        """The reloaded model while it lives, with the methods of its class in vLLM."""
        model = self._model()
        assert model is not None, "the model was closed"
        return model

    @contextmanager
    def _loading_context(self) -> Iterator[None]:
        """Open the context in which the model's `load_weights` may be called."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config), torch.no_grad(), self._without_lora_layers():
            yield

    @contextmanager
    def _without_lora_layers(self) -> Iterator[None]:
        """Replace vLLM's LoRA layers by the layers that they wrap, which loaders look for."""
        if self._config.lora_config is None:
            yield
            return
        from vllm.lora.layers import BaseLayerWithLoRA

        wrapped = [
            (parent, name, child)
            for parent in self.model.modules()
            for name, child in parent._modules.items()
            if isinstance(child, BaseLayerWithLoRA)
        ]
        for parent, name, child in wrapped:
            parent._modules[name] = child.base_layer
        try:
            yield
        finally:
            for parent, name, child in wrapped:
                parent._modules[name] = child

    def learn_needs(self, tensor_metadata: Metadata) -> Needs:
        """Return the boxes that this rank reads of each tensor, and cache them for `load`.

        They are disjoint and sorted; tensors that this rank does not need map to an empty tuple.
        See `needs.learn`.
        """
        if self._record is None or self._metadata != dict(tensor_metadata):
            with self._loading_context():
                self._record = learn(self.model, tensor_metadata, shared=self._shared)
            self._metadata = dict(tensor_metadata)
        return self._record.needs

    def load(self, weights: Weights, on_write: WriteObserver | None = None) -> list[str]:
        """Replace all weights by `weights`; return the names of tensors not needed here.

        Not collective. Items are checkpoint tensors, full ones or `SlicedTensor`s. `weights` must
        contain each element that this rank needs once, and may omit the rest. Any order works;
        ordering by layer needs the least memory. A tensor may come in several items of its name,
        each with different elements. Each item is read before the next is requested, not later.

        `on_write(name, box, data)` is called once for every checkpoint element that was written
        (see SlicedTensor), even if two parameters hold it.

        Raises RuntimeError naming a tensor that has no place in the model, comes twice, is missing
        or not loaded completely, or a parameter that remains unfilled. The model then has a mixture
        of weights, or none, and must not run until a `load` succeeds.
        """
        arrivals = _Arrivals(self._record, self._metadata, on_write)
        with self._loading_context():
            layers = Layers(self.model, self._record, arrivals.count, self._shared)
            with layers.put_back_at_the_end():
                self._run_loaders(arrivals.of(weights))
                layers.put_back()
                needs = self._needs_of(arrivals.metadata)
                _require_complete(needs, arrivals)
                layers.finish(self._config.model_config.dtype)
        return [name for name in arrivals.metadata if not needs[name]]

    def _run_loaders(self, arriving: Iterator[tuple[str, torch.Tensor]]) -> None:
        at = "the first tensor"

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal at
            for name, tensor in arriving:
                at = name
                yield name, tensor

        offered = noted()
        try:
            self.model.load_weights(offered)
            for _ in offered:  # register what the loader left: it is then reported as not loaded
                pass
        except (ValueError, LookupError, AttributeError, AssertionError) as error:
            raise RuntimeError(f"vLLM's loader failed at {at}: {error}") from error

    def _needs_of(self, metadata: Metadata) -> Needs:
        """Return the needs; learn them again if a tensor or its shape is unknown."""
        if self._record is None or not _agrees(metadata, self._metadata):
            if self._record is not None:
                _require_given(_not_given(self._record.needs, metadata))
            return self.learn_needs(metadata)
        return self._record.needs


def load_together(
    load: Load, weights: Weights, group: Any, on_write: WriteObserver | None = None
) -> None:
    """Run `load` with agreement in vLLM's `group`. Collective over it; exhausts `weights`.

    Raises RuntimeError on all ranks of the group if `load` raises on one, or if no rank has a place
    for a tensor, which it names.
    """
    fault: Exception | None = None
    unread: list[str] = []
    try:
        unread = load_to_the_end(load, weights, on_write)
    except Exception as error:  # of any type: it must be reported to the other ranks first
        fault = error
    _agree(group, fault, unread)


def load_to_the_end(
    load: Load, weights: Weights, on_write: WriteObserver | None = None
) -> list[str]:
    """Run `load`, and exhaust `weights` even if it raises: the stream may be collective."""
    remaining = iter(weights)
    try:
        return load(remaining, on_write)
    except Exception:
        with suppress(Exception):  # the first error is reported
            for _ in remaining:
                pass
        raise


def _require_reloadable(model: torch.nn.Module) -> None:
    """Raise UsageError for kernels that are not known to reload in place."""
    for name, module in model.named_modules():
        kernel = type(getattr(getattr(module, "quant_method", None), "fp8_linear", None)).__name__
        if kernel not in ("NoneType", *_RELOADABLE_FLOAT8):
            raise UsageError(
                f"lets vLLM choose {kernel} for {name}, whose weights cannot be exchanged in place",
                flag="--rl-rollout-dtype fp8",
                remedy="drop it: FP8 blocks need a GPU of compute capability 9.0 or 10.0",
            )
        method = getattr(module, "quant_method", None)
        backend = getattr(method, "unquantized_backend", getattr(method, "fp8_backend", None))
        if backend is not None and backend.name not in _RELOADABLE:
            raise UsageError(
                f"vLLM has chosen the {backend.name} kernels for the experts of {name}, whose "
                "weights cannot be exchanged in place",
                remedy="leave --rl-rollout-all2all-backend out and VLLM_ROCM_USE_AITER_MOE unset, "
                f"so that it chooses one of {', '.join(_RELOADABLE)}",
            )


def _agrees(given: Metadata, known: Metadata) -> bool:
    return all(known.get(name) == metadata for name, metadata in given.items())


def _require_given(missing: Sequence[str]) -> None:
    if missing:
        raise RuntimeError(f"not given to reload, though vLLM needs them: {_some(missing)}")


def _not_given(needs: Needs, metadata: Metadata) -> list[str]:
    return [name for name, boxes in needs.items() if boxes and name not in metadata]


def _require_complete(needs: Needs, arrivals: _Arrivals) -> None:
    missing = _not_given(needs, arrivals.metadata)
    for name, boxes in needs.items():
        for box in boxes:
            for gap in uncovered(box, arrivals.given[name]) if name not in missing else ():
                missing.append(f"{show(gap)} of {name}")
    _require_given(missing)
    for name, boxes in needs.items():
        for box in boxes:
            gaps = uncovered(box, arrivals.read[name])
            if gaps:
                raise RuntimeError(
                    f"vLLM's loader took {show(box)} of {name} for this rank, but did not load "
                    f"{show(gaps[0])}"
                )


class _Arrivals:
    """The arriving tensors as stand-ins for the loaders, and a record of what was read."""

    def __init__(
        self, record: LoadRecord | None, known: Metadata, on_write: WriteObserver | None
    ) -> None:
        self.metadata: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.given: dict[str, list[Box]] = defaultdict(list)
        self.read: dict[str, list[Box]] = defaultdict(list)
        self._elements_read = 0
        self._record, self._known, self._on_write = record, known, on_write
        self._held: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)

    def of(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `weights` as stand-ins that can be read only until the next one is requested."""
        for name, tensor in weights:
            self._register(name, tensor)
            if self._must_wait(name, pieces_of(tensor)):
                continue
            shape, dtype = self.metadata[name]
            if name in self._held:
                tensor = SlicedTensor(name, shape, dtype, self._held.pop(name))
            stand_in = SlicedTensor.observed(name, tensor, on_write=self._note, partial=True)
            yield name, stand_in
            stand_in.release()

    def _register(self, name: str, tensor: torch.Tensor) -> None:
        metadata = (tuple(tensor.shape), tensor.dtype)
        known = self.metadata.setdefault(name, metadata)
        if known != metadata:
            raise RuntimeError(f"{name} was given to reload as {known} and as {metadata}")
        boxes = [box for box, _ in pieces_of(tensor)]
        for box in boxes:
            for earlier in self.given[name]:
                if intersect(box, earlier) is not None:
                    raise RuntimeError(
                        f"{name} was given to reload twice ({show(box)} and {show(earlier)})"
                    )
        self.given[name].extend(boxes)

    def _must_wait(self, name: str, pieces: Pieces) -> bool:
        """Return whether a loader computes with this tensor, and some needed slices are missing."""
        record = self._record
        if record is None or self._known.get(name) != self.metadata[name]:
            return False
        if name not in record.computed:
            return False
        waits = any(uncovered(box, self.given[name]) for box in record.needs[name])
        if waits or name in self._held:
            self._held[name].extend((box, data.clone()) for box, data in pieces)
        return waits

    def count(self) -> int:
        """Return the number of elements that the loaders have read so far."""
        return self._elements_read

    def _note(self, name: str, box: Box, data: torch.Tensor) -> None:
        self._elements_read += volume(box)
        if self._on_write is not None:
            for part in uncovered(box, self.read[name]):
                whole = part == box  # the usual case
                at = ... if whole else slices(relative(part, box))
                self._on_write(name, part, data if whole else data[at])
        self.read[name].append(box)


def _agree(group: Any, fault: Exception | None, unread: list[str]) -> None:
    """Raise on all ranks of `group` if one failed, or if no rank has a place for a tensor."""
    mine = (None if fault is None else str(fault), unread)
    alone = len(group.ranks) == 1
    all_results = [mine] if alone else objects.all_gather(mine, group=group.cpu_group)
    if fault is not None:
        raise fault
    for rank, (text, _) in zip(group.ranks, all_results, strict=True):
        if text is not None:
            raise RuntimeError(f"reload failed on rank {rank}: {text}")
    nowhere = set(unread).intersection(*(other for _, other in all_results))
    if nowhere:
        raise RuntimeError(
            f"no rank of the engine has a place for: {_some(sorted(nowhere))}; leave them out"
        )


def _some(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
