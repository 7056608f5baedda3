"""Arenas: a few large storages in place of the thousands of an optimizer's state.

Each storage that leaves the device and comes back costs an allocation, a release and a copy of its
own: thousands of calls for main parameters and moments. Tensors that are alone in their storage
move into arenas once, and then leave with these.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_ALIGNMENT = 512  # bytes, that of the caching allocator's blocks


@torch.no_grad()
def move_to_arenas(tensors: Iterable[torch.Tensor], *, arena_bytes: int) -> int:
    """Make tensors views of arenas of at most `arena_bytes`; return the number of arenas made.

    The tensors stay the same objects with the same values. Left as they are: tensors of which
    anything else is a view, larger ones, and those in an arena. One arena at a time is allocated
    beside the tensors that it replaces.
    """
    num_arenas, batch, size = 0, list[torch.Tensor](), 0
    for tensor in tensors:
        if not _is_alone(tensor) or tensor.nbytes > arena_bytes:
            continue
        if size + _aligned(tensor) > arena_bytes or (batch and batch[0].device != tensor.device):
            num_arenas += _move(batch)
            batch, size = [], 0
        batch.append(tensor)
        size += _aligned(tensor)
    return num_arenas + _move(batch)


def _is_alone(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor is all of its storage, which nothing else uses."""
    if type(tensor.detach()) is not torch.Tensor or not tensor.is_contiguous():
        return False
    storage = tensor.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)  # by the tensor and by `storage`
    return uses == 2 and 0 < storage.nbytes() == tensor.nbytes and storage.resizable()


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _move(batch: list[torch.Tensor]) -> int:
    if len(batch) < 2:
        return 0
    arena = torch.empty(sum(map(_aligned, batch)), dtype=torch.uint8, device=batch[0].device)
    start = 0
    for tensor in batch:
        place = arena[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        tensor.data = place
        start += _aligned(tensor)
    return 1
