"""Formulas for the memory of activations, in training and in the engine.

They follow Korthikanti et al. (arXiv 2205.05198, sections 4 and 5), with the terms of the layers
built here: RMSNorm, SwiGLU, no dropout, attention that never stores its scores (flash or fused),
latent attention and routed experts. Pipelines hold micro-batches as in Narayanan et al. (arXiv
2104.04473, section 2.2). Workspaces of kernels are not included.

A term is the memory per token that one layer keeps for its backward pass. With sequence parallelism
the tokens outside of matrix products are sharded over TP.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mcore_rl.model.config_json import LatentAttention, ModelShape
from mcore_rl.model.experts import Experts
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.planner.parameters import vocabulary_rows
from mcore_rl.planner.settings import ActivationSettings, EngineSettings

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes per token that one layer keeps, and the modules whose recomputation drops them."""

    name: str
    bytes_per_token: float
    dropped_by: frozenset[str] = frozenset()


def layer_terms(
    shape: ModelShape, train: TrainLayout, settings: ActivationSettings, *, is_moe: bool
) -> Iterator[Term]:
    """Yield the terms that one layer keeps for its backward pass; its input comes first."""
    item, tp = settings.weight_bytes, train.tp_size
    own = 1 / tp if settings.sequence_parallel else 1.0  # a rank's share of tokens outside of TP
    hidden = item * shape.hidden_size * own
    yield Term("input", hidden)
    yield Term("normed input", hidden, frozenset({"layernorm"}))
    if shape.latent:
        yield from _latent_terms(shape, shape.latent, item, tp, own)
    else:
        yield from _grouped_terms(shape, item, tp)
    yield Term("attention residual", hidden)
    yield Term("normed residual", hidden, frozenset({"layernorm"}))
    if is_moe and shape.experts:
        yield from _expert_terms(shape, shape.experts, train, settings, own)
    else:
        width = item * shape.ffn_hidden_size / tp
        yield Term("gate, up and their product", 3 * width, frozenset({"mlp"}))


def _grouped_terms(shape: ModelShape, item: int, tp: int) -> Iterator[Term]:
    queries = item * shape.num_heads * shape.head_dim / tp
    keys = item * shape.num_kv_heads * shape.head_dim / tp
    yield Term("queries, keys, values", queries + 2 * keys)
    if shape.qk_norm:
        yield Term("queries and keys before their norms", queries + keys)
    yield Term("attention output", queries)
    yield _softmax_statistics(shape, tp)


def _latent_terms(
    shape: ModelShape, latent: LatentAttention, item: int, tp: int, own: float
) -> Iterator[Term]:
    heads = item * shape.num_heads / tp
    nope, rope, value = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim
    compressed = 2 * latent.kv_lora_rank + rope + 2 * (latent.q_lora_rank or 0)
    yield Term("latents and normed latents", item * compressed * own)
    up = heads * (2 * (nope + rope) + nope + value)
    yield Term("queries, keys, values", up, frozenset({"mla_up_proj"}))
    yield Term("attention output", heads * value)
    yield _softmax_statistics(shape, tp)


def _softmax_statistics(shape: ModelShape, tp: int) -> Term:
    """Return what attention keeps for its softmax: a number per head, instead of the scores."""
    per_token = _FLOAT32 * shape.num_heads / tp
    return Term("softmax statistics", per_token, frozenset({"core_attn"}))


def _expert_terms(
    shape: ModelShape,
    experts: Experts,
    train: TrainLayout,
    settings: ActivationSettings,
    own: float,
) -> Iterator[Term]:
    item = settings.weight_bytes
    moe = frozenset({"moe"})
    yield Term("router logits and scores", 2 * _FLOAT32 * experts.num_experts * own, moe)
    # Copies of tokens that arrive here, per token of this rank: each token goes to `topk` experts
    # and, under expert tensor parallelism, to all ranks that share an expert.
    copies = experts.topk * own * train.etp_size * settings.expert_load
    width = item * experts.hidden_size / train.etp_size
    yield Term("tokens of experts", item * shape.hidden_size * copies, moe)
    yield Term("gate and up of experts", 2 * width * copies, moe)
    yield Term("their product", width * copies, frozenset({"moe", "moe_act"}))
    if experts.shared_hidden_size:
        shared = 3 * item * experts.shared_hidden_size / train.tp_size
        yield Term("shared experts", shared, frozenset({"moe", "shared_experts"}))


@dataclass(frozen=True, slots=True)
class _LayerBytes:
    """Activation bytes of one layer and one micro-batch."""

    input: float  # kept by full recomputation
    saved: float  # kept with selective recomputation, or none
    everything: float  # kept without recomputation


def _layer_bytes(
    shape: ModelShape, train: TrainLayout, settings: ActivationSettings, *, is_moe: bool
) -> _LayerBytes:
    tokens = settings.micro_batch_tokens / train.cp_size
    terms = list(layer_terms(shape, train, settings, is_moe=is_moe))
    recompute = settings.recompute
    dropping = recompute.modules if recompute.granularity == "selective" else frozenset()
    saved = sum(t.bytes_per_token for t in terms if not t.dropped_by & dropping)
    spread = recompute.spread_over_tp and not settings.sequence_parallel
    return _LayerBytes(
        input=tokens * terms[0].bytes_per_token / (train.tp_size if spread else 1),
        saved=tokens * saved,
        everything=tokens * sum(t.bytes_per_token for t in terms),
    )


def micro_batches_in_flight(
    stage: int, *, pp_size: int, vp_size: int, num_micro_batches: int
) -> float:
    """Return the most micro-batches whose activations, of all its layers, a stage holds at once.

    1F1B: the number of stages from here to the last. In an interleaved schedule stages hold chunks
    of layers, so this need not be an integer.
    """
    if pp_size == 1:
        return 1.0
    if vp_size == 1:
        return float(min(num_micro_batches, pp_size - stage))
    chunks = 2 * (pp_size - stage - 1) + (vp_size - 1) * pp_size + 1
    return min(num_micro_batches * vp_size, chunks) / vp_size


def train_activation_bytes(
    shape: ModelShape, train: TrainLayout, layers: PipelineLayers, settings: ActivationSettings
) -> list[int]:
    """Return the peak bytes on a rank of each stage: kept activations, and those in progress.

    In progress are one group of recomputed layers, and the gradients of one layer, which take at
    most as many bytes as the layer keeps.
    """
    of = _layer_sizes(shape, train, settings)
    found = []
    for stage, chunks in enumerate(layers):
        in_flight = micro_batches_in_flight(
            stage,
            pp_size=train.pp_size,
            vp_size=len(chunks),
            num_micro_batches=settings.num_micro_batches,
        )
        kept, group = 0.0, 0.0
        for kinds in _kinds(shape, layers, settings, stage):
            more, largest = _kept([of[is_moe] for is_moe in kinds], settings)
            kept, group = kept + more, max(group, largest)
        gradients = max(of[shape.is_moe_layer[n]].everything for chunk in chunks for n in chunk)
        total = kept * in_flight + group + gradients
        if stage == train.pp_size - 1:
            total += head_bytes(shape, train, settings, with_gradients=True)
            total += settings.mtp_layers * _into_mtp_bytes(shape, train, settings)
        found.append(math.ceil(total))
    return found


def _kinds(
    shape: ModelShape, layers: PipelineLayers, settings: ActivationSettings, stage: int
) -> list[list[bool]]:
    """Return whether each layer of a stage's chunks has experts. Trained MTP layers follow the last
    layer, and are of its kind."""
    kinds = [[shape.is_moe_layer[n] for n in chunk] for chunk in layers[stage]]
    if stage == len(layers) - 1:
        kinds[-1] += [shape.is_moe_layer[-1]] * settings.mtp_layers
    return kinds


def _into_mtp_bytes(shape: ModelShape, train: TrainLayout, settings: ActivationSettings) -> float:
    """Return the bytes kept around an MTP layer: embedding and hidden states, both normed and
    concatenated, the result, and the input of the head, which gathers it over TP."""
    tokens = settings.micro_batch_tokens / train.cp_size
    own = 1 / train.tp_size if settings.sequence_parallel else 1.0
    return settings.weight_bytes * shape.hidden_size * tokens * (8 * own + 1)


def _kept(sizes: list[_LayerBytes], settings: ActivationSettings) -> tuple[float, float]:
    """Return a chunk's (bytes kept from forward to backward, largest recomputed group)."""
    recompute = settings.recompute
    if recompute.granularity != "full":
        return sum(size.saved for size in sizes), 0.0
    step = max(1, recompute.num_layers)
    if recompute.method == "block":  # the first layers, one by one
        again, rest = sizes[:step], sizes[step:]
        kept = sum(s.input for s in again) + sum(s.everything for s in rest)
        return kept, max((s.everything for s in again), default=0.0)
    groups = [sizes[first : first + step] for first in range(0, len(sizes), step)]
    kept = sum(group[0].input for group in groups)
    return kept, max((sum(s.everything for s in group) for group in groups), default=0.0)


def head_bytes(
    shape: ModelShape, train: TrainLayout, settings: ActivationSettings, *, with_gradients: bool
) -> float:
    """Return the bytes of the final norm and everything after it.

    For a policy: log-probs and entropy as bounded by `mcore_rl.megatron.log_probs`: the hidden
    states of all tokens are gathered over TP, and logits exist for a chunk of tokens. For a critic:
    its head on this rank's tokens, in float32.
    """
    tokens = settings.micro_batch_tokens / train.cp_size
    own = 1 / train.tp_size if settings.sequence_parallel else 1.0
    hidden = settings.weight_bytes * shape.hidden_size * tokens
    if shape.value_head:
        in_float32 = _FLOAT32 * shape.hidden_size * tokens * own
        total = 2 * hidden * own + in_float32
        return total + hidden * own + in_float32 if with_gradients else total
    total = hidden + 2 * hidden * own + logits_bytes(shape, train, settings, settings.chunk_tokens)
    if with_gradients:
        rows = vocabulary_rows(shape, train.tp_size, settings)
        total += hidden + _FLOAT32 * rows * shape.hidden_size
    return total


def logits_bytes(
    shape: ModelShape, train: TrainLayout, settings: ActivationSettings, chunk_tokens: int
) -> float:
    """Return the bytes of the logits of up to `chunk_tokens` tokens of a micro-batch, over a rank's
    shard of the vocabulary: two copies in float32."""
    tokens = min(chunk_tokens, settings.micro_batch_tokens / train.cp_size)
    rows = vocabulary_rows(shape, train.tp_size, settings)
    return tokens * rows * 2 * _FLOAT32


def micro_batch_activation_bytes(
    shape: ModelShape, train: TrainLayout, layers: PipelineLayers, settings: ActivationSettings
) -> list[int]:
    """Return the bytes that each stage's layers keep of one micro-batch from its forward to its
    backward pass, without recomputed activations."""
    of = _layer_sizes(shape, train, settings)
    return [
        math.ceil(
            sum(
                _kept([of[is_moe] for is_moe in kinds], settings)[0]
                for kinds in _kinds(shape, layers, settings, stage)
            )
        )
        for stage in range(len(layers))
    ]


def _layer_sizes(
    shape: ModelShape, train: TrainLayout, settings: ActivationSettings
) -> dict[bool, _LayerBytes]:
    """Return whether a layer has experts -> its bytes, for the kinds in the model."""
    return {
        is_moe: _layer_bytes(shape, train, settings, is_moe=is_moe)
        for is_moe in set(shape.is_moe_layer)
    }


def log_prob_activation_bytes(
    shape: ModelShape, train: TrainLayout, layers: PipelineLayers, settings: ActivationSettings
) -> list[int]:
    """Return the bytes on a rank of each stage in a forward pass only: one layer at once, or the
    head on the last stage.

    A layer counts with all that it would keep for a backward pass, although this is freed earlier.
    """
    found = []
    for stage, chunks in enumerate(layers):
        kinds = {shape.is_moe_layer[n] for chunk in chunks for n in chunk}
        total = max(_layer_bytes(shape, train, settings, is_moe=k).everything for k in kinds)
        if stage == train.pp_size - 1:
            total = max(total, head_bytes(shape, train, settings, with_gradients=False))
        found.append(math.ceil(total))
    return found


def engine_activation_bytes(
    shape: ModelShape, rollout: RolloutLayout, settings: EngineSettings
) -> int:
    """Return an engine rank's peak bytes: the larger of a layer on a full batch and the logits.

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
