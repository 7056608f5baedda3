"""What a rank does in `test_planner.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.batching.train_batches import batch_of_tokens, split_mini_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.hybrid_engine.proof.canary import MAX_TOKENS, NUM_PROMPTS, Canary
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.hand_overs import build_manager, engine_config
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.roles.teacher import read_teacher_head
from tests.dist.jobs import first_mini_batch, rank_batch, started
from tests.dist.ppo_jobs import build_models
from tests.live_bytes import LiveBytes
from tests.model_only import VLLMModelOnly

_PACKED = ".cpu_linear(identity)"


def measured_bytes(flags: list[str]) -> dict[str, int]:
    """Bytes that this rank really holds after an update, and the most padding of its buffers."""
    job, actor, _ = started(flags)
    actor.update(first_mini_batch(job))  # makes the moments
    result = _held(actor.state, job.spec.train_layout.world_size)
    dist.destroy_process_group()
    return result


def measured_bytes_of_critic(flags: list[str]) -> dict[str, Any]:
    """The same of a job's critic, after a step of actor and critic; and its layout."""
    models = build_models(flags)
    assert models.critic is not None
    models.take_step(0, models.samples())
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


def bytes_in_phases(flags: list[str], checkpoints: str) -> dict[str, dict[str, int]]:
    """A run phase by phase on this rank: what it holds beside what was there at the beginning, and
    at most. Without KV cache, of which it samples nothing. Writes a Megatron checkpoint at its end.
    """
    with LiveBytes() as live:
        job, actor, shards = started(flags)
        counted = _Counted(live)
        counted.note("build", base=0)
        prompts = [[3, *range(4, 4 + MAX_TOKENS)]] * NUM_PROMPTS
        canary = Canary(actor.log_probs, prompts, interval=1, tolerance=1.0)
        with counted.phase("canary"):
            canary.score()
        with counted.phase("engine"):
            engine = VLLMModelOnly(engine_config(job))
            manager = build_manager(job, shards, engine)
        for name in ("first switch", "hand-over"):
            with counted.phase(name):
                manager.__enter__()
            manager.__exit__(None)
            if name == "first switch":
                batch = full_batch(job)
                with counted.phase("first update"):
                    actor.update(split_mini_batches(batch)[0])
                with counted.phase("train"):
                    actor.update(split_mini_batches(batch)[0])
                with counted.phase("log-probs"):
                    actor.log_probs(batch)
                _learn_from_teacher(job, actor, batch, counted)
        with counted.phase("export"):
            export(
                shards, job.spec.checkpoint, Path(checkpoints) / "exported", bucket_bytes=1 << 20
            )
        with counted.phase("save"):
            megatron_checkpoint.save_checkpoint(job.args, actor.state, 1, Path(checkpoints))
    engine.wake_weights()  # which may not be read while they sleep
    found = dict(counted.found)
    found["rollout weights"] = {"held": _stored_bytes(engine), "peak": 0}
    dist.destroy_process_group()
    return found


def full_batch(job: Job) -> TrainBatch:
    """This rank's batch with the most that is planned: no padding, and all positions are scored."""
    batch = rank_batch(job)
    longest = job.config.data.max_prompt_tokens + job.config.rollout.max_response_tokens
    full = batch_of_tokens([range(3, 3 + longest)] * batch.num_samples)
    return dataclasses.replace(
        full, cuts=batch.cuts, advantages=torch.ones(full.num_tokens), sample_ids=batch.sample_ids
    )


def _learn_from_teacher(job: Job, actor: Actor, batch: TrainBatch, counted: _Counted) -> None:
    """Score a batch by the actor as its own teacher, and learn from that."""
    with counted.phase("teacher"):
        scores = actor.teacher_scores(batch)
    counted.found["teacher"]["tokens"] = batch.num_tokens
    (teacher,) = job.spec.teachers
    with counted.phase("teacher head"):
        if job.config.teacher.with_hidden:
            actor.teacher_head = read_teacher_head(teacher.checkpoint, teacher.shape, actor.state)
    batch = dataclasses.replace(batch, teacher_outputs=scores[:, 1:].contiguous())
    mini_batch = split_mini_batches(batch)[0]
    with counted.phase("train with a teacher"):
        actor.update(mini_batch)


def bytes_after_load(flags: list[str]) -> dict[str, dict[str, int]]:
    """The same for a resumed run: held after loading, and at most during it."""
    with LiveBytes() as live:
        kept = started(flags)
        counted = _Counted(live)
        counted.note("resume", base=0)
        del kept
    dist.destroy_process_group()
    return counted.found


class _Counted:
    """Phase -> bytes of all tensors that it leaves (`held`), and that it had at most (`peak`), both
    beyond what there was when it began."""

    def __init__(self, live: LiveBytes) -> None:
        self.found: dict[str, dict[str, int]] = {}
        self._live = live

    def note(self, name: str, *, base: int) -> None:
        gc.collect()
        held, peak = self._live.live_bytes - base, self._live.peak_bytes - base
        self.found[name] = {"held": held, "peak": peak}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        gc.collect()
        base = self._live.peak_bytes = self._live.live_bytes
        yield
        self.note(name, base=base)


def _stored_bytes(engine: VLLMModelOnly) -> int:
    """Bytes of this rank's vLLM weights, each once. On CPU most linear layers keep theirs
    packed, out of reach but for what they make of the identity."""
    held = {name: p.nbytes for name, p in engine.model.named_parameters() if p.numel()}
    every = {name for name, p in engine.model.named_parameters(remove_duplicate=False) if p.numel()}
    packed = [
        tensor.nbytes
        for name, tensor in engine.stored_tensors()
        if name.endswith(_PACKED) and f"{name.removesuffix(_PACKED)}.weight" not in every
    ]
    return sum(held.values()) + sum(packed)
