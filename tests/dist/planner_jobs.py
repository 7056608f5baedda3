"""What a rank does in `test_planner.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from mcore_rl import megatron_adapter
from mcore_rl.packing import split_mini_batches
from tests.dist.jobs import rank_batch, started


def measured_bytes(flags: list[str]) -> dict[str, int]:
    """Bytes that this rank really holds after an update, and the most padding of its buffers."""
    job, actor, _ = started(flags)
    actor.update(split_mini_batches(rank_batch(job))[0])  # makes the moments
    state = actor.state
    parameters = [p for chunk in state.chunks for p in chunk.parameters()]
    buffers = [b for c in state.model for b in [*c.buffers, *c.expert_parallel_buffers]]
    num_buckets = sum(len(buffer.buckets) for buffer in buffers)
    found = megatron_adapter.train_tensors(state)["optimizer"]
    # A float32 parameter is its own main parameter.
    trained = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    optimizer = [
        tensor
        for name, tensor in found
        if not name.startswith("step ") and tensor.untyped_storage().data_ptr() not in trained
    ]
    result = {
        "weights": _num_bytes(parameters),
        "gradients": _num_bytes([buffer.grad_data for buffer in buffers]),
        "optimizer": _num_bytes(optimizer),
        "padding_elements": 64 * len(parameters)
        + num_buckets * math.lcm(job.train_layout.world_size, 128),
    }
    dist.destroy_process_group()
    return result


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
