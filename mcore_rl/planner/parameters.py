"""Exact: the parameters of a rank, what the optimizer keeps of them, and the KV cache of a token.

Counted from `checkpoint_tensors`, which a test holds against real Megatron models; the vocabulary
is padded as Megatron pads it. What Megatron adds on top is the padding inside its buffers: less
than 64 elements a parameter and less than lcm(DP, 128) a bucket.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.model.tensors import (
    Cut,
    TensorSpec,
    embedding_specs,
    head_specs,
    layer_specs,
    mtp_layer_specs,
    trained_vocabulary_rows,
)
from mcore_rl.planner.settings import ActivationSettings, TrainSettings


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters of each rank of a pipeline stage; all its ranks have as many."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def vocabulary_rows(shape: ModelShape, tp_size: int, settings: ActivationSettings) -> int:
    """Rows of the padded vocabulary on a rank."""
    multiple = settings.vocabulary_multiple
    if multiple is None:
        return trained_vocabulary_rows(shape.vocab_size, tp_size)
    return math.ceil(shape.vocab_size / (multiple * tp_size)) * multiple


def stage_parameters(
    shape: ModelShape, train: TrainLayout, layers: PipelineLayers, settings: TrainSettings
) -> list[StageParameters]:
    """Parameters of every stage. The router's bias is not a parameter. MTP layers that are trained
    lie on the last stage, with a copy of the embedding."""
    rows = vocabulary_rows(shape, train.tp_size, settings)
    last = len(layers) - 1
    embedding, head = embedding_specs(shape), head_specs(shape)
    if last and (shape.tied_embeddings or settings.mtp_layers):
        head = [*head, *embedding]  # Megatron keeps a copy of it on the last stage
    # Which Megatron cuts, and vLLM does not.
    of_mtp = [
        replace(spec, cut=Cut.ROWS) if spec.name == "eh_proj.weight" else spec
        for spec in mtp_layer_specs(shape)
    ]
    of_kind = {
        is_moe: _count(layer_specs(shape, is_moe=is_moe), train, rows)
        for is_moe in set(shape.is_moe_layer)
    }
    found = []
    for stage, chunks in enumerate(layers):
        parts = [of_kind[shape.is_moe_layer[n]] for chunk in chunks for n in chunk]
        if stage == 0:
            parts.append(_count(embedding, train, rows))
        if stage == last:
            parts.append(_count(head, train, rows))
            parts += [_count(of_mtp, train, rows)] * settings.mtp_layers
        found.append(StageParameters(sum(p.dense for p in parts), sum(p.experts for p in parts)))
    return found


def _count(specs: Iterable[TensorSpec], train: TrainLayout, rows: int) -> StageParameters:
    dense = experts = 0
    for spec in specs:
        if spec.dtype == "float32":
            continue  # the router's bias
        size = math.prod(spec.shape)
        if spec.num_experts:
            experts += size * spec.num_experts // (train.ep_size * train.etp_size)
        elif spec.cut is Cut.VOCABULARY:
            dense += rows * spec.shape[1]
        elif spec.cut is Cut.REPLICATED:
            dense += size
        else:
            dense += size // train.tp_size
    return StageParameters(dense, experts)


def optimizer_parameters(
    parameters: StageParameters, train: TrainLayout, settings: TrainSettings
) -> int:
    """How many parameters' state a rank keeps: its share where the optimizer is distributed.

    Dense parameters are shared out over data and context parallel ranks, experts over theirs.
    """
    if not settings.distributed_optimizer:
        return parameters.total
    copies = settings.optimizer_instances
    dense = math.ceil(parameters.dense * copies / (train.dp_size * train.cp_size))
    return dense + math.ceil(parameters.experts * copies / train.edp_size)


def widened_bytes(shape: ModelShape, rollout: RolloutLayout) -> int:
    """What a rank of the engine keeps on a CPU without 16-bit matrix products: its linear weights
    once more, in float32. Experts and the projection that latent attention absorbs have no copy."""
    head = embedding_specs(shape) if shape.tied_embeddings else head_specs(shape)
    of_kind = {
        is_moe: _widened(layer_specs(shape, is_moe=is_moe), rollout)
        for is_moe in set(shape.is_moe_layer)
    }
    return 4 * (_widened(head, rollout) + sum(of_kind[is_moe] for is_moe in shape.is_moe_layer))


def _widened(specs: Iterable[TensorSpec], rollout: RolloutLayout) -> int:
    elements = 0
    for spec in specs:
        if spec.num_experts or len(spec.shape) != 2 or "kv_b_proj" in spec.name:
            continue
        whole = spec.cut is Cut.REPLICATED or (
            spec.is_shared_expert and rollout.has_whole_shared_experts
        )
        elements += math.prod(spec.shape) // (1 if whole else rollout.tp_size)
    return elements


def kv_bytes_per_token(
    shape: ModelShape, tp_size: int, itemsize: int = 2, *, drafter_layers: int = 0
) -> int:
    """What a rank of the engine caches for a token, in all layers and those of a drafter.

    Latent attention caches one latent and one rotary key, which no head owns, so that every TP rank
    has all of it; else keys and values are cut by heads, of which a rank has at least one.
    """
    if shape.latent:
        width = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    else:
        width = 2 * max(1, shape.num_kv_heads // tp_size) * shape.head_dim
    return width * itemsize * (shape.num_layers + drafter_layers)


def drafter_bytes(shape: ModelShape, rollout: RolloutLayout, num_layers: int) -> int:
    """What a rank of the engine holds of `num_layers` MTP layers that draft; on its host it has the
    same once more. Embedding and head are the model's own."""
    total = 0
    for spec in mtp_layer_specs(shape):
        if spec.num_experts and rollout.expert_parallel:
            parts = rollout.ep_size
        elif spec.cut is Cut.REPLICATED or (
            spec.is_shared_expert and rollout.has_whole_shared_experts
        ):
            parts = 1
        else:
            parts = rollout.tp_size
        total += spec.num_bytes // parts
    return total * num_layers


def absorbed_bytes(
    shape: ModelShape, tp_size: int, itemsize: int = 2, *, drafter_layers: int = 0
) -> int:
    """What a rank of the engine keeps of latent attention beside the checkpoint's tensors: both
    halves of kv_b_proj once more, as decoding multiplies by them."""
    if shape.latent is None:
        return 0
    latent = shape.latent
    per_head = latent.kv_lora_rank * (latent.qk_nope_head_dim + latent.v_head_dim)
    layers = shape.num_layers + drafter_layers
    return shape.num_heads // tp_size * per_head * itemsize * layers
