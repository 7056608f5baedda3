"""Access to Megatron-FSDP's buffers: weights, their float32 copies, gradients.

Under `--use-megatron-fsdp` `named_parameters` does not return a model's persistent parameters. It
returns either the gathered ones, whose memory is allocated and freed with each layer, or DTensors
of the optimizer's float32 copies. Only the flat buffers of `ParamAndGradBuffer` persist, one set
per parameter group:

    buffer               holds                     full on every data-parallel rank with
    model_weight_buffer  weights for computation   no_shard (has none), optim, optim_grads
    main_weight_buffer   the optimizer's copies    no_shard
    main_grad_buffer     gradients                 no_shard, optim

With `optim_grads_params` a rank holds the rows of each parameter that lie in its range of the
buffer. This module reads and writes the buffers and gathers nothing.

Like `adapter`, which calls it, it depends on Megatron's internals; it was run with 0.19.2.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.model.weight_map import rows_of_flat_range

# Megatron-FSDP warns of prefetched layers at the end of each backward pass, then waits for them.
warnings.filterwarnings("ignore", message="There are still pending all-gather tasks")


@dataclass(frozen=True, slots=True)
class LocalWeight:
    """Some or all rows of a parameter of a model chunk, in their persistent memory.

    `name` and `shape` are the parameter's own on this tensor- and expert-parallel rank. `data` is
    `[rows, *shape[1:]]`, a view of the rows from `first_row`.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int
    data: torch.Tensor


def wrapper_of(chunk: torch.nn.Module) -> Any | None:
    """Return the MegatronFSDP that wraps a model chunk, or None."""
    parameter = next(chunk.parameters(), None)
    return getattr(parameter, "_megatron_fsdp_model", None)


def local_weights(chunk: torch.nn.Module) -> Iterator[LocalWeight]:
    """Yield this rank's part of each parameter of a model chunk, with or without Megatron-FSDP."""
    fsdp = wrapper_of(chunk)
    if fsdp is None:
        for name, parameter in chunk.named_parameters():
            yield LocalWeight(name, tuple(parameter.shape), 0, parameter.data)
        return
    buffer = fsdp.param_and_grad_buffer
    prefix = next(name for name, module in fsdp.module.named_modules() if module is chunk)
    for full_name, parameter in fsdp.raw_param.items():
        name = full_name.removeprefix(f"{prefix}.")
        group = buffer.parameter_groups[buffer.param_to_param_group[parameter]]
        weights = group.model_weight_buffer
        if group.dtype == "float8":
            raise RuntimeError(f"{name} is held in float8, which cannot be handed over")
        shape = tuple(parameter.shape)
        if weights is None:
            yield LocalWeight(name, shape, 0, parameter.data)
            continue
        item = weights.param_idx[parameter]
        first, last = rows_of_flat_range(name, shape, *weights.locate_item_in_global_item(item))
        data = weights.get_item(item).view(last - first, *shape[1:])
        yield LocalWeight(name, shape, first, data)


@torch.no_grad()
def copy_weights_to_main_weights(fsdp: Any) -> None:
    """Copy the weights to the optimizer's copies; Megatron itself copies the other way."""
    for group in fsdp.param_and_grad_buffer.parameter_groups:
        main, weights = group.main_weight_buffer, group.model_weight_buffer
        if main is None:
            continue
        for parameter in group.params:
            item = main.param_idx[parameter]
            if weights is None:
                main.get_item(item).copy_(parameter.data.flatten())
                continue
            shard = main.is_data_distributed or weights.is_data_distributed
            main.get_item(item, only_shard=shard).copy_(weights.get_item(item, only_shard=shard))


def main_weights(fsdp: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield each parameter, this rank's share of the optimizer's copy of it, flat, and the index of
    the share's first element in the parameter."""
    for group in fsdp.param_and_grad_buffer.parameter_groups:
        main = group.main_weight_buffer
        for parameter in [] if main is None else group.params:
            item = main.param_idx[parameter]
            yield parameter, main.get_item(item), main.locate_item_in_global_item(item)[0]


def forget_gathered(fsdp: Any) -> None:
    """Wait for pending all-gathers and free their results, so that the next forward gathers anew.

    Afterwards no computation uses weights older than those in the buffers, and no sharded layer is
    in memory in full. Not collective, if all ranks started the same all-gathers.
    """
    pipeline = fsdp.all_gather_pipeline
    for bucket, is_backward in list(pipeline.param_gather_event_map):
        pipeline.wait_bucket_ready(bucket, is_backward)
    fsdp.synchronize_param_gather()


def finish_param_sync(fsdp: Any) -> None:
    """Wait until this rank's part of the weights holds the last update. Collective."""
    if fsdp.data_parallel_sharding_strategy in ("optim", "optim_grads"):
        # Every rank has the full weights, but an update changed only a part of them on each.
        fsdp.start_param_sync(force_sync=True)
    forget_gathered(fsdp)


def add_tensors(by_kind: dict[str, list[tuple[str, torch.Tensor]]], fsdp: Any, number: int) -> None:
    """Add the tensors that model chunk `number` keeps in memory to `adapter.train_tensors`' result.

    `train_tensors` itself adds the optimizer's parameters and their gradients.
    """
    for index, group in enumerate(fsdp.param_and_grad_buffer.parameter_groups):
        for kind, buffer in (
            ("parameters", "model_weight_buffer"),
            ("optimizer", "main_weight_buffer"),
            ("gradients", "main_grad_buffer"),
        ):
            if (flat := getattr(group, buffer)) is not None:
                name = f"{buffer} of parameter group {index} of model chunk {number}"
                by_kind[kind].append((name, flat.data))
    # Parameters outside the buffers: all with no_shard; with optim_grads_params the gathered
    # embedding and head (the others are empty).
    by_kind["parameters"] += [(name, p.data) for name, p in fsdp.raw_param.items()]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, and any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)
