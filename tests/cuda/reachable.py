"""Every tensor that can be reached from an object, by its path: what a forward pass can read.

Attributes, containers, closures, bound methods and partial functions are followed, so that a tensor
that a kernel object or a closure has kept is found as well as a parameter.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

# They lead out of the model, into all of vLLM; modules are followed, whosever they are.
_LEFT_OUT = ("vllm.config", "vllm.v1.worker", "vllm.v1.core", "vllm.distributed", "transformers.")


@dataclass(frozen=True)
class Place:
    """Where a tensor lies, as a kernel or a captured graph has it."""

    address: int
    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        storage = tensor.untyped_storage().data_ptr()
        return cls(tensor.data_ptr(), storage, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def reachable(root: Any) -> dict[str, torch.Tensor]:
    """Path from `root` -> tensor, the shortest path where there are several; no meta tensors."""
    found: dict[str, torch.Tensor] = {}
    met: dict[int, Any] = {}  # held, so that no number comes twice
    waiting = deque([("", root)])
    while waiting:
        path, value = waiting.popleft()
        if id(value) in met or _leads_nowhere(value):
            continue
        met[id(value)] = value
        if isinstance(value, torch.Tensor) and not value.is_meta:
            found[path] = value
        waiting.extend((f"{path}.{name}", child) for name, child in _children(value))
    return found


def _leads_nowhere(value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float, str, bytes, type, ModuleType)):
        return True
    if isinstance(value, torch.nn.Module):
        return False
    return type(value).__module__.startswith(_LEFT_OUT) or isinstance(value, RemovableHandle)


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return [(str(index), child) for index, child in enumerate(value)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, MethodType):
        return [("self", value.__self__), ("func", value.__func__)]
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, weakref.ref):
        return [("referent", value())]
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    attributes = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    return [*attributes, *vars(value).items()] if hasattr(value, "__dict__") else attributes


def _of_function(function: FunctionType) -> Iterable[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield "defaults", function.__defaults__
    yield "kwdefaults", function.__kwdefaults__
