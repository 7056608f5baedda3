"""Rank jobs about the policy head and the optimizer; run by `tests.rank_pool`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mcore_rl.batching.train_batches import split_mini_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.model_provider import make_actor_provider
from mcore_rl.megatron.policy_head import as_policy
from mcore_rl.trainer.actor import Actor
from tests.dist.jobs import first_mini_batch, random_tokens, rank_batch, started

# After the patches, which mcore_rl.megatron.adapter applies.
from megatron.core import parallel_state  # isort: skip
from megatron.core.process_groups_config import ProcessGroupCollection  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip


class LayerOfFork(TransformerLayer):
    """Computes what Megatron's does."""


class LayerWithMore(LayerOfFork):
    """Has a parameter that no checkpoint has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate_of_fork = torch.nn.Parameter(torch.zeros(1))


def spec_of_fork(config: Any, vp_stage: int | None = None) -> Any:
    """For `--spec`: Megatron calls it with its GPTModelConfig."""
    spec = megatron_adapter.block_spec(config.transformer, vp_stage)
    for layer in spec.layer_specs:
        layer.module = LayerOfFork
    return spec


def spec_with_more(config: Any) -> Any:
    """A function need not know of virtual stages."""
    spec = spec_of_fork(config)
    spec.layer_specs[0].module = LayerWithMore
    return spec


def built_from_spec(flags: list[str]) -> dict[str, Any]:
    """The layers of the model that `--spec` asks for, or the error."""
    try:
        job, actor, _ = started(flags)
    except RuntimeError as error:
        return {"error": str(error)}
    (chunk,) = actor.state.chunks
    layers = sorted({type(layer).__name__ for layer in chunk.decoder.layers})
    return {"layers": layers, "count": len(chunk.decoder.layers)}


def policy_against_logits(flags: list[str], model_class: str) -> dict[str, Any]:
    """Log-probs, entropy and gradients of a policy, and the same from its own full logits."""
    job, _, _ = started(flags)
    # Of its own and not under DDP, which would take the gradients away.
    groups = ProcessGroupCollection.use_mpu_process_groups()
    base = make_actor_provider(job.args, job.spec.shape, model_class)(pg_collection=groups)
    built = type(base)
    model = as_policy(base, real_vocab_size=job.spec.shape.vocab_size, chunk_tokens=7)
    assert isinstance(model, built)
    # Padding rows must not count, whatever is in them.
    if dist.get_rank() == dist.get_world_size() - 1:
        padding = job.args.padded_vocab_size - job.spec.shape.vocab_size
        model.output_layer.weight.data[-padding:] = 3.0

    tokens = random_tokens(job.spec.shape.vocab_size, samples=2)
    inputs = (tokens, torch.arange(tokens.shape[1]).expand(2, -1), None)
    targets, temperature = tokens.roll(-1, dims=1), 0.7
    scores = model(*inputs, target_ids=targets, temperature=temperature)
    scores.sum().backward()
    gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    group = parallel_state.get_tensor_model_parallel_group()
    logits = model(*inputs)  # [b, s, v/tp], this rank's part of the padded vocabulary
    shards = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(shards, logits.detach(), group=group)
    shards[group.rank()] = logits
    whole = torch.cat(shards, dim=-1)[..., : job.spec.shape.vocab_size] / temperature
    log_probs = whole.log_softmax(-1)
    expected = torch.stack(
        (
            log_probs.gather(-1, targets[..., None])[..., 0],
            -(log_probs.exp() * log_probs).sum(-1),
        ),
        dim=-1,
    )
    expected.sum().backward()
    difference = {
        name: float((gradient[name] - parameter.grad).abs().max())
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    result = {
        "shape": list(scores.shape),
        "dtype": str(scores.dtype),
        "difference": float((scores - expected).abs().max()),
        "gradient_difference": max(difference.values()),
        "gradient": max(float(g.abs().max()) for g in gradient.values()),
        "num_gradients": len(difference),
        "stack": type(model.decoder).__name__,
        "same_parameters": set(gradient) == set(difference),
    }
    dist.destroy_process_group()
    return result


def nonfinite_loss(flags: list[str], culprit: int) -> dict[str, Any]:
    """The loss of rank `culprit` is nan."""
    job, actor, _ = started(flags)
    loss = actor._loss

    def poisoned(*args: Any, **keywords: Any) -> Any:
        value, sums = loss(*args, **keywords)
        return value * (float("nan") if dist.get_rank() == culprit else 1.0), sums

    with mock.patch.object(actor, "_loss", poisoned):
        found = _attempted(actor, first_mini_batch(job))
    dist.destroy_process_group()
    return found


def nonfinite_gradient(flags: list[str], culprit: int) -> dict[str, Any]:
    """Rank `culprit` finds a nan in one of its gradients; then a healthy update follows."""
    job, actor, _ = started(flags)
    batches = split_mini_batches(rank_batch(job))
    parameters = dict(actor.state.chunks[0].named_parameters())
    name = next(name for name in parameters if name.endswith("linear_proj.weight"))
    step = actor.optimizer.step

    def poisoned(**keywords: Any) -> Any:
        if dist.get_rank() == culprit:
            parameters[name].main_grad.view(-1)[3] = float("nan")
        return step(**keywords)

    with mock.patch.object(actor.optimizer, "step", poisoned):
        found = _attempted(actor, batches[0])
    healthy = actor.update(batches[1]).result
    found |= {
        "name": name,
        "healthy_skipped": healthy.skipped,
        "healthy_norm": healthy.grad_norm,
        "finite": all(bool(torch.isfinite(p).all()) for p in parameters.values()),
    }
    dist.destroy_process_group()
    return found


def _attempted(actor: Actor, batch: TrainBatch) -> dict[str, Any]:
    """How an update ended, and whether it left the weights as they were."""
    before = [weight.clone() for weight in megatron_adapter.weights(actor.state)]
    error, skipped = "", False
    try:
        skipped = actor.update(batch).result.skipped
    except RuntimeError as raised:
        error = str(raised)
    unchanged = all(map(torch.equal, before, megatron_adapter.weights(actor.state)))
    return {"error": error, "skipped": skipped, "unchanged": unchanged}
