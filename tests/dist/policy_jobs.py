"""Rank jobs about the policy head and the optimizer; run by `tests.rank_pool`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mcore_rl.batching.train_batches import split_mini_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving
from mcore_rl.megatron.model_provider import make_actor_provider
from mcore_rl.megatron.policy_head import as_policy
from mcore_rl.moe.routing import routers_of
from mcore_rl.trainer.actor import Actor
from tests.dist.jobs import first_mini_batch, random_tokens, rank_batch, started

# After the patches, which mcore_rl.megatron.adapter applies.
from megatron.core import parallel_state  # isort: skip
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules  # isort: skip
from megatron.core.models.hybrid.hybrid_model import HybridModel  # isort: skip
from megatron.core.ssm.mlp_layer import MLPLayer  # isort: skip
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.training.global_vars import get_args  # isort: skip
from megatron.core.process_groups_config import ProcessGroupCollection  # isort: skip
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer  # isort: skip


def hybrid_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> torch.nn.Module:
    """A fork's: a HybridModel of Megatron's own layers, which are numbered by position."""
    args = get_args()
    config = config or megatron_adapter.transformer_config(args)
    block = megatron_adapter.block_spec(config, vp_stage)
    config.num_layers_in_last_pipeline_stage = None  # says the pattern
    dense, moe = block.layer_specs[0].submodules, block.layer_specs[-1].submodules

    def second_half(module: type, layer: Any) -> ModuleSpec:
        of_attention = {"input_layernorm": IdentityOp, "self_attention": IdentityOp}
        half = dataclasses.replace(layer, **of_attention, self_attn_bda=IdentityFuncOp)
        return ModuleSpec(module=module, submodules=half)

    attention = dataclasses.replace(
        moe, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp
    )
    stack = HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=second_half(MLPLayer, dense),
        moe_layer=second_half(MoETransformerLayer, moe),
    )
    return HybridModel(
        config=config,
        hybrid_stack_spec=ModuleSpec(module=HybridStack, submodules=stack),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_layer_pattern="*-*E" if args.num_experts else "*-*-",
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def learn_in_fork(flags: list[str], target: str, provider: str | None = None) -> dict[str, Any]:
    """An update and a checkpoint in `saved`, or `--load`; then another update, whose weights go to
    `weights`. `provider` is the fork's, None for mcore_rl's own."""
    job, actor, shards = started(
        flags, in_float32=True, provider=globals()[provider] if provider else None
    )
    first, second = split_mini_batches(rank_batch(job))
    if "--load" not in flags:
        actor.update(first)
        with open("/dev/null", "w") as log, megatron_adapter.megatron_output_to(log):
            saving.save_checkpoint(job.args, actor.state, 1, Path(target) / "saved")
    actor.update(second)
    export(shards, job.spec.checkpoint, Path(target) / "weights")
    (chunk,) = actor.state.chunks
    found = {
        "layer": type(chunk.decoder.layers[0]).__name__,
        "layers": megatron_adapter.stage_layers(chunk),
        "routers": [layer for layer, _ in routers_of(chunk)],
    }
    dist.destroy_process_group()
    return found


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


def policy_against_logits(
    flags: list[str], model_class: str, scored: list[int] | None
) -> dict[str, Any]:
    """Log-probs, entropy and gradients of a policy, and the same from its own full logits; of the
    `scored` positions alone, if they are given."""
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
    chosen = None if scored is None else torch.tensor(scored, dtype=torch.int64)
    scores = model(*inputs, target_ids=targets, scored=chosen, temperature=temperature)
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
    if scored is not None:
        expected = expected * torch.zeros(targets.T.numel()).index_fill(0, chosen, 1.0).view(
            targets.T.shape
        ).T.unsqueeze(-1)
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
