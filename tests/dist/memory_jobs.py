"""What a rank does in `test_memory_switches.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.batching.rows import lay_out
from mcore_rl.batching.train_batches import split_micro_batches, split_mini_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.common.run_output import setup_logging
from mcore_rl.hybrid_engine.memory.offload import Offloader
from mcore_rl.job.start import start
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.planner.models import TrainedModel
from mcore_rl.planner.savings import memory_lines, recompute_saving
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.hand_overs import build_offloader
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.plan_inputs import model_of_args
from mcore_rl.trainer.roles.reference import ReferencePolicy
from tests.dist.invariance_jobs import Forwards
from tests.dist.jobs import first_mini_batch, rank_batch, started
from tests.dist.offload_jobs import state_digests
from tests.dist.ppo_jobs import models_of, take_step


def learn_with_each(
    flags: list[str], variants: dict[str, dict[str, Any]], num_steps: int = 2
) -> dict[str, dict[str, Any]]:
    """The same from the same checkpoint with each variant's switches: an update of the actor, then
    whole steps of actor and critic.

    A variant may have `args` (destination -> value of Megatron's arguments), `tokens` (the same as
    flags, for the critic's command line) and `config` (field -> value of RLConfig). With those that
    follow it one that `is_reference` is compared in its gradients; the first one must be.
    """
    setup_logging()
    with open("/dev/null", "w") as log:
        job = start(flags, log=log)
    assert job.spec.critic is not None and job.spec.critic.tokens is not None
    found: dict[str, dict[str, Any]] = {}
    gradients: dict[str, torch.Tensor] = {}
    for name, variant in variants.items():
        before = {dest: getattr(job.args, dest) for dest in variant.get("args", {})}
        vars(job.args).update(variant.get("args", {}))
        if variant.get("is_reference"):
            gradients.clear()
        tokens = (*job.spec.critic.tokens, *variant.get("tokens", ()))
        spec = dataclasses.replace(
            job.spec,
            config=job.config.replaced(**variant.get("config", {})),
            critic=dataclasses.replace(job.spec.critic, tokens=tokens),
        )
        found[name] = _learn(dataclasses.replace(job, spec=spec), num_steps, gradients)
        vars(job.args).update(before)
    dist.destroy_process_group()
    return found


def _learn(job: Job, num_steps: int, gradients: dict[str, torch.Tensor]) -> dict[str, Any]:
    """`gradients` are those of the reference's first update; empty, they are filled."""
    models = models_of(job)
    state, learner, critic, role = models.state, models.learner, models.critic, models.role
    assert critic is not None and role is not None
    offloader = build_offloader(job, state, role)
    found: dict[str, Any] = {"first": _first_update(job, learner.actor, gradients)}
    samples = models.samples()
    counters = [
        Forwards(each.chunks, job.config.trainer.num_epochs) for each in (state, critic.state)
    ]
    steps = []
    for step in range(num_steps):
        _as_in_a_switch(offloader)
        batch = learner.make_batch(step, samples)
        measured = take_step(learner, step, batch, samples)
        steps.append({name: value.hex() for name, value in measured.items()})
        for counter, part in zip(counters, (batch.actor, role.served.batch), strict=True):
            assert part is not None
            counter.expect(part)
    largest = max(split_micro_batches(batch.actor), key=lambda part: part.num_tokens)
    return found | {
        "steps": steps,
        "actor": state_digests(state),
        "critic": state_digests(critic.state),
        "forwards": [counter.per_micro_batch() for counter in counters],
        "moved_bytes": offloader.stats.moved,
        "dropped_bytes": offloader.stats.dropped,
        "kept_bytes": kept_bytes(job, state, largest),
        "computed": _computed(job, largest),
        "lines": memory_lines(_planned(job)),
    }


def _first_update(job: Job, actor: Actor, gradients: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What the actor scores, and the bits of an update that has all terms of a loss."""
    batch = first_mini_batch(job)
    log_probs = actor.log_probs(batch)
    stats = actor.update(batch)
    parameters = {n: p for chunk in actor.state.chunks for n, p in chunk.named_parameters()}
    of_update = {name: p.main_grad.detach() for name, p in parameters.items()}
    if not gradients:
        gradients.update({name: gradient.clone() for name, gradient in of_update.items()})
    apart = {
        name: float((gradient - gradients[name]).abs().max() / gradients[name].abs().max())
        for name, gradient in of_update.items()
        if not torch.equal(gradient, gradients[name])
    }
    return {
        "log_probs": [value.hex() for value in log_probs.tolist()],
        "sums": {name: getattr(stats.sums, name).item().hex() for name in stats.sums.__slots__},
        "grad_norm": stats.result.grad_norm.hex(),
        "gradients_apart": apart,  # parameter -> largest difference over the largest element
        "num_gradients": sum(bool(gradient.any()) for gradient in of_update.values()),
    }


def _as_in_a_switch(offloader: Offloader) -> None:
    """The calls of the sharding manager around rollout."""
    offloader.offload("gradients", "optimizer")
    offloader.offload("parameters")
    if offloader.offloaded:
        offloader.onload()


def kept_bytes(job: Job, state: megatron_adapter.TrainState, samples: TrainBatch) -> int:
    """Bytes of all storages that one micro-batch's forward pass keeps for its backward pass, but
    for parameters and buffers."""
    (model,) = state.model
    (chunk,) = state.chunks
    rows = lay_out(samples, job.micro_batching(), None)
    held = {t.untyped_storage()._cdata for t in (*chunk.parameters(), *chunk.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            kept[storage._cdata] = storage  # alive, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(
            rows.token_ids,
            rows.position_ids,
            None,
            packed_seq_params=megatron_adapter.packed_samples(rows.cu_seqlens, rows.longest),
            target_ids=rows.target_ids,
            temperature=1.0,
        )
    return sum(storage.nbytes() for storage in kept.values())


def _computed(job: Job, samples: TrainBatch) -> dict[str, int]:
    """What the formulas say of a micro-batch with as many tokens as `samples`."""
    model = _planned(job)
    training = dataclasses.replace(model.training, packed_tokens=samples.num_tokens)
    saving = recompute_saving(dataclasses.replace(model, training=training))
    return {"kept_bytes": saving.kept_bytes, "whole_bytes": saving.whole_bytes}


def _planned(job: Job) -> TrainedModel:
    model = (job.spec.shape, job.spec.train_layout, job.spec.layers)
    return model_of_args(job.config, vars(job.args), *model)


def update_peaks(flags: list[str]) -> dict[str, int]:
    """Peak bytes of device memory of a whole update, without a reference policy and with one."""
    job, actor, _ = started(flags)
    batch = rank_batch(job)

    def peak(reference: ReferencePolicy | None) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if reference is not None:
            with reference:
                actor.log_probs(batch)
        actor.log_probs(batch)
        for mini_batch in split_mini_batches(batch):
            actor.update(mini_batch)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    peak(None)  # makes the optimizer's moments, and all else that is made once
    found = {"without": peak(None), "with": peak(ReferencePolicy(actor.state))}
    dist.destroy_process_group()
    return found
