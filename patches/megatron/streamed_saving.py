"""A checkpoint is written tensor by tensor.

Symptom: while a checkpoint is written, a rank needs host memory for a copy of all that it writes:
on CPU of every weight, on a GPU of weights and optimizer. A rank also starts a process that does
nothing but hold a queue.

Cause: Megatron writes by `FileSystemWriterAsync`, synchronously as well. It first takes all tensors
to the host, and on CPU clones those that are views, as weights are of their buffer.

Why safe: files and their content are the same. PyTorch's own writer, from which Megatron's is
derived, gets the same tensors and the same planner, and copies one tensor at a time.
`--async-save` is refused here, `--enable-msc` too.

Upstream: no issue known.

Drop when: saving synchronously needs no copy of the state.

Versions: megatron-core 0.17 to 0.20.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_rl.patches.registry import Patch, require_parameters


def needed() -> bool:
    """Always."""
    return True


def apply() -> None:
    """Replace the synchronous save of the `torch_dist` format."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    require_parameters(
        strategies.TorchDistSaveShardedStrategy.save, "self", "sharded_state_dict", "checkpoint_dir"
    )
    require_parameters(
        strategies.mcore_to_pyt_state_dict,
        "state_dict",
        "is_loading",
        "init_device",
        "load_legacy_1d_flatten_tensors",
    )
    require_parameters(
        strategies._replace_state_dict_keys_with_sharded_keys,
        "sharded_state_dict",
        "keep_only_main_replica",
    )
    strategies.TorchDistSaveShardedStrategy.save = _save


def _save(self: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
    """Write this rank's part. Collective."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from torch.distributed import checkpoint

    by_key, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(
        sharded_state_dict, self.keep_only_main_replica
    )
    checkpoint.save(
        strategies.mcore_to_pyt_state_dict(by_key, False),
        storage_writer=checkpoint.FileSystemWriter(checkpoint_dir),
        planner=strategies.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        ),
    )


PATCH = Patch(
    name="megatron.streamed_saving",
    package="megatron-core",
    reason="writing a checkpoint needs no copy of it in host memory",
    needed=needed,
    apply=apply,
)
