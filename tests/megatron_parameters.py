"""What Megatron-core 0.19.2 calls the parameters of a rank, and their shapes, written out by hand.

From its sources: models/gpt/gpt_layer_specs.py (which module is what in either spec family),
models/hybrid/hybrid_block.py and hybrid_layer_specs.py (HybridModel),
transformer/moe/experts.py (SequentialMLP, TEGroupedMLP), extensions/transformer_engine.py
(layer_norm_weight, weight0 ..) and transformer/multi_latent_attention.py. The local names are held
against a living model by tests/dist/test_families.py; Transformer Engine needs CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mcore_rl.model.config_json import LatentAttention, ModelShape
from mcore_rl.model.delta_net import DeltaNet
from mcore_rl.model.mamba import Mamba
from mcore_rl.model.tensors import trained_vocabulary_rows

Named = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Spec:
    """A family of layer specs."""

    fused_norms: bool  # the norm is part of the linear layer behind it
    grouped_experts: bool  # TEGroupedMLP instead of SequentialMLP
    fused_down_projections: bool = False  # --mla-down-proj-fusion
    split_down_projections: bool = False  # column-parallel, as in Megatron's own local spec
    halves: bool = False  # a HybridModel, with attention and MLP in layers of their own
    blocks: bool = False  # a HybridModel of layers that have one block each

    def numbered(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """The transformer layers of a stage's decoder layers, given the stage's."""
        return tuple(sorted(layers * 2)) if self.halves else layers

    def place(self, local: int, name: str) -> str:
        """What a parameter of a transformer layer, by its number in the stage, is called."""
        if self.halves:
            is_second = name.startswith(("mlp.", "pre_mlp_layernorm."))
            local = 2 * local + is_second
        return f"decoder.layers.{local}.{name}"


SPECS = {
    "local": Spec(fused_norms=False, grouped_experts=False),
    "local_as_upstream": Spec(
        fused_norms=False, grouped_experts=False, split_down_projections=True
    ),
    "transformer_engine": Spec(fused_norms=True, grouped_experts=True),
    "transformer_engine_sequential": Spec(fused_norms=True, grouped_experts=False),
    "transformer_engine_fused_down": Spec(
        fused_norms=True,
        grouped_experts=True,
        fused_down_projections=True,
        split_down_projections=True,
    ),
    "local, blocks": Spec(fused_norms=False, grouped_experts=False, blocks=True),
    "transformer_engine, blocks": Spec(fused_norms=True, grouped_experts=True, blocks=True),
    "local, hybrid": Spec(fused_norms=False, grouped_experts=False, halves=True),
    "transformer_engine, hybrid": Spec(fused_norms=True, grouped_experts=True, halves=True),
}


def stage_parameters(
    shape: ModelShape,
    spec: Spec,
    *,
    tp_size: int,
    ep_size: int = 1,
    etp_size: int = 1,
    layers: tuple[int, ...],
) -> dict[str, tuple[int, ...]]:
    """Name -> local shape of the parameters and persistent buffers of the stage with `layers`."""
    found: dict[str, tuple[int, ...]] = {}
    vocabulary = (trained_vocabulary_rows(shape.vocab_size, tp_size), shape.hidden_size)
    first, last = layers[0] == 0, layers[-1] == shape.num_layers - 1
    if first:
        found["embedding.word_embeddings.weight"] = vocabulary
    for local, layer in enumerate(layers):
        kind = shape.layer_kinds[layer]
        parts: list[tuple[str, tuple[int, ...]]] = []
        if kind.is_linear and shape.delta_net:
            parts += _delta_net(shape, shape.delta_net, spec, tp_size)
        elif kind.has_mamba and shape.mamba:
            parts += _mamba(shape, shape.mamba, spec, tp_size)
        elif kind.has_attention:
            parts += [*_attention(shape, spec, tp_size), *_indexer(shape, layer)]
        if kind.is_moe:
            parts += _experts(shape, spec, tp_size, ep_size, etp_size)
        elif kind.has_dense:
            parts += _dense(shape, spec, tp_size)
        found |= {spec.place(local, name): size for name, size in parts}
    if last:
        norm = "final_norm" if spec.halves or spec.blocks else "final_layernorm"
        found[f"decoder.{norm}.weight"] = (shape.hidden_size,)
        if not (shape.tied_embeddings and first):
            found["output_layer.weight"] = vocabulary
    return found


def _attention(shape: ModelShape, spec: Spec, tp_size: int) -> Named:
    hidden = shape.hidden_size
    if shape.indexer:  # it reads both normed latents, so that nothing is fused
        spec = replace(spec, fused_norms=False, fused_down_projections=False)
    if shape.latent:
        yield from _latent_attention(shape, shape.latent, spec, tp_size)
        return
    if spec.fused_norms:
        yield "self_attention.linear_qkv.layer_norm_weight", (hidden,)
    else:
        yield "input_layernorm.weight", (hidden,)
    queries = shape.num_heads * (2 if shape.output_gate else 1)
    rows = (queries + 2 * shape.num_kv_heads) * shape.head_dim // tp_size
    yield "self_attention.linear_qkv.weight", (rows, hidden)
    if shape.qkv_bias:
        yield "self_attention.linear_qkv.bias", (rows,)
    if shape.qk_norm:
        whole = shape.norms_whole_projection
        queries, keys = (shape.num_heads, shape.num_kv_heads) if whole else (1, 1)
        yield "self_attention.q_layernorm.weight", (queries * shape.head_dim,)
        yield "self_attention.k_layernorm.weight", (keys * shape.head_dim,)
    if shape.attention_sinks:
        yield "self_attention.core_attention.softmax_offset", (shape.num_heads // tp_size,)
    columns = shape.num_heads * shape.head_dim // tp_size
    yield "self_attention.linear_proj.weight", (hidden, columns)
    if shape.linear_biases:
        yield "self_attention.linear_proj.bias", (hidden,)


def _delta_net(shape: ModelShape, delta_net: DeltaNet, spec: Spec, tp_size: int) -> Named:
    at, hidden, heads = "self_attention.", shape.hidden_size, delta_net.num_value_heads // tp_size
    yield (
        at + "in_proj.layer_norm_weight" if spec.fused_norms else "input_layernorm.weight",
        (hidden,),
    )
    keys = delta_net.num_key_heads * delta_net.key_head_dim // tp_size
    values = heads * delta_net.value_head_dim
    yield at + "in_proj.weight", (2 * keys + 2 * values + 2 * heads, hidden)
    yield at + "conv1d.weight", (2 * keys + values, 1, delta_net.conv_width)
    yield at + "dt_bias", (heads,)
    yield at + "A_log", (heads,)
    yield at + "out_norm.weight", (delta_net.value_head_dim,)
    yield at + "out_proj.weight", (hidden, values)


def _mamba(shape: ModelShape, mamba: Mamba, spec: Spec, tp_size: int) -> Named:
    hidden, heads = shape.hidden_size, mamba.num_heads // tp_size
    inner, state = heads * mamba.head_dim, mamba.num_groups * mamba.state_size // tp_size
    yield ("mixer.in_proj.layer_norm_weight" if spec.fused_norms else "norm.weight"), (hidden,)
    yield "mixer.in_proj.weight", (2 * inner + 2 * state + heads, hidden)
    yield "mixer.conv1d_weight", (inner + 2 * state, 1, mamba.conv_width)
    yield "mixer.conv1d_bias", (inner + 2 * state,)
    for name in ("dt_bias", "A_log", "D"):
        yield f"mixer.{name}", (heads,)
    yield "mixer.norm.weight", (inner,)
    yield "mixer.out_proj.weight", (hidden, inner)


def _latent_attention(
    shape: ModelShape, latent: LatentAttention, spec: Spec, tp_size: int
) -> Named:
    hidden, rank, compressed = shape.hidden_size, latent.q_lora_rank, latent.kv_lora_rank
    heads = shape.num_heads // tp_size
    query = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    kv_down = compressed + latent.qk_rope_head_dim
    share = tp_size if spec.split_down_projections else 1
    fused_down = spec.fused_down_projections and rank is not None
    if fused_down:
        assert rank is not None
        yield "self_attention.linear_qkv_down_proj.layer_norm_weight", (hidden,)
        yield "self_attention.linear_qkv_down_proj.weight", ((rank + kv_down) // share, hidden)
    else:
        yield "input_layernorm.weight", (hidden,)
        yield "self_attention.linear_kv_down_proj.weight", (kv_down // share, hidden)
    if rank is None:
        yield "self_attention.linear_q_proj.weight", (query, hidden)
    else:
        if not fused_down:
            yield "self_attention.linear_q_down_proj.weight", (rank // share, hidden)
        yield "self_attention.linear_q_up_proj.weight", (query, rank)
    up = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    yield "self_attention.linear_kv_up_proj.weight", (up, compressed)
    norms = {"q": rank, "kv": compressed}
    for name, size in norms.items():
        if size is None:
            continue
        if spec.fused_norms:
            yield f"self_attention.linear_{name}_up_proj.layer_norm_weight", (size,)
        else:
            yield f"self_attention.{name}_layernorm.weight", (size,)
    yield "self_attention.linear_proj.weight", (hidden, heads * latent.v_head_dim)


def _indexer(shape: ModelShape, layer: int) -> Named:
    indexer, latent = shape.indexer, shape.latent
    if indexer is None or latent is None or not indexer.in_layer[layer]:
        return
    at = "self_attention.core_attention.indexer."
    rows = indexer.num_heads * indexer.head_dim
    yield at + "linear_wq_b.weight", (rows, latent.q_lora_rank or shape.hidden_size)
    yield at + "linear_wk.weight", (indexer.head_dim, shape.hidden_size)
    yield at + "k_norm.weight", (indexer.head_dim,)
    yield at + "k_norm.bias", (indexer.head_dim,)
    yield at + "linear_weights_proj.weight", (indexer.num_heads, shape.hidden_size)


def _dense(shape: ModelShape, spec: Spec, tp_size: int) -> Named:
    hidden, width = shape.hidden_size, shape.ffn_hidden_size // tp_size
    norm = "mlp.linear_fc1.layer_norm_weight" if spec.fused_norms else "pre_mlp_layernorm.weight"
    yield norm, (hidden,)
    yield "mlp.linear_fc1.weight", ((1 if shape.squared_relu else 2) * width, hidden)
    yield "mlp.linear_fc2.weight", (hidden, width)


def _experts(shape: ModelShape, spec: Spec, tp_size: int, ep_size: int, etp_size: int) -> Named:
    experts, hidden = shape.experts, shape.hidden_size
    assert experts is not None
    yield "pre_mlp_layernorm.weight", (hidden,)
    yield "mlp.router.weight", (experts.num_experts, hidden)
    if shape.linear_biases:
        yield "mlp.router.bias", (experts.num_experts,)
    if experts.has_bias:
        yield "mlp.router.expert_bias", (experts.num_experts,)
    width, first = experts.hidden_size // etp_size, 1 if shape.squared_relu else 2
    for local in range(experts.num_experts // ep_size):
        form = "mlp.experts.{}.{}" + str(local)
        if not spec.grouped_experts:
            form = f"mlp.experts.local_experts.{local}.{{}}.{{}}"
        yield form.format("linear_fc1", "weight"), (first * width, hidden)
        yield form.format("linear_fc2", "weight"), (hidden, width)
        if shape.linear_biases:
            yield form.format("linear_fc1", "bias"), (first * width,)
            yield form.format("linear_fc2", "bias"), (hidden,)
    if experts.shared_hidden_size:
        width = experts.shared_hidden_size // tp_size
        yield "mlp.shared_experts.linear_fc1.weight", (first * width, hidden)
        yield "mlp.shared_experts.linear_fc2.weight", (hidden, width)
    if experts.has_shared_gate:
        yield "mlp.shared_experts.gate_weight", (1, hidden)
