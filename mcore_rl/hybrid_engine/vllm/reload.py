"""Reloads a vLLM model in place, slice by slice: what arrives is written at once, nothing is kept.

vLLM's own layerwise reload keeps all it is given until a layer is complete, builds a second set of
the layer's parameters, loads into that and copies. Here the model's own loaders run on each tensor
as it arrives, and write into the memory of the live parameters, where vLLM keeps those in the shape
in which they are loaded. That is all of them on CUDA without quantisation, so that nothing is held
beside the model but the slice itself. Where it keeps them otherwise (packed, on CPU), parameters of
that layer are made in the shape of the checkpoint, by the first tensor, and live until the last one
has come: at most a second copy of one layer's parameters, as long as tensors come layer by layer.

A layer is complete when its loaders have read as many elements as they did when needs were learnt.
Then vLLM's own post-processing runs on it (packing, permuting) and the result is copied to where
vLLM's kernels and CUDA graphs expect it. Attention layers, which derive weights from those of
others, come last.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.vllm.live_layers import Layers
from mcore_rl.hybrid_engine.vllm.needs import Learnt, Metadata, Needs, learn
from mcore_rl.hybrid_engine.vllm.sliced_tensor import Pieces, SlicedTensor, WriteObserver, pieces_of
from mcore_rl.model.boxes import Box, intersect, relative, show, uncovered, volume

Weights = Iterable[tuple[str, torch.Tensor]]
# vLLM's kernels of unquantised experts that tests have reloaded; its others keep weights elsewhere.
_RELOADABLE = ("TRITON", "BATCHED_TRITON", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "CPU")


class Reloader:
    """Reloads one vLLM model, again and again. Holds the model weakly.

    `vllm_config` is the one that the model was built with. Nothing of an engine is used, so it
    serves whoever has a model: an engine, a worker, a model that nothing runs. Raises UsageError if
    a layer's kernel keeps weights in a way that is not known to be reloadable.
    """

    def __init__(
        self, model: torch.nn.Module, vllm_config: Any, *, beside: torch.nn.Module | None = None
    ) -> None:
        """`beside` is another model, whose modules in this one that other one's reload loads."""
        _require_reloadable(model)
        self._model, self._config = weakref.ref(model), vllm_config
        others = set() if beside is None else set(map(id, beside.modules()))
        self._lent = frozenset(n for n, module in model.named_modules() if id(module) in others)
        self._metadata: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._learnt: Learnt | None = None

    @property
    def model(self) -> Any:
        """The model that is reloaded, while it lives; with the methods of its class in vLLM."""
        model = self._model()
        assert model is not None, "the model was closed"
        return model

    @contextmanager
    def loading_context(self) -> Iterator[None]:
        """In which the model's `load_weights` may be called."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config), torch.no_grad():
            yield

    def learn_needs(self, tensor_metadata: Metadata) -> Needs:
        """`needs.learn_needs`, remembered for `load`. Not collective."""
        if self._learnt is None or self._metadata != dict(tensor_metadata):
            self._learnt = learn(self, tensor_metadata, lent=self._lent)
            self._metadata = dict(tensor_metadata)
        return self._learnt.needs

    def reload(self, weights: Weights, group: Any, on_write: WriteObserver | None = None) -> None:
        """`load`, agreed upon by vLLM's `group`. Collective over it; exhausts `weights`.

        Raises RuntimeError on all ranks of the group if `load` raises on one, and names tensors
        that no rank of the group has a place for.
        """
        remaining = iter(weights)
        fault: Exception | None = None
        unread: list[str] = []
        try:
            unread = self.load(remaining, on_write)
        except Exception as error:  # whatever it is, the other ranks must hear of it first
            fault = error
            # The stream may be collective, and may fail in its turn: the first fault is told.
            with suppress(Exception):
                for _ in remaining:
                    pass
        _agree(group, fault, unread)

    def load(self, weights: Weights, on_write: WriteObserver | None = None) -> list[str]:
        """Replace all weights by `weights`; the names of those not needed here are returned.

        Not collective. Items are checkpoint tensors, whole ones or `SlicedTensor`s. What this rank
        needs must come once, what it does not need may be left out. Any order will do; by layer the
        memory held is least. A tensor may come in several items of its name, each with other
        elements. Each item is read before the next is asked for, and not afterwards.

        `on_write(name, box, data)` hears of every element of the checkpoint that was written, once
        (see SlicedTensor), also where two parameters hold it.

        Raises RuntimeError naming the tensor that has no place in the model, comes twice, is
        missing or not loaded in full, or the parameter that remains unfilled. The model then has a
        mixture of weights, or none, and must not run until a `load` succeeds.
        """
        arrivals = _Arrivals(self._learnt, self._metadata, on_write)
        with self.loading_context():
            layers = Layers(self.model, self._learnt, arrivals.count, self._lent)
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
            for _ in offered:  # what it left, so that it is missed
                pass
        except (ValueError, LookupError, AttributeError, AssertionError) as error:
            raise RuntimeError(f"vLLM's loader failed at {at}: {error}") from error

    def _needs_of(self, metadata: Metadata) -> Needs:
        """The needs, learnt anew if a tensor came of which, or of whose shape, nothing is known."""
        if self._learnt is None or not _agrees(metadata, self._metadata):
            missing = [] if self._learnt is None else _never_came(self._learnt.needs, metadata)
            if missing:
                raise RuntimeError(f"not given to reload, though vLLM needs them: {_some(missing)}")
            return self.learn_needs(metadata)
        return self._learnt.needs


def _require_reloadable(model: torch.nn.Module) -> None:
    """Refuse kernels of experts whose weights nobody has seen exchanged in place."""
    for name, module in model.named_modules():
        backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
        if backend is not None and backend.name not in _RELOADABLE:
            raise UsageError(
                f"vLLM has chosen the {backend.name} kernels for the experts of {name}, whose "
                "weights cannot be exchanged in place",
                remedy="leave --rl-rollout-all2all-backend out and VLLM_ROCM_USE_AITER_MOE unset, "
                f"so that it chooses one of {', '.join(_RELOADABLE)}",
            )


def _agrees(given: Metadata, known: Metadata) -> bool:
    return all(known.get(name) == metadata for name, metadata in given.items())


def _never_came(needs: Needs, metadata: Metadata) -> list[str]:
    return [name for name, boxes in needs.items() if boxes and name not in metadata]


def _require_complete(needs: Needs, arrivals: _Arrivals) -> None:
    missing = _never_came(needs, arrivals.metadata)
    for name, boxes in needs.items():
        for box in boxes:
            for gap in uncovered(box, arrivals.given[name]) if name not in missing else ():
                missing.append(f"{show(gap)} of {name}")
    if missing:
        raise RuntimeError(f"not given to reload, though vLLM needs them: {_some(missing)}")
    for name, boxes in needs.items():
        for box in boxes:
            gaps = uncovered(box, arrivals.read[name])
            if gaps:
                raise RuntimeError(
                    f"vLLM's loader took {show(box)} of {name} for this rank, but did not load "
                    f"{show(gaps[0])}"
                )


class _Arrivals:
    """The tensors that come, as stand-ins for the loaders, and what became of them."""

    def __init__(
        self, learnt: Learnt | None, known: Metadata, on_write: WriteObserver | None
    ) -> None:
        self.metadata: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.given: dict[str, list[Box]] = defaultdict(list)
        self.read: dict[str, list[Box]] = defaultdict(list)
        self._elements_read = 0
        self._learnt, self._known, self._on_write = learnt, known, on_write
        self._held: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)

    def of(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """`weights`, each such that it is read now or never."""
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
        """Whether a loader computes with this tensor, and not all that it needs has come."""
        learnt = self._learnt
        if learnt is None or self._known.get(name) != self.metadata[name]:
            return False
        if name not in learnt.computed:
            return False
        waits = any(uncovered(box, self.given[name]) for box in learnt.needs[name])
        if waits or name in self._held:
            self._held[name].extend((box, data.clone()) for box, data in pieces)
        return waits

    def count(self) -> int:
        """How many elements the loaders have read so far."""
        return self._elements_read

    def _note(self, name: str, box: Box, data: torch.Tensor) -> None:
        self._elements_read += volume(box)
        if self._on_write is not None:
            for part in uncovered(box, self.read[name]):
                whole = part == box  # as almost always
                at = ... if whole else tuple(slice(*ends) for ends in relative(part, box))
                self._on_write(name, part, data if whole else data[at])
        self.read[name].append(box)


def _agree(group: Any, fault: Exception | None, unread: list[str]) -> None:
    """Raise on all ranks of `group` if one failed or if a tensor has no place on any."""
    mine = (None if fault is None else str(fault), unread)
    all_results = objects.all_gather(mine, group=group.cpu_group)
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
