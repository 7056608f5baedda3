"""Counts the bytes of the tensors that a piece of code makes, as they come and go.

    with LiveBytes() as live:
        ...
    live.peak_bytes

Storages are counted once, however many views they have, from the operation that returned them to
the moment nobody holds them any more. What was there before is not counted.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Sees every operation on tensors in this thread, those of backward passes on the CPU too."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._counted: dict[weakref.ref, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        known = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:  # neither a view nor written in place
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        known = weakref.ref(storage, self._forget)
        if known in self._counted:
            return
        self._counted[known] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, storage: weakref.ref) -> None:
        self.live_bytes -= self._counted.pop(storage)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
