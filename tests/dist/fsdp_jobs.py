"""What a rank does in `test_fsdp.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_rl.batching.train_batches import split_mini_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.hybrid_engine.switch_report import TO_ROLLOUT
from mcore_rl.hybrid_engine.weight_stream import missing_bytes
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.boxes import volume
from mcore_rl.trainer.hand_overs import build_offloader
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.resume.folders import iteration_name
from mcore_rl.verify import stored_digests
from tests.dist.jobs import (
    first_mini_batch,
    handed_over_from_disk,
    log_probs_of_random_tokens,
    rank_batch,
    started,
)


def learn(flags: list[str], target: str) -> dict[str, Any]:
    """The checkpoint exported again, then two updates, and the weights and log-probs after them.

    Between the updates what `--rl-offload` names goes away and comes back.
    """
    job, actor, shards = started(flags, in_float32=True)
    offloader = build_offloader(job, actor.state)
    export(shards, job.spec.checkpoint, Path(target) / "before", max_file_bytes=1 << 17)
    found: dict[str, Any] = {
        "held": num_held(shards),
        "log_probs": log_probs_of_random_tokens(job, actor).nan_to_num().tolist(),
        "updates": [],
    }
    for mini_batch in split_mini_batches(rank_batch(job)):
        stats = actor.update(mini_batch)
        sums = {name: float(getattr(stats.sums, name)) for name in type(stats.sums).__slots__}
        found["updates"].append({"grad_norm": stats.result.grad_norm, **sums})
        if offloader.what:
            offloader.offload()
            found["offloaded"] = offloader.stats.moved_bytes + offloader.stats.dropped_bytes
            offloader.onload()
    export(shards, job.spec.checkpoint, Path(target) / "after", max_file_bytes=1 << 17)
    found["log_probs_after"] = log_probs_of_random_tokens(job, actor).nan_to_num().tolist()
    dist.destroy_process_group()
    return found


def num_held(shards: ModelShards) -> int:
    """Elements of the checkpoint on this rank."""
    return sum(volume(box) for name in shards.tensors() for box in shards.boxes(name))


def hand_over(flags: list[str]) -> dict[str, Any]:
    """Load by vLLM from disk, zero, hand over, compare; then an update and a second hand-over."""
    job, actor, shards = started(flags)
    engine, manager, reports, from_disk, handed_over = handed_over_from_disk(job, shards)
    actor.update(first_mini_batch(job, has_reference=False))
    with manager:
        updated = stored_digests(engine)
    result = {
        "stored_equal": handed_over == from_disk and len(from_disk) > 10,
        "num_changed_by_update": sum(updated[name] != from_disk[name] for name in from_disk),
        "received": [r.received_bytes for r in reports if r.direction == TO_ROLLOUT],
        "missing": missing_bytes(
            manager.stream.tensors,
            {name: shards.boxes(name) for name in shards.tensors()},
            manager.stream.need,
        ),
        "attested": all(r.attested for r in reports if r.direction == TO_ROLLOUT),
    }
    engine.close()
    dist.destroy_process_group()
    return result


def written_weights_count(flags: list[str]) -> dict[str, Any]:
    """An update; the weights of before it put in and taken out again, as of a reference policy."""
    job, actor, _ = started(flags)
    before = log_probs_of_random_tokens(job, actor)
    weights = megatron_adapter.weights(actor.state)
    kept = [weight.clone() for weight in weights]
    actor.update(first_mini_batch(job, has_reference=False))
    after = log_probs_of_random_tokens(job, actor)

    def swap() -> torch.Tensor:
        for weight, other in zip(weights, kept, strict=True):
            current = weight.clone()
            weight.copy_(other)
            other.copy_(current)
        megatron_adapter.weights_written(actor.state)
        return log_probs_of_random_tokens(job, actor)

    result = {
        "moved": not same(before, after),
        "old_again": same(swap(), before),
        "new_again": same(swap(), after),
    }
    dist.destroy_process_group()
    return result


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def save_and_continue(flags: list[str], target: str) -> str:
    """An update, a checkpoint, another update; the weights go to `continued`."""
    job, actor, shards = started(flags, in_float32=True)
    first, second = split_mini_batches(rank_batch(job))
    actor.update(first)
    megatron_checkpoint.save_checkpoint(job.args, actor.state, 1, Path(target) / "saved")
    _update_and_export(job, actor, shards, second, Path(target) / "continued")
    return iteration_name(1)


def load_and_continue(flags: list[str], target: str) -> int:
    """That checkpoint, and the second update; the weights go to `resumed`."""
    loading = ["--load", str(Path(target) / "saved")]
    job, actor, shards = started([*flags, *loading], in_float32=True)
    _update_and_export(
        job, actor, shards, split_mini_batches(rank_batch(job))[1], Path(target) / "resumed"
    )
    return actor.state.iteration


def _update_and_export(
    job: Job, actor: Any, shards: ModelShards, batch: TrainBatch, target: Path
) -> None:
    actor.update(batch)
    export(shards, job.spec.checkpoint, target)
    dist.destroy_process_group()


def nonfinite_gradient(flags: list[str]) -> str:
    """A gradient becomes nan on rank 1 alone, and no update may follow; what was raised."""
    job, actor, _ = started(flags)
    assert os.environ["WORLD_SIZE"] == "2"
    finish = megatron_adapter.finished_gradients

    def spoilt(state: megatron_adapter.TrainState) -> Any:
        for name, gradient in finish(state):
            if dist.get_rank() == 1 and gradient.numel():
                gradient.view(-1)[0] = float("nan")
            yield name, gradient

    megatron_adapter.finished_gradients = spoilt
    before = [weight.clone() for weight in megatron_adapter.weights(actor.state)]
    with pytest.raises(RuntimeError) as raised:
        actor.update(first_mini_batch(job, has_reference=False))
    assert all(map(torch.equal, before, megatron_adapter.weights(actor.state)))
    dist.destroy_process_group()
    return str(raised.value)
