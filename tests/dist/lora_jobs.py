"""What a rank does in `test_lora.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.hybrid_engine.peft_export import export_adapter
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import lora
from mcore_rl.megatron.lora import is_adapter, merged_weight
from mcore_rl.trainer.hand_overs import build_manager, build_offloader, engine_config
from mcore_rl.verify import overwrite, stored_digests
from tests.dist.jobs import first_mini_batch, log_probs_of_random_tokens, started
from tests.dist.ppo_jobs import Models, build_models
from tests.model_only import VLLMModelOnly


def base_digest(chunks: list[torch.nn.Module]) -> str:
    """A digest of the parameters and buffers on this rank that are not adapters."""
    found = hashlib.sha256()
    for chunk in chunks:
        for name, value in (*chunk.named_parameters(), *chunk.named_buffers()):
            if not is_adapter(name):
                # A copy: memory that numpy has a view of cannot be offloaded.
                found.update(value.detach().clone().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def write(models: Models, target: Path) -> None:
    """The merged model to `merged`, the adapter to `adapter`."""
    spec = models.job.spec
    export(models.shards, spec.checkpoint, target / "merged")
    assert spec.lora is not None
    export_adapter(models.state.chunks, spec.lora, spec.checkpoint.folder, target / "adapter")


def learn(flags: list[str], target: str, num_steps: int = 2) -> dict[str, Any]:
    """Whole steps from given rollouts; what they measured, and the model and adapter afterwards."""
    models = build_models(flags)
    samples, chunks = models.samples(), models.state.chunks
    before = base_digest(chunks)
    offloader = build_offloader(models.job, models.state)
    steps = []
    for step in range(num_steps):
        offloader.offload("gradients", "optimizer")  # as around rollout
        offloader.offload("parameters")
        if offloader.offloaded:
            offloader.prefetch()
            offloader.onload()
        steps.append(models.take_step(step, samples))
    trained = {n for c in chunks for n, p in c.named_parameters() if p.requires_grad}
    kept = megatron_adapter.train_tensors(models.state)
    found = {
        "steps": steps,
        "base is unchanged": base_digest(chunks) == before,
        "only adapters are trained": bool(trained) and all(map(is_adapter, trained)),
        "gradient_elements": sum(t.numel() for n, t in kept["gradients"] if "buffer" in n),
        "adapter_elements": sum(
            p.numel() for c in chunks for n, p in c.named_parameters() if is_adapter(n)
        ),
    }
    write(models, Path(target))
    if models.learner.reference is not None:
        found["references"] = refreshed_references(models)
    dist.destroy_process_group()
    return found


def refreshed_references(models: Models) -> list[bool]:
    """Whether the reference is the base, then the adapters of its refresh, bit for bit, whatever
    the actor's are, and whether the actor gets its own back."""
    actor, reference = models.learner.actor, models.learner.reference
    assert reference is not None

    def log_probs() -> torch.Tensor:
        return log_probs_of_random_tokens(models.job, actor)

    trained = log_probs()
    with reference:
        base = log_probs()
    found = [not torch.equal(base, trained)]
    reference.refresh(2)
    for chunk in models.state.chunks:
        adapters = lora.adapters_of(chunk)
        assert adapters is not None
        adapters.reset()  # the actor is its base again
    for _ in range(2):
        with reference:
            found.append(torch.equal(log_probs(), trained))
        found.append(torch.equal(log_probs(), base))
    return found


def log_probs_and_exports(flags: list[str], target: str) -> list[list[float]]:
    """Log-probs of `random_tokens`; the merged model and the adapter as folders."""
    models = build_models(flags)
    log_probs = log_probs_of_random_tokens(models.job, models.learner.actor)
    write(models, Path(target))
    dist.destroy_process_group()
    return log_probs.tolist()


def gradients(flags: list[str], target: str) -> list[int]:
    """The gradients of a mini-batch, exported in place of the weights. Returns how many merged
    weights were made in each forward pass, and how many of these were in memory after it.

    On one rank, which has whole gradients."""
    job, actor, shards = started(flags, in_float32=True)
    chunk = actor.state.chunks[0]
    merged: list[StorageWeakRef] = []
    counts: list[int] = []

    def merge(*arguments: Any) -> torch.Tensor:
        found = merged_weight(*arguments)
        merged.append(StorageWeakRef(found.untyped_storage()))
        return found

    def count(*_: Any) -> None:
        counts.extend((len(merged), sum(not storage.expired() for storage in merged)))
        merged.clear()

    chunk.register_forward_hook(count)
    # No layer of one rank without Transformer Engine needs the gradient of a merged weight.
    refused = mock.Mock(side_effect=AssertionError("the gradient of a merged weight"))
    with (
        mock.patch.object(lora, "merged_weight", merge),
        mock.patch.object(lora, "_differentiable", refused),
    ):
        actor.update(first_mini_batch(job))
    for _, parameter in chunk.named_parameters():
        if (gradient := getattr(parameter, "main_grad", None)) is not None:
            parameter.data.copy_(gradient)
    if job.spec.lora is None:
        export(shards, job.spec.checkpoint, Path(target))
    else:
        export_adapter([chunk], job.spec.lora, job.spec.checkpoint.folder, Path(target))
    dist.destroy_process_group()
    return counts


def hand_over(flags: list[str], target: str) -> dict[str, dict[str, str]]:
    """Digests of an engine's weights: merged at the source, and loaded from the exported folder."""
    job, _, shards = started(flags)
    export(shards, job.spec.checkpoint, Path(target))
    config = replace(engine_config(job, load_format="auto"), model_dir=Path(target))
    engine = VLLMModelOnly(config)
    from_disk = stored_digests(engine)
    manager = build_manager(job, shards, engine)
    assert overwrite(engine, job, from_disk) == []
    with manager:
        handed_over = stored_digests(engine)
    engine.close()
    dist.destroy_process_group()
    return {"from_disk": from_disk, "handed_over": handed_over}
