"""Dither: float32 copies of 16-bit weights that start anywhere in their rounding intervals.

An optimizer that is built on 16-bit weights starts from copies whose low bits are zero: each lies
in the middle of the interval that rounds to its weight. Until updates have moved a copy by half an
interval its weight does not change at all. In bfloat16 the half is 2^-9 to 2^-8 of a weight: for a
weight of 0.05, 122 updates of 1e-6 in one direction. Forward passes and engines compute with the
weights, so at first a policy does not show what its optimizer has learnt.

Dithered copies are spread evenly over the intervals, as they are in the middle of a training. All
weights stay the same. A small update then changes the share of the weights that it is of their
intervals, so on average none is lost (Roberts, "Picture coding using pseudo-random noise", 1962).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mcore_rl.megatron import fsdp_buffers

# The low bits of float32 that rounding to the dtype drops.
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
# Elements hashed at a time: temporaries of 256 KiB in a processor's cache, of 128 MiB elsewhere.
_CHUNK, _CHUNK_OF_DEVICE = 1 << 15, 1 << 24


def dither_optimizer(optimizer: Any) -> None:
    """Dither the float32 copies of one of Megatron's optimizers.

    Not collective. Replicas of a parameter get the same copies, on any ranks. Transformer Engine's
    precision-aware optimizer makes its copies in the first update, which then dithers them.
    """
    inner = getattr(optimizer, "optimizer", None)
    if getattr(inner, "master_weights", False):
        dither_first_step(inner, [(share, at) for _, share, at in main_parameters(optimizer)])
    _dither_all(main_parameters(optimizer))


def dither_fsdp(fsdp: Any) -> None:
    """`dither_optimizer` for the float32 copies in Megatron-FSDP's buffers."""
    _dither_all(fsdp_buffers.main_weights(fsdp))


def dither_first_step(adam: Any, shares: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Make the first step of Transformer Engine's `FusedAdam` begin with dithered copies.

    `shares` are its 16-bit parameters, each with the index of its first element in the model's
    parameter. With `store_param_remainders` it keeps, in int16, the difference of a copy's bits to
    those of the parameter, which is an offset as in `dither`.
    """

    waiting = list(shares)

    def make_copies(*_: Any) -> None:
        while waiting:
            share, first = waiting.pop()
            if adam.state[share] or share.dtype not in _DROPPED_BITS:
                continue  # from a checkpoint, or in float32
            has_remainders = adam.store_param_remainders and share.dtype == torch.bfloat16
            adam.initialize_state(share, has_remainders)
            copies = adam.state[share]["master_param"]
            if has_remainders:
                values = share.detach().float()
                dither(values, share.dtype, first)
                bits = values.view(torch.int32) - share.detach().float().view(torch.int32)
                copies.copy_(bits)
            else:
                dither(copies, share.dtype, first)

    adam.register_step_pre_hook(make_copies)  # torch iterates over them: one cannot remove itself


def main_parameters(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield each parameter that an optimizer trains, this rank's share of its copy, flat or not,
    and the index of the share's first element in the parameter."""
    if not hasattr(optimizer, "model_param_group_index_map"):  # not distributed
        groups = zip(
            getattr(optimizer, "float16_groups", ()),
            getattr(optimizer, "fp32_from_float16_groups", ()),
            strict=True,
        )
        for weights, copies in groups:
            for weight, copy in zip(weights, copies, strict=True):
                yield weight, copy, 0
        return
    inner = optimizer.optimizer
    of_offload = getattr(inner, "param_to_fp32_param", {})  # --optimizer-cpu-offload
    for weight, (group, order) in optimizer.model_param_group_index_map.items():
        share = inner.param_groups[group]["params"][order]
        first = optimizer._get_model_param_range_map(weight)["param"].start
        yield weight, of_offload.get(share, share), first


def _dither_all(parameters: Iterator[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
    for weight, copies, first in parameters:
        dither(copies, weight.dtype, first)


@torch.no_grad()
def dither(copies: torch.Tensor, dtype: torch.dtype, first: int) -> None:
    """Dither float32 copies of weights of `dtype`, of any shape, in place; others stay. `first` is
    the index of the first in its parameter."""
    dropped = _DROPPED_BITS.get(dtype)
    if dropped is None or copies.dtype != torch.float32:
        return
    flat = copies.detach().view(-1)
    half = 1 << (dropped - 1)
    chunk = _CHUNK if flat.device.type == "cpu" else _CHUNK_OF_DEVICE
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk]
        bits = part.view(torch.int32)
        index = torch.arange(first + start, first + start + part.numel(), device=part.device)
        offsets = _hashes(index * 0x1E3779B1 ^ bits) % (2 * half - 1) - (half - 1)  # never half
        # The bits of a float, read as an integer, count the floats between 0 and it. Zero, which
        # has no interval in these steps, stays.
        bits += torch.where(part == 0, 0, offsets).to(torch.int32)


@torch.no_grad()
def dithered(
    weight: torch.Tensor, dtype: torch.dtype, places: Sequence[torch.Tensor], at: Any = ...
) -> torch.Tensor:
    """Return float32 copies of a weight that are spread over intervals of a 16-bit `dtype`, for a
    sum or a rounding to it. Weights of that dtype round to themselves.

    `places` are the coordinates in the full weight, int64, one tensor per dimension, so that a
    slice gets what the full weight gets. `weight` are the values that `at` selects from there.
    """
    dropped = _DROPPED_BITS[dtype]
    offsets = torch.zeros((), dtype=torch.int32, device=weight.device)
    for dimension, coordinates in enumerate(places):
        hashed = (_hashes(coordinates + (dimension << 31)) & 0xFFFF).to(torch.int32)
        offsets = offsets.unsqueeze(-1) + hashed
    offsets = offsets[at] & ((1 << dropped) - 2)  # even: never half an interval
    offsets -= (1 << (dropped - 1)) - 1
    copies = weight.float() if weight.itemsize < 4 else weight.clone()
    copies.view(torch.int32).add_(offsets.masked_fill_(weight == 0, 0))
    return copies


def _hashes(values: torch.Tensor) -> torch.Tensor:
    """Return hashes in [0, 2^32), int64, of int64 values `[n]`, by 31-bit multipliers."""
    mixed = values & 0xFFFFFFFF
    for multiplier in (0x7FEB352D, 0x31848BAB):
        mixed = ((mixed ^ (mixed >> 16)) * multiplier) & 0xFFFFFFFF
    return mixed ^ (mixed >> 15)
