"""A checkpoint is written tensor by tensor.

Symptom: while a checkpoint is written, a rank needs host memory for a copy of everything it writes:
on CPU of every weight, on a GPU of weights and optimizer. A rank also starts a process that only
holds a queue.

Cause: Megatron uses `FileSystemWriterAsync` even for synchronous saves. It first copies all tensors
to the host, and on CPU clones views, such as weights in their buffer.

Why safe: files and their content are the same. PyTorch's own function, from which Megatron's is
derived, gets the same tensors and the same planner. PyTorch's `_write_item` writes each tensor
before the next is copied. (PyTorch's own loop keeps the last copy of each name to the end.)
mcore_rl refuses `--enable-msc`, and `--async-save` has a writer of its own (`background_saving`).

Upstream: no issue known.

Drop when: saving synchronously needs no copy of the state.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch

from mcore_rl.patches.registry import Patch, require_parameters


def apply() -> None:
    """Replace the synchronous save of the `torch_dist` format."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from torch.distributed.checkpoint import filesystem

    require_parameters(
        strategies.TorchDistSaveShardedStrategy.save, "self sharded_state_dict checkpoint_dir"
    )
    require_parameters(
        strategies.mcore_to_pyt_state_dict,
        "state_dict is_loading init_device load_legacy_1d_flatten_tensors",
    )
    require_parameters(
        strategies._replace_state_dict_keys_with_sharded_keys,
        "sharded_state_dict keep_only_main_replica",
    )
    require_parameters(
        filesystem._write_item, "transforms stream data write_item storage_key serialization_format"
    )
    strategies.TorchDistSaveShardedStrategy.save = _save


def _save(self: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
    """Write this rank's part. Collective."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from torch.distributed import checkpoint

    by_key, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(
        sharded_state_dict, self.keep_only_main_replica
    )
    writer = checkpoint.FileSystemWriter(checkpoint_dir)
    writer.write_data = functools.partial(  # type: ignore[method-assign]  # of this one alone
        _write, writer
    )
    checkpoint.save(
        strategies.mcore_to_pyt_state_dict(by_key, False),
        storage_writer=writer,
        planner=strategies.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        ),
    )


def _write(writer: Any, plan: Any, planner: Any) -> Any:
    """Replace `FileSystemWriter.write_data`, which keeps a copy of each tensor until the end."""
    from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _write_item
    from torch.distributed.checkpoint.planner import WriteItemType

    written: torch.futures.Future[list[Any]] = torch.futures.Future()
    if not plan.items:
        written.set_result([])
        return written
    name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
    results = []
    with (Path(writer.path) / name).open("wb") as stream:
        for item in plan.items:
            data = planner.resolve_data(item)
            if item.type != WriteItemType.BYTE_IO:
                data = _on_host(data)
            kind = writer.serialization_format
            results.append(_write_item(writer.transforms, stream, data, item, name, kind))
            del data  # before the next is copied
        stream.flush()
        os.fsync(stream.fileno())
    written.set_result(results)
    return written


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor for storage: on the host, alone in its storage, not quantized."""
    tensor = tensor.detach()
    if tensor.is_cuda and "dequantize" in type(tensor).__dict__:  # Transformer Engine's
        tensor = tensor.dequantize()
    tensor = tensor.cpu()
    is_view = tensor.untyped_storage().size() != tensor.nbytes
    return tensor.clone() if is_view else tensor


PATCH = Patch(
    "megatron.streamed_saving", "writing a checkpoint needs no copy of it in host memory", apply
)
