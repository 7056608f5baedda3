"""Values of stored tensors: how two differ, and others to overwrite them with."""

from __future__ import annotations

import numpy as np
import torch


def difference(
    a: torch.Tensor, b: torch.Tensor, places: tuple[str, str], *, first_row: int = 0
) -> str:
    """Return the first difference in bits, such as "[3, 5] is 0.5 here and 0.25 there", to follow
    the tensor's name; "" if there is none. `places` say where both are, `first_row` which row of
    the tensor is their first."""
    here, there = places
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        kinds = [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in (a, b)]
        return f" is {kinds[0]} {here} and {kinds[1]} {there}"
    rows = [each.contiguous().reshape(-1, 1).view(torch.uint8) for each in (a, b)]
    if torch.equal(*rows):
        return ""
    first = int((rows[0] != rows[1]).any(dim=1).nonzero()[0])
    index = [int(place) for place in np.unravel_index(first, a.shape)]
    index[:1] = [first_row + row for row in index[:1]]
    values = [_shown(each.reshape(-1)[first]) for each in (a, b)]
    return f"{index} is {values[0]} {here} and {values[1]} {there}"


def _shown(value: torch.Tensor) -> str:
    return f"{value.double().item():.9g}" if value.is_floating_point() else str(value.item())


def other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return 0 and 1, whichever is further from each value: none is within 0.5 of what was there,
    as a constant might be."""
    return (tensor.abs() < 0.5).to(tensor.dtype)
