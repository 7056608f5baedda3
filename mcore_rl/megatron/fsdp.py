"""What Megatron-FSDP keeps where: its weights, their float32 copies, its gradients.

Under `--use-megatron-fsdp` the parameters of a model are not where `named_parameters` says. In
turns they are the gathered ones, whose memory comes and goes with each layer, and DTensors of the
optimizer's float32 copies. What lasts are the flat buffers of `ParamAndGradBuffer`, one set for
each group of parameters:

    buffer               holds                     whole on every data-parallel rank with
    model_weight_buffer  what the model computes   no_shard (which has none), optim, optim_grads
                         with
    main_weight_buffer   the optimizer's copies    no_shard
    main_grad_buffer     gradients                 no_shard, optim

With `optim_grads_params` a rank holds of every parameter the rows that its stretch of the buffer
has. Everything here reads and writes the buffers; nothing is gathered.

Like `megatron_adapter`, which calls it, this module knows Megatron; it was run with 0.19.2.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.model.weight_map import rows_of_flat_range

# Said at the end of each backward pass, of layers that were fetched ahead; it waits for them.
warnings.filterwarnings("ignore", message="There are still pending all-gather tasks")


@dataclass(frozen=True, slots=True)
class LocalWeight:
    """Some or all rows of one of a model chunk's parameters, in the memory where they stay.

    `name` and `shape` are the parameter's own on this tensor- and expert-parallel rank. `data` is
    `[rows, *shape[1:]]` and a view: rows from `first_row`.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int
    data: torch.Tensor


def wrapper_of(chunk: torch.nn.Module) -> Any | None:
    """The MegatronFSDP that a model chunk is in, or None."""
    parameter = next(chunk.parameters(), None)
    return getattr(parameter, "_megatron_fsdp_model", None)


def local_weights(chunk: torch.nn.Module) -> Iterator[LocalWeight]:
    """What this rank holds of the parameters of a model chunk, with or without Megatron-FSDP."""
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
    """Let the optimizer's copies follow the weights, as Megatron does the other way round."""
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


def forget_gathered(fsdp: Any) -> None:
    """Wait for what is being gathered, and give it up: the next forward gathers anew.

    After this nobody computes with weights older than those in the buffers, and of the layers that
    are sharded no whole one is in memory. Not collective, as long as all ranks began the same.
    """
    pipeline = fsdp.all_gather_pipeline
    for bucket, is_backward in list(pipeline.param_gather_event_map):
        pipeline.wait_bucket_ready(bucket, is_backward)
    fsdp.synchronize_param_gather()


def finish_param_sync(fsdp: Any) -> None:
    """Wait until what this rank holds of the weights is of the last update. Collective."""
    if fsdp.data_parallel_sharding_strategy in ("optim", "optim_grads"):
        # The weights are whole on every rank, and an update changed a part of them on each.
        fsdp.start_param_sync(force_sync=True)
    forget_gathered(fsdp)


def add_tensors(found: dict[str, list[tuple[str, torch.Tensor]]], fsdp: Any, number: int) -> None:
    """Add what model chunk `number` keeps in memory to what `megatron_adapter.train_tensors` finds.

    The optimizer's parameters and their gradients are left to it.
    """
    for index, group in enumerate(fsdp.param_and_grad_buffer.parameter_groups):
        for kind, buffer in (
            ("parameters", "model_weight_buffer"),
            ("optimizer", "main_weight_buffer"),
            ("gradients", "main_grad_buffer"),
        ):
            if (flat := getattr(group, buffer)) is not None:
                name = f"{buffer} of parameter group {index} of model chunk {number}"
                found[kind].append((name, flat.data))
    # Those that are in no buffer: with no_shard all; with optim_grads_params what stays gathered,
    # of embedding and head, the others being empty.
    found["parameters"] += [(name, p.data) for name, p in fsdp.raw_param.items()]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)
