"""What a rank does in `test_planner.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl import megatron_adapter
from mcore_rl.batching.train_batches import split_mini_batches
from tests.dist.jobs import rank_batch, started
from tests.dist.ppo_jobs import build_models, scored_rollouts, take_step


def measured_bytes(flags: list[str]) -> dict[str, int]:
    """Bytes that this rank really holds after an update, and the most padding of its buffers."""
    job, actor, _ = started(flags)
    actor.update(split_mini_batches(rank_batch(job))[0])  # makes the moments
    result = _held(actor.state, job.train_layout.world_size)
    dist.destroy_process_group()
    return result


def measured_bytes_of_critic(flags: list[str]) -> dict[str, Any]:
    """The same of a job's critic, after a step of actor and critic; and its layout."""
    models = build_models(flags)
    assert models.critic is not None
    scored = scored_rollouts(models.job)
    take_step(models.learner, 0, models.learner.make_batch(0, scored), scored)
    layout = models.critic.world.layout
    result = {**_held(models.critic.state, layout.world_size), "layout": layout.describe()}
    dist.destroy_process_group()
    return result


def _held(state: megatron_adapter.TrainState, world_size: int) -> dict[str, int]:
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
    return {
        "weights": _num_bytes(parameters),
        "gradients": _num_bytes([buffer.grad_data for buffer in buffers]),
        "optimizer": _num_bytes(optimizer),
        "padding_elements": 64 * len(parameters) + num_buckets * math.lcm(world_size, 128),
    }


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
