"""Exact counts: a rank's parameters, its share of the optimizer's state, and a token's KV cache.

They are computed from `checkpoint_tensors`, which a test compares with real Megatron models; the
vocabulary is padded as in Megatron. Megatron adds only the padding inside its buffers: less than 64
elements per parameter and less than lcm(DP, 128) per bucket.

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
    """Parameters of each rank of a pipeline stage, the same number on all its ranks."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def vocabulary_rows(shape: ModelShape, tp_size: int, settings: ActivationSettings) -> int:
    """Return the rows of the padded vocabulary on a rank."""
    multiple = settings.vocabulary_multiple
    if multiple is None:
        return trained_vocabulary_rows(shape.vocab_size, tp_size)
    return math.ceil(shape.vocab_size / (multiple * tp_size)) * multiple


def stage_parameters(
    shape: ModelShape, train: TrainLayout, layers: PipelineLayers, settings: TrainSettings
) -> list[StageParameters]:
    """Return the parameters of every stage. The router's bias is not a parameter. Trained MTP
    layers are on the last stage, with a copy of the embedding."""
    rows = vocabulary_rows(shape, train.tp_size, settings)
    last = len(layers) - 1
    embedding, head = embedding_specs(shape), head_specs(shape)
    if last and (shape.tied_embeddings or settings.mtp_layers):
        head = [*head, *embedding]  # Megatron keeps a copy of it on the last stage
    # Megatron shards eh_proj, and vLLM does not.
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
    """Return for how many parameters a rank keeps state: its shard of a distributed optimizer.

    Dense parameters are sharded over DP and CP, experts over expert data parallelism.
    """
    if not settings.distributed_optimizer:
        return parameters.total
    copies = settings.optimizer_instances
    dense = math.ceil(parameters.dense * copies / (train.dp_size * train.cp_size))
    return dense + math.ceil(parameters.experts * copies / train.edp_size)


def widened_bytes(shape: ModelShape, rollout: RolloutLayout) -> int:
    """Return the bytes of the float32 copies of linear weights that an engine's rank keeps on a CPU
    without 16-bit matrix products. Experts and the projection that MLA absorbs have no copy."""
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
    """Return the bytes that an engine's rank caches per token, in all layers and the drafter's.

    Latent attention caches one latent and one rotary key, shared by all heads, so every TP rank has
    all of it. Otherwise keys and values are sharded by heads, and a rank has at least one head.
    """
    if shape.latent:
        width = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    else:
        width = 2 * max(1, shape.num_kv_heads // tp_size) * shape.head_dim
    return width * itemsize * (shape.num_layers + drafter_layers)


def drafter_bytes(shape: ModelShape, rollout: RolloutLayout, num_layers: int) -> int:
    """Return the bytes of a rank's shard of `num_layers` MTP layers that draft; its host memory
    holds a second copy. Embedding and head are shared with the model."""
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
    """Return the bytes that latent attention adds to the checkpoint's tensors on an engine's rank:
    a second copy of both halves of kv_b_proj, by which decoding multiplies."""
    if shape.latent is None:
        return 0
    latent = shape.latent
    per_head = latent.kv_lora_rank * (latent.qk_nope_head_dim + latent.v_head_dim)
    layers = shape.num_layers + drafter_layers
    return shape.num_heads // tp_size * per_head * itemsize * layers
