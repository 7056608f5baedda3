"""Saving and loading through Megatron: the training state, weights only, and plain tensors."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcore_rl.common import objects
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import background
from mcore_rl.model.hybrid_pattern import has_mamba


def loads_checkpoint(args: argparse.Namespace) -> bool:
    """Return whether `setup` reads a checkpoint; with --finetune it still starts at iteration 0."""
    from megatron.training.checkpointing import checkpoint_exists

    named = args.load is not None and bool(args.ckpt_step)  # needs no tracker file
    return named or any(map(checkpoint_exists, (args.load, args.pretrained_checkpoint)))


def save_checkpoint(
    args: argparse.Namespace, state: megatron_adapter.TrainState, iteration: int, folder: Path
) -> None:
    """Write a Megatron checkpoint below `folder`. Collective.

    With `args.async_save` it only copies what it writes; `background.finish` waits for the files.
    """
    from megatron.training.checkpointing import save_checkpoint as save

    background.use()
    args.iteration = args.curr_iteration = iteration
    # Megatron reads the folder, and what to delete in it, from the arguments.
    with background.with_arguments(
        args, save=str(folder), save_retain_interval=None, **_pattern_of(state)
    ):
        save(iteration, state.model, state.optimizer, state.scheduler, 0)
    state.iteration = iteration


def save_weights(
    args: argparse.Namespace, state: megatron_adapter.TrainState, iteration: int, folder: Path
) -> None:
    """Write only the weights as a Megatron checkpoint below `folder`, as `save_checkpoint`."""
    from megatron.training.checkpointing import save_checkpoint as save

    background.use()
    alone = {"no_save_optim": True, "no_save_rng": True, **_pattern_of(state)}
    with background.with_arguments(args, save=str(folder), save_retain_interval=None, **alone):
        save(iteration, state.model, None, None, 0)


def _pattern_of(state: megatron_adapter.TrainState) -> dict[str, str]:
    """Return the argument without which Megatron takes a checkpoint for a GPTModel's, and refuses
    to load it into a model with Mamba-2 layers."""
    chunk: Any = state.chunks[0]
    if not has_mamba(chunk):
        return {}
    return {"hybrid_layer_pattern": chunk.hybrid_layer_pattern.replace("|", "")}


def load_weights(
    args: argparse.Namespace, state: megatron_adapter.TrainState, iteration: int, folder: Path
) -> None:
    """Load a checkpoint's weights, saved in any layout, into the model. Collective.

    The optimizer's copies are not updated; see `megatron_adapter.reload_main_params`.
    """
    from megatron.training.checkpointing import load_checkpoint

    alone = {"no_load_optim": True, "no_load_rng": True, "consumed_train_samples": 0}
    with background.with_arguments(args, load=str(folder), ckpt_step=iteration, **alone):
        load_checkpoint(state.model, None, None)
    megatron_adapter.weights_written(state)


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write this rank's tensors as a distributed checkpoint with one row per rank. Collective.

    A tensor has the same shape and dtype on all ranks.
    """
    from megatron.core import dist_checkpointing

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    objects.barrier()
    rows = {
        name: dist_checkpointing.ShardedTensor.from_rank_offsets(
            name, tensor[None].contiguous(), (0, rank, world_size)
        )
        for name, tensor in tensors.items()
    }
    dist_checkpointing.save(rows, str(folder))


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Load what `save_tensors` wrote: for each name, the rows of all ranks. Collective."""
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_tensors_metadata(str(folder))
    whole = {
        name: dist_checkpointing.ShardedTensor.from_rank_offsets(
            name,
            torch.empty(tensor.global_shape, dtype=tensor.dtype),
            replica_id=torch.distributed.get_rank(),
        )
        for name, tensor in metadata.items()
    }
    tensors: dict[str, torch.Tensor] = dist_checkpointing.load(whole, str(folder))
    return tensors
