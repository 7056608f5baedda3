"""Formulas for the memory of activations in training.

They follow Korthikanti et al. (arXiv 2205.05198, sections 4 and 5), with the terms of the layers
built here: RMSNorm, SwiGLU, no dropout, attention that never stores its scores (flash or fused),
latent attention and routed experts. Pipelines hold micro-batches as in Narayanan et al. (arXiv
2104.04473, section 2.2). Workspaces of kernels are not included.

A term is the memory per token that one layer keeps for its backward pass. With sequence parallelism
the tokens outside of matrix products are sharded over TP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mcore_rl.model.config_json import LatentAttention, LayerKind
from mcore_rl.model.delta_net import DeltaNet
from mcore_rl.model.experts import Experts
from mcore_rl.model.mamba import Mamba
from mcore_rl.planner.models import TrainedModel, merged_bytes
from mcore_rl.planner.settings import Recompute

_FLOAT32 = 4
# `[t, k]` tensors of the engine's most probable tokens, in units of float32: the micro-batch's and
# the rows', ids as int64 for both passes, log-probs, probabilities and gradients.
_CANDIDATE_TENSORS = 16
_CHUNK = 64  # positions that a delta net computes at once


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes per token that one layer keeps, and the modules whose recomputation drops them."""

    name: str
    bytes_per_token: float
    dropped_by: frozenset[str] = frozenset()


def _token_share(model: TrainedModel) -> float:
    """Return a rank's share of the tokens outside of TP."""
    return 1 / model.train.tp_size if model.training.sequence_parallel else 1.0


def _rank_tokens(model: TrainedModel) -> float:
    """Return a context-parallel rank's tokens of a micro-batch."""
    return model.training.micro_batch_tokens / model.train.cp_size


def layer_terms(model: TrainedModel, kind: LayerKind) -> Iterator[Term]:
    """Yield the terms that one layer keeps for its backward pass; its input comes first."""
    shape, item, tp = model.shape, model.training.weight_bytes, model.train.tp_size
    hidden = item * shape.hidden_size * _token_share(model)
    yield Term("input", hidden)
    yield Term("normed input", hidden, frozenset({"layernorm"}))
    if kind.is_linear and shape.delta_net:
        yield from _delta_net_terms(model, shape.delta_net)
    elif kind.has_mamba and shape.mamba:
        yield from _mamba_terms(model, shape.mamba)
    elif kind.has_attention:
        if shape.latent and shape.indexer:
            yield from _sparse_terms(model, shape.latent)
        elif shape.latent:
            yield from _latent_terms(model, shape.latent)
        else:
            yield from _grouped_terms(model)
        if model.training.attention_in_float32:
            yield Term("attention in float32", _float32_bytes(model), frozenset({"core_attn"}))
        # A number per head, instead of the scores.
        statistics = _FLOAT32 * shape.num_heads / tp
        yield Term("softmax statistics", statistics, frozenset({"core_attn"}))
    if not kind.block:
        yield Term("attention residual", hidden)
        yield Term("normed residual", hidden, frozenset({"layernorm"}))
    if kind.is_moe and shape.experts:
        yield from _expert_terms(model, shape.experts)
    elif kind.has_dense:
        width = item * shape.ffn_hidden_size / tp
        what, copies = (
            ("up and its square", 2) if shape.squared_relu else ("gate, up and their product", 3)
        )
        yield Term(what, copies * width, frozenset({"mlp"}))


def _float32_bytes(model: TrainedModel) -> float:
    """Return the bytes of queries, keys, values and the output of attention in float32."""
    shape, latent = model.shape, model.shape.latent
    if latent is not None:
        head = 2 * (latent.qk_nope_head_dim + latent.qk_rope_head_dim) + 2 * latent.v_head_dim
        return _FLOAT32 * shape.num_heads * head / model.train.tp_size
    heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
    return _FLOAT32 * heads * shape.head_dim / model.train.tp_size


def _grouped_terms(model: TrainedModel) -> Iterator[Term]:
    shape, item, tp = model.shape, model.training.weight_bytes, model.train.tp_size
    queries = item * shape.num_heads * shape.head_dim / tp
    keys = item * shape.num_kv_heads * shape.head_dim / tp
    gates = queries if shape.output_gate else 0.0
    yield Term("queries, keys, values", queries + 2 * keys + gates)
    if shape.qk_norm:
        yield Term("queries and keys before their norms", queries + keys)
    yield Term("attention output", queries)


def _delta_net_terms(model: TrainedModel, delta_net: DeltaNet) -> Iterator[Term]:
    """Yield what flash-linear-attention keeps: it recomputes the states of chunks."""
    item, heads = model.training.weight_bytes / model.train.tp_size, delta_net.num_value_heads
    keys, values = delta_net.key_size, delta_net.value_size
    yield Term("projections", item * (2 * keys + 2 * values + 2 * heads))
    yield Term("convolved queries, keys, values", item * (2 * keys + values))
    # Normed, and repeated for every value head.
    yield Term("queries and keys of heads", item * 2 * heads * delta_net.key_head_dim)
    yield Term("decays and strengths", 2 * _FLOAT32 * heads / model.train.tp_size)
    yield Term("systems of chunks", item * heads * _CHUNK)
    yield Term("states' output", item * values)
    yield Term("gated output", item * values, frozenset({"gdn_norm_out"}))


def _mamba_terms(model: TrainedModel, mamba: Mamba) -> Iterator[Term]:
    """Yield what the kernel of mamba-ssm keeps: it recomputes convolution and states of chunks."""
    item = model.training.weight_bytes / model.train.tp_size
    yield Term("projections", item * sum(mamba.projection_parts))
    yield Term("states' output", item * mamba.inner_size)
    yield Term("gated output and its norm", item * 2 * mamba.inner_size)


def _latent_terms(model: TrainedModel, latent: LatentAttention) -> Iterator[Term]:
    item = model.training.weight_bytes
    heads = item * model.shape.num_heads / model.train.tp_size
    nope, rope, value = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim
    compressed = 2 * latent.kv_lora_rank + rope + 2 * (latent.q_lora_rank or 0)
    yield Term("latents and normed latents", item * compressed * _token_share(model))
    up = heads * (2 * (nope + rope) + nope + value)
    yield Term("queries, keys, values", up, frozenset({"mla_up_proj"}))
    yield Term("attention output", heads * value)


def _sparse_terms(model: TrainedModel, latent: LatentAttention) -> Iterator[Term]:
    """Yield the terms of sparse attention, which absorbs the key projection into queries.

    Megatron's torch path keeps a score of each head for every pair of a query and a key of the row:
    three copies, two of them in float32. Kernels keep none.
    """
    item, training = model.training.weight_bytes, model.training
    heads = model.shape.num_heads / model.train.tp_size
    rank, rope = latent.kv_lora_rank, latent.qk_rope_head_dim
    compressed = 2 * rank + rope + 2 * (latent.q_lora_rank or 0)
    yield Term("latents and normed latents", item * compressed * _token_share(model))
    yield Term("gathered latents", item * (rank + rope))
    queries = latent.qk_nope_head_dim + rope + rank + rope
    yield Term("queries, absorbed queries", item * heads * queries, frozenset({"mla_up_proj"}))
    core = frozenset({"core_attn"})
    if training.keeps_sparse_scores:
        keys = training.packed_tokens or training.positions
        yield Term("scores", (2 * _FLOAT32 + item) * heads * keys, core)
    yield Term("latent and attention output", item * heads * (rank + latent.v_head_dim), core)


def _expert_terms(model: TrainedModel, experts: Experts) -> Iterator[Term]:
    train, item, own = model.train, model.training.weight_bytes, _token_share(model)
    moe = frozenset({"moe"})
    yield Term("router logits and scores", 2 * _FLOAT32 * experts.num_experts * own, moe)
    # Copies of tokens that arrive here, per token of this rank: each token goes to `topk` experts
    # and, under expert tensor parallelism, to all ranks that share an expert.
    copies = experts.topk * own * train.etp_size * model.training.expert_load
    width = item * experts.hidden_size / train.etp_size
    yield Term("tokens of experts", item * model.shape.hidden_size * copies, moe)
    first = 1 if model.shape.squared_relu else 2
    yield Term("up or gate and up of experts", first * width * copies, moe)
    yield Term("their square or product", width * copies, frozenset({"moe", "moe_act"}))
    if experts.shared_hidden_size:
        shared = (first + 1) * item * experts.shared_hidden_size / train.tp_size
        yield Term("shared experts", shared, frozenset({"moe", "shared_experts"}))


@dataclass(frozen=True, slots=True)
class _LayerBytes:
    """Activation bytes of one layer and one micro-batch."""

    input: float  # kept by full recomputation
    saved: float  # kept with selective recomputation, or none
    everything: float  # kept without recomputation


def _layer_sizes(model: TrainedModel) -> dict[LayerKind, _LayerBytes]:
    """Return the bytes of a layer of each kind in the model."""
    return {kind: _layer_bytes(model, kind) for kind in set(model.shape.layer_kinds)}


def _layer_bytes(model: TrainedModel, kind: LayerKind) -> _LayerBytes:
    tokens, recompute = _rank_tokens(model), model.training.recompute
    terms = list(layer_terms(model, kind))
    dropping = recompute.modules if recompute.granularity == "selective" else frozenset()
    saved = sum(t.bytes_per_token for t in terms if not t.dropped_by & dropping)
    spread = recompute.spread_over_tp and not model.training.sequence_parallel
    return _LayerBytes(
        input=tokens * terms[0].bytes_per_token / (model.train.tp_size if spread else 1),
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


def train_activation_bytes(model: TrainedModel) -> list[int]:
    """Return the peak bytes on a rank of each stage: kept activations, and those in progress.

    In progress are one group of recomputed layers, and the gradients of one layer, which take at
    most as many bytes as the layer keeps.
    """
    sizes, training, pp_size = _layer_sizes(model), model.training, model.train.pp_size
    per_stage = []
    for stage, chunks in enumerate(model.layers):
        in_flight = micro_batches_in_flight(
            stage,
            pp_size=pp_size,
            vp_size=len(chunks),
            num_micro_batches=training.num_micro_batches_in_all,
        )
        kept, group = _kept_by_stage(model, sizes, stage)
        kinds = model.shape.layer_kinds
        gradients = max(sizes[kinds[n]].everything for chunk in chunks for n in chunk)
        total = kept * in_flight + group + gradients
        if stage == pp_size - 1:
            total += head_bytes(model, with_gradients=True)
            total += training.mtp_layers * _mtp_input_bytes(model)
        # All micro-batches are on the device.
        tokens = training.num_micro_batches_in_all * training.micro_batch_tokens
        total += _FLOAT32 * training.teacher_outputs * tokens
        per_stage.append(math.ceil(total) + merged_bytes(model, with_gradients=True))
    return per_stage


def micro_batch_activation_bytes(model: TrainedModel) -> list[int]:
    """Return the bytes that each stage's layers keep of one micro-batch from its forward to its
    backward pass, without recomputed activations."""
    sizes = _layer_sizes(model)
    return [math.ceil(_kept_by_stage(model, sizes, stage)[0]) for stage in range(len(model.layers))]


def log_prob_activation_bytes(model: TrainedModel, *, with_entropy: bool = True) -> list[int]:
    """Return the bytes on a rank of each stage in a forward pass only: one layer at once, or the
    head on the last stage.

    A layer counts with all that it would keep for a backward pass, although this is freed earlier.
    """
    sizes, kinds = _layer_sizes(model), model.shape.layer_kinds
    per_stage = [
        max(sizes[kinds[n]].everything for chunk in chunks for n in chunk)
        for chunks in model.layers
    ]
    per_stage[-1] = max(
        per_stage[-1], head_bytes(model, with_gradients=False, with_entropy=with_entropy)
    )
    merged = merged_bytes(model, with_gradients=False)
    return [math.ceil(size) + merged for size in per_stage]


def teacher_activation_bytes(model: TrainedModel, step_tokens: int) -> list[int]:
    """Return the peak bytes on a rank of each stage while `model` scores a step as a teacher.

    The last stage keeps the results of all micro-batches during the forward passes, and then joins
    them; the others receive them after their passes.
    """
    numbers = 2 + model.training.teacher_outputs  # a log-prob and an entropy
    results = _FLOAT32 * numbers * math.ceil(step_tokens / model.train.dp_size)
    forward = log_prob_activation_bytes(model, with_entropy=False)
    per_stage = [max(used, results) for used in forward]
    per_stage[-1] += results
    return per_stage


def _kept_by_stage(
    model: TrainedModel, sizes: dict[LayerKind, _LayerBytes], stage: int
) -> tuple[float, float]:
    """Return (bytes kept of a micro-batch until its backward pass, largest recomputed group)."""
    kept, group = 0.0, 0.0
    for kinds in model.layer_kinds(stage):
        more, largest = _kept([sizes[kind] for kind in kinds], model.training.recompute)
        kept, group = kept + more, max(group, largest)
    return kept, group


def _kept(sizes: list[_LayerBytes], recompute: Recompute) -> tuple[float, float]:
    """Return the same for the layers of a chunk."""
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


def _mtp_input_bytes(model: TrainedModel) -> float:
    """Return the bytes kept around an MTP layer: embedding and hidden states, both normed and
    concatenated, the result, and the input of the head, which gathers it over TP."""
    hidden = model.training.weight_bytes * model.shape.hidden_size * _rank_tokens(model)
    return hidden * (8 * _token_share(model) + 1)


def head_bytes(model: TrainedModel, *, with_gradients: bool, with_entropy: bool = True) -> float:
    """Return the bytes of the final norm and everything after it.

    For a policy: log-probs and entropy as bounded by `mcore_rl.megatron.log_probs`: the hidden
    states of all tokens are gathered over TP, and logits exist for a chunk of tokens, twice for the
    entropy. For a critic: its head on this rank's tokens, in float32.
    """
    shape, training, own = model.shape, model.training, _token_share(model)
    tokens = _rank_tokens(model)
    hidden = training.weight_bytes * shape.hidden_size * tokens
    if shape.value_head:
        in_float32 = _FLOAT32 * shape.hidden_size * tokens * own
        total = 2 * hidden * own + in_float32
        return total + hidden * own + in_float32 if with_gradients else total
    logits = logits_bytes(model, training.chunk_tokens) / (1 if with_entropy else 2)
    total = hidden + 2 * hidden * own + logits
    weight = _FLOAT32 * model.vocabulary_rows * shape.hidden_size
    if training.head_in_float32 and training.weight_bytes < _FLOAT32:
        total += weight  # a copy
    if with_gradients:
        total += hidden + weight + _teacher_loss_bytes(model)
        total += _CANDIDATE_TENSORS * _FLOAT32 * training.num_top_tokens * tokens
    return total


def _teacher_loss_bytes(model: TrainedModel) -> float:
    """Return the bytes that the KL to a teacher adds to the head of a policy, see
    `mcore_rl.megatron.policy_head`."""
    training, tokens = model.training, _rank_tokens(model)
    rows = _FLOAT32 * training.teacher_outputs * training.micro_batch_tokens
    if training.teacher_top_k:
        # Per token and candidate: two int64 ids, and four float32 of its log-prob and gradients.
        return rows + 32 * (training.teacher_top_k + 1) * tokens
    if not training.teacher_hidden:
        return 0.0
    item, hidden_size = training.weight_bytes, model.shape.hidden_size
    states = item * (training.teacher_hidden + hidden_size) * tokens  # the teacher's, a gradient
    gradient = item * model.vocabulary_rows * hidden_size  # a second one of the head's weight
    return rows + states + gradient + logits_bytes(model, training.chunk_tokens) / 2


def logits_bytes(model: TrainedModel, chunk_tokens: int) -> float:
    """Return the bytes of the logits of up to `chunk_tokens` tokens of a micro-batch, over a rank's
    shard of the vocabulary: two copies in float32."""
    return min(chunk_tokens, _rank_tokens(model)) * model.vocabulary_rows * 2 * _FLOAT32
