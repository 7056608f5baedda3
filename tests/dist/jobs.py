"""What a rank does in the distributed tests; `tests.rank_pool` calls these by name."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl import verify
from mcore_rl.batching.assignment import plan_step
from mcore_rl.batching.train_batches import batch_of_tokens, split_mini_batches, take
from mcore_rl.batching.types import Prompt, TrainBatch
from mcore_rl.common import objects
from mcore_rl.common.run_output import setup_logging
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.switch_report import ReshardReport, log_reshard
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.job.start import start
from mcore_rl.megatron.rng import RngState
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.hand_overs import build_manager, engine_config
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.models import build_actor
from mcore_rl.trainer.step_metrics import update_metrics
from mcore_rl.verify import overwrite, stored_digests, stored_otherwise
from tests.dist.sleeping import SleepLog, memory_gone_while_asleep
from tests.engine_samples import sample_responses
from tests.model_only import VLLMModelOnly

from megatron.core.tensor_parallel import get_cuda_rng_tracker  # isort: skip  (after the patches)


def handed_over_from_disk(
    job: Job, shards: Any
) -> tuple[
    VLLMModelOnly,
    MegatronVLLMShardingManager,
    list[ReshardReport],
    dict[str, Any],
    dict[str, Any],
]:
    """Load by vLLM from disk, zero, hand over: what there is, and digests of both loads."""
    engine = VLLMModelOnly(engine_config(job, load_format="auto"))
    from_disk = stored_digests(engine)
    manager = build_manager(job, shards, engine)
    reports: list[ReshardReport] = []
    manager.on_reshard_end.append(reports.append)
    assert overwrite(engine, job, from_disk) == []
    with manager:
        handed_over = stored_digests(engine)
    return engine, manager, reports, from_disk, handed_over


def started(
    flags: list[str], *, in_float32: bool = False, provider: Any = None
) -> tuple[Job, Actor, Any]:
    """Megatron running with a checkpoint in it; with `in_float32` exports are exact.
    `provider` is a fork's."""
    setup_logging()
    with open("/dev/null", "w") as log:
        job = start(flags, log=log, has_engine=False)
        if in_float32:
            job = as_float32(job)
        state, shards = build_actor(job, provider, log=log)
    return job, Actor(job, state), shards


def as_float32(job: Job) -> Job:
    """The job as if its checkpoints were of float32, so that exports are exact."""

    def widened(checkpoint: Any) -> Any:
        tensors = {
            name: dataclasses.replace(info, dtype="float32", itemsize=4)
            for name, info in checkpoint.tensors.items()
        }
        return dataclasses.replace(checkpoint, tensors=tensors)

    critic = job.spec.critic
    if critic is not None:
        critic = dataclasses.replace(critic, checkpoint=widened(critic.checkpoint))
    checkpoint = widened(job.spec.checkpoint)
    spec = dataclasses.replace(job.spec, checkpoint=checkpoint, critic=critic)
    return dataclasses.replace(job, spec=spec)


def random_tokens(vocab_size: int, samples: int = 8, positions: int = 32) -> torch.Tensor:
    """The same `[samples, positions]` in every layout."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, vocab_size, (samples, positions), generator=generator)


def random_batch(vocab_size: int) -> TrainBatch:
    """All samples of a step, of different lengths and with everything an update reads; the same in
    every layout."""
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(14, 33, (8,), generator=generator)
    # Two samples each after the same prompt.
    first_of_each = torch.randint(2, 12, (4,), generator=generator).repeat_interleave(2)
    first = first_of_each.repeat_interleave(lengths)
    noise = torch.randn(6, int(lengths.sum()), generator=generator)
    starts = lengths.cumsum(0) - lengths
    position = torch.arange(len(first)) - starts.repeat_interleave(lengths)
    last = (lengths - 1).repeat_interleave(lengths)
    rows = random_tokens(vocab_size).clone()
    for sample in range(1, 8, 2):
        rows[sample, : first_of_each[sample] + 1] = rows[sample - 1, : first_of_each[sample] + 1]
    return TrainBatch(
        token_ids=torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)]),
        lengths=lengths,
        prompt_lengths=first_of_each + 1,
        sample_ids=torch.arange(8),
        loss_mask=(position >= first) & (position < last),
        rollout_log_probs=noise[0] * 0.1 - 6,
        cuts=((8,),),
        advantages=noise[3],
        old_log_probs=noise[1] * 0.2 - 6.4,
        ref_log_probs=noise[2] * 0.2 - 6.4,
        values=noise[4],
        returns=noise[5],
    )


def rank_part(job: Job, batch: TrainBatch, num_mini_batches: int = 2) -> TrainBatch:
    """What this rank trains on of a step's samples, divided as the job's flags say."""
    layout = job.spec.train_layout
    cuts = plan_step(
        batch.lengths.numpy(),
        num_mini_batches=num_mini_batches,
        dp_size=layout.dp_size,
        batching=job.micro_batching(),
    )
    return take(batch, cuts[layout.dp_rank(dist.get_rank())])


def rank_batch(job: Job) -> TrainBatch:
    """This rank's part of `random_batch`, of two mini-batches."""
    return rank_part(job, random_batch(job.spec.shape.vocab_size))


def first_mini_batch(job: Job, *, has_reference: bool = True) -> TrainBatch:
    """This rank's part of the first mini-batch, perhaps without the reference's log-probs."""
    batch = split_mini_batches(rank_batch(job))[0]
    return batch if has_reference else dataclasses.replace(batch, ref_log_probs=None)


def log_probs_of_random_tokens(job: Job, actor: Actor) -> torch.Tensor:
    """Log-probs of `random_tokens`, `[samples, positions]`; the last position scores nothing."""
    return log_probs_of_tokens(job, actor, random_tokens(job.spec.shape.vocab_size))


def log_probs_of_tokens(job: Job, actor: Actor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs of `tokens`, `[samples, positions]`; the last position scores nothing."""
    mine = rank_part(job, batch_of_tokens(tokens.tolist()))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (mine.sample_ids, actor.log_probs(mine)))
    whole = torch.full(tokens.shape, float("nan"))
    for samples, log_probs in parts:
        whole[samples] = log_probs.view(len(samples), -1)
    return whole


def log_probs_of(flags: list[str], tokens: list[list[int]]) -> list[list[float]]:
    """Log-probs of tokens by Megatron, as `log_probs_of_tokens`."""
    job, actor, _ = started(flags)
    log_probs = log_probs_of_tokens(job, actor, torch.tensor(tokens))
    dist.destroy_process_group()
    return log_probs.tolist()


def log_probs_and_export(flags: list[str], target: str) -> list[list[float]]:
    """Log-probs of `random_tokens` by Megatron, then the model back as a checkpoint."""
    job, actor, shards = started(flags)
    log_probs = log_probs_of_random_tokens(job, actor)
    # Several files and several writers, whatever the size of the model.
    export(shards, job.spec.checkpoint, Path(target), max_file_bytes=1 << 17, bucket_bytes=1 << 14)
    dist.destroy_process_group()
    return log_probs.tolist()


def metrics_of_updates(flags: list[str], num_updates: int = 8) -> list[dict[str, float]]:
    """What a run measures in updates on one mini-batch."""
    job, actor, _ = started(flags)
    batch = first_mini_batch(job, has_reference=False)
    found = [update_metrics([actor.update(batch)]) for _ in range(num_updates)]
    dist.destroy_process_group()
    return found


def verify_megatron(flags: list[str], *, spoilt: str | None = None) -> int:
    """`-m mcore_rl.verify`; returns its exit code. `spoilt` is a parameter that changes before its
    export."""

    def build(job: Job, **options: Any) -> Any:
        state, shards = build_actor(job, **options)
        for name, parameter in state.chunks[0].named_parameters():
            parameter.data += name == spoilt
        return state, shards

    with mock.patch.object(verify, "build_actor", build):
        return verify.main(flags)


def hand_over(flags: list[str]) -> dict[str, Any]:
    """Everything that is asked of a hand-over, in one start of the engines.

    What sleeps of an engine has no memory meanwhile.
    """
    with memory_gone_while_asleep() as log:
        return _hand_over(flags, log)


def _hand_over(flags: list[str], log: SleepLog) -> dict[str, Any]:
    job, actor, shards = started(flags)
    engine = VLLMEngine(engine_config(job, load_format="auto"))
    from_disk = stored_digests(engine)
    manager = build_manager(job, shards, engine)
    events: list[tuple[str, ReshardReport]] = []
    manager.on_reshard_start.append(lambda report: events.append(("start", report)))
    manager.on_reshard_end.append(lambda report: events.append(("end", report)))
    assert overwrite(engine, job, from_disk) == []

    before = RngState.capture()
    expected_draws = _draw()
    before.restore()
    log.events.clear()
    with manager:
        events_of_switch = list(log.events)
        handed_over = stored_digests(engine)
        spoken_to = sorted(manager.stream.transfer.stats.peer_ranks)
        first = _sample(engine, job)
        torch.rand(3)  # rollout draws from the same generators
    draws = _draw()

    # An update changes the weights, and the next hand-over must bring them.
    first_biases = _biases_of_trainer(actor)
    actor.update(first_mini_batch(job, has_reference=False))
    with manager:
        updated = stored_digests(engine)
        in_engine = {
            name: (str(tensor.dtype), tensor.tolist())
            for name, tensor in engine.stored_tensors()
            if name.endswith("e_score_correction_bias")
        }
        second = _sample(engine, job)
        prompt = random_tokens(job.spec.shape.vocab_size)[0].tolist()
        vllm = engine.prompt_log_probs([prompt])[0]
        differing = stored_otherwise(engine, job, from_disk)
        is_from_disk = stored_digests(engine) == from_disk
    megatron = log_probs_of_random_tokens(job, actor)
    result = {
        "stored_equal": from_disk == handed_over,
        "num_stored": len(from_disk),
        "num_changed_by_update": sum(updated[n] != handed_over[n] for n in handed_over),
        "differing": differing,
        "loaded_again_from_disk": is_from_disk,
        "biases": (in_engine, _biases_of_trainer(actor), first_biases),
        "rng_restored": expected_draws == draws,
        "first_tokens": first,
        "second_tokens": second,
        "engine": [engine_index(job), job.spec.rollout_layout.tp_rank(dist.get_rank())],
        "spoken_to": spoken_to,
        "pp_group": list(job.spec.train_layout.pp_group(dist.get_rank())),
        "events": [(kind, r.direction, r.weight_version) for kind, r in events],
        "received_bytes": [r.received_bytes for kind, r in events if kind == "end"],
        "lower_bound_bytes": manager.stream.lower_bound_bytes,
        "events_of_switch": events_of_switch,
        "gone_while_asleep": log.num_gone,
        "read_asleep": _read_asleep(engine),
        "log_line": log_reshard(events[1][1], 0.25),
        "mean_difference_after_update": float(
            (megatron[0, :-1] - torch.from_numpy(vllm)).abs().mean()
        ),
    }
    result["failure"] = _reported_failure(manager, engine)
    engine.close()
    result["shared_memory"] = [
        p.name for p in Path("/dev/shm").iterdir() if str(os.getpid()) in p.name
    ]
    dist.destroy_process_group()
    return result


def _biases_of_trainer(actor: Actor) -> dict[str, tuple[str, list[float]]]:
    """Dtype and values of all layers' expert biases, by the engine's names."""
    mine = {}
    chunk: Any
    for chunk in actor.state.chunks:
        for layer in chunk.decoder.layers:
            bias = getattr(getattr(layer.mlp, "router", None), "expert_bias", None)
            if bias is not None:
                name = f"model.layers.{layer.layer_number - 1}.mlp.gate.e_score_correction_bias"
                mine[name] = (str(bias.dtype), bias.tolist())
    return {name: bias for each in objects.all_gather(mine) for name, bias in each.items()}


def _read_asleep(engine: VLLMEngine) -> dict[str, str]:
    """The errors of reading and writing weights that sleep."""
    calls = {"stored_tensors": engine.stored_tensors, "reload": lambda: engine.reload(())}
    said = {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            said[name] = str(error)
    return said


def _reported_failure(manager: MegatronVLLMShardingManager, engine: VLLMEngine) -> str:
    """What leaves rollout mode if vLLM fails while it runs a request, which then stays there."""
    from vllm.v1.engine.llm_engine import LLMEngine

    failure = RuntimeError("the kernel failed")
    with mock.patch.object(LLMEngine, "step", side_effect=failure):
        try:
            with manager:
                engine.prompt_log_probs([[5, 6, 7]])
        except RuntimeError as error:
            return str(error)
    return "nothing"


def engine_index(job: Job) -> int:
    rollout = job.spec.rollout_layout
    return rollout.slot(dist.get_rank()) // rollout.slots_per_engine


def _draw() -> list[Any]:
    """One draw from every generator that training uses."""
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(2).tolist()
    return [torch.rand(2).tolist(), tracked, random.random(), np.random.rand()]


def _sample(engine: VLLMEngine, job: Job) -> list[list[int]]:
    """The same prompts on every engine, so that only the generators can make a difference."""
    prompts = [
        Prompt(index=i, text="", answer="", token_ids=np.arange(5 + i, 15 + i, dtype=np.int32))
        for i in range(4)
    ]
    rollouts = sample_responses(
        engine, prompts, num_samples=2, temperature=1.0, max_tokens=8, weight_version=1
    )
    return [rollout.response_token_ids.tolist() for rollout in rollouts]
