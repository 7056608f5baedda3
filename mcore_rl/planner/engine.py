"""Memory of a rollout engine's rank: KV cache per token, copies of weights, activations."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.model.tensors import Cut, TensorSpec, embedding_specs, head_specs, mtp_layer_specs
from mcore_rl.planner.models import sum_over_layers
from mcore_rl.planner.settings import EngineSettings

_BFLOAT16, _FLOAT32 = 2, 4  # bytes


def kv_bytes_per_token(shape: ModelShape, tp_size: int, *, drafter_layers: int = 0) -> int:
    """Return the bytes that a rank caches per token, in all layers and the drafter's.

    Latent attention caches one latent and one rotary key, shared by all heads, so every TP rank has
    all of it. Otherwise keys and values are sharded by heads, and a rank has at least one head.
    """
    if shape.latent:
        width = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    else:
        width = 2 * max(1, shape.num_kv_heads // tp_size) * shape.head_dim
    # Other layers have a state per sequence instead, whatever its length, or none.
    attention = sum(kind.has_attention for kind in shape.layer_kinds)
    num_bytes = width * _BFLOAT16 * (attention + drafter_layers)
    if shape.indexer:  # a key in FP8, with a float32 scale for every 128 elements
        head = shape.indexer.head_dim
        layers = sum(shape.indexer.in_layer) + drafter_layers
        num_bytes += (head + head // 128 * _FLOAT32) * layers
    return num_bytes


def state_bytes(shape: ModelShape, tp_size: int) -> int:
    """Return the bytes that a rank caches per sequence, whatever its length: of each delta net and
    Mamba-2 layer the state, and the inputs that its convolution still needs, in bfloat16. vLLM's
    default for the state is bfloat16, too; for Mamba-2 config.json decides."""
    num_bytes = 0
    if net := shape.delta_net:
        state = net.num_value_heads * net.key_head_dim * net.value_head_dim * _BFLOAT16
        inputs = sum(net.conv_parts) * (net.conv_width - 1) * _BFLOAT16
        num_bytes += (state + inputs) // tp_size * sum(shape.is_linear_layer)
    if mamba := shape.mamba:
        state = mamba.inner_size * mamba.state_size * mamba.state_bytes
        inputs = sum(mamba.conv_parts) * (mamba.conv_width - 1) * _BFLOAT16
        num_layers = sum(kind.has_mamba for kind in shape.layer_kinds)
        num_bytes += (state + inputs) // tp_size * num_layers
    return num_bytes


def absorbed_bytes(shape: ModelShape, tp_size: int, *, drafter_layers: int = 0) -> int:
    """Return the bytes that latent attention adds to the checkpoint's tensors: a second copy of
    both halves of kv_b_proj, by which decoding multiplies."""
    if shape.latent is None:
        return 0
    latent = shape.latent
    per_head = latent.kv_lora_rank * (latent.qk_nope_head_dim + latent.v_head_dim)
    layers = shape.num_layers + drafter_layers
    return shape.num_heads // tp_size * per_head * _BFLOAT16 * layers


def widened_bytes(shape: ModelShape, rollout: RolloutLayout) -> int:
    """Return the bytes of the float32 copies of linear weights that a rank keeps on a CPU without
    16-bit matrix products. Experts and the projection that MLA absorbs have no copy."""

    def elements(specs: Iterable[TensorSpec]) -> int:
        return sum(
            math.prod(spec.shape) // _num_shards(spec, rollout)
            for spec in specs
            if len(spec.shape) == 2 and not spec.num_experts and "kv_b_proj" not in spec.name
        )

    head = embedding_specs(shape) if shape.tied_embeddings else head_specs(shape)
    return _FLOAT32 * (elements(head) + sum_over_layers(shape, elements))


def drafter_bytes(shape: ModelShape, rollout: RolloutLayout, num_layers: int) -> int:
    """Return the bytes of a rank's shard of `num_layers` MTP layers that draft; its host memory
    holds a second copy. Embedding and head are shared with the model."""
    specs = mtp_layer_specs(shape)
    return num_layers * sum(spec.num_bytes // _num_shards(spec, rollout) for spec in specs)


def _num_shards(spec: TensorSpec, rollout: RolloutLayout) -> int:
    """Return the ranks of an engine over which a tensor, or all experts of a layer, are sharded."""
    if spec.num_experts and rollout.expert_parallel:
        return rollout.ep_size
    whole = spec.is_shared_expert and rollout.has_whole_shared_experts
    return 1 if whole or spec.cut is Cut.REPLICATED else rollout.tp_size


def engine_activation_bytes(
    shape: ModelShape, rollout: RolloutLayout, settings: EngineSettings
) -> int:
    """Return a rank's peak bytes: the larger of a layer on a full batch and the logits.

    Experts compute on the tokens of all data-parallel ranks of the engine, in two workspaces with a
    row for every token and chosen expert, wherever that expert is. The sampler has the logits of
    every sequence over the full vocabulary, in float32, and a second copy as log-probs.
    """
    item, tp, hidden = 2, rollout.tp_size, shape.hidden_size
    tokens = settings.batched_tokens
    heads = shape.num_heads / tp
    if shape.latent:
        latent = shape.latent
        per_head = 2 * (latent.qk_nope_head_dim + latent.qk_rope_head_dim) + 2 * latent.v_head_dim
    else:
        per_head = 4 * shape.head_dim
    attention = tokens * (3 * hidden + heads * per_head) * item
    feed_forward = tokens * (3 * hidden + 3 * shape.ffn_hidden_size / tp) * item
    if shape.experts:
        width = shape.experts.hidden_size / (1 if rollout.expert_parallel else tp)
        gathered = tokens * rollout.dp_size
        rows = gathered * shape.experts.topk
        experts = (rows * (max(2 * width, hidden) + width) + 2 * gathered * hidden) * item
        feed_forward = max(feed_forward, experts + tokens * 2 * hidden * item)
    logits = 2 * settings.max_num_seqs * shape.vocab_size * _FLOAT32
    return math.ceil(max(attention, feed_forward, logits))
