"""The memory of tensors that are made while something is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Allocations(TorchDispatchMode):
    """Calls `tell` with the storage of each tensor that is made within and does not view another;
    not of meta tensors, nor of subclasses."""

    def __init__(self, tell: Callable[[torch.UntypedStorage], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if _has_memory(leaf)}
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if _has_memory(leaf) and _address(leaf) not in known:
                self._tell(leaf.untyped_storage())
        return result


def _has_memory(value: Any) -> bool:
    return type(value) in _PLAIN and not value.is_meta and value.untyped_storage().nbytes() > 0


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
