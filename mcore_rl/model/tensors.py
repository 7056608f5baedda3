"""Table of a Hugging Face checkpoint's tensors and their cuts in training and rollout.

One table serves all families. It needs only `ModelShape`, so it is available before any weight is
read or any process starts. The planner and the rank map use it. The hand-over does not: its
holdings come from the live Megatron parameters and its needs from vLLM's own loaders; a test
compares both with this table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from mcore_rl.model import mamba
from mcore_rl.model.config_json import LatentAttention, LayerKind, ModelShape
from mcore_rl.model.delta_net import BLOCK, CONVOLUTION, DeltaNet
from mcore_rl.model.families import family_of
from mcore_rl.model.family import TensorNames, bias_of
from mcore_rl.model.layout import PipelineLayers
from mcore_rl.model.sparse_attention import Indexer

_VLLM_VOCABULARY_MULTIPLE = 64
VALUE_HEAD = "score.weight"  # of a critic or a reward model, `[1, h]`


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Checkpoint tensor: its full shape, and the name and size in bytes of its element type.

    Example: `TensorInfo(shape=(7168, 2048), dtype="bfloat16", itemsize=2)`.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class Cut(Enum):
    """Tensor-parallel cut of a checkpoint tensor, the same in training and rollout."""

    REPLICATED = "replicated"
    ROWS = "rows"  # Megatron's column-parallel layers
    COLUMNS = "columns"  # Megatron's row-parallel layers
    KV_ROWS = "kv_rows"  # rows by key/value heads; vLLM copies heads if there are more ranks
    VOCABULARY = "vocabulary"  # rows of the padded vocabulary


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Checkpoint tensor of a layer, or one such tensor per routed expert.

    `name` follows the layer's prefix, with `{expert}` for an expert's number. `shape` describes one
    tensor. `num_experts` is 0 for tensors that are not routed experts.

    Example: `TensorSpec("mlp.experts.{expert}.up_proj.weight", (2048, 7168), Cut.ROWS,
    num_experts=256)`.
    """

    name: str
    shape: tuple[int, ...]
    cut: Cut
    num_experts: int = 0
    dtype: str = "bfloat16"
    is_shared_expert: bool = False
    parts: tuple[int, ...] = ()  # rows of each stacked tensor, if they are cut separately
    is_indexer: bool = False  # of sparse attention

    @property
    def num_bytes(self) -> int:
        """Total bytes, over all experts."""
        itemsize = 4 if self.dtype == "float32" else 2
        return math.prod(self.shape) * max(1, self.num_experts) * itemsize


def embedding_specs(shape: ModelShape) -> list[TensorSpec]:
    """Return the tensors before the layers; tied embeddings also serve as the head."""
    vocabulary = (shape.vocab_size, shape.hidden_size)
    name = family_of(shape.architecture).names.embedding
    return [TensorSpec(name, vocabulary, Cut.VOCABULARY)]


def head_specs(shape: ModelShape) -> list[TensorSpec]:
    """Return the tensors after the layers."""
    name = family_of(shape.architecture).names.final_norm
    specs = [TensorSpec(name, (shape.hidden_size,), Cut.REPLICATED)]
    if shape.value_head:
        specs.append(TensorSpec(VALUE_HEAD, (1, shape.hidden_size), Cut.REPLICATED))
    elif not shape.tied_embeddings:
        vocabulary = (shape.vocab_size, shape.hidden_size)
        specs.append(TensorSpec("lm_head.weight", vocabulary, Cut.VOCABULARY))
    return specs


def layer_specs(shape: ModelShape, kind: LayerKind) -> list[TensorSpec]:
    """Return the tensors of one decoder layer."""
    hidden, names = (shape.hidden_size,), family_of(shape.architecture).names
    specs: list[TensorSpec] = []
    if kind.has_mixer:
        specs.append(TensorSpec(names.input_norm, hidden, Cut.REPLICATED))
        specs += _mixer(shape, kind)
    if kind.is_moe or kind.has_dense:
        specs.append(TensorSpec(names.mlp_norm, hidden, Cut.REPLICATED))
        specs += (
            _experts(shape)
            if kind.is_moe
            else _feed_forward(shape, names.dense, shape.ffn_hidden_size)
        )
    return specs


def _mixer(shape: ModelShape, kind: LayerKind) -> list[TensorSpec]:
    """Return the tensors of what mixes positions."""
    if kind.is_linear and shape.delta_net:
        return _delta_net(shape.hidden_size, shape.delta_net)
    if kind.has_mamba and shape.mamba:
        return _mamba(shape.hidden_size, shape.mamba)
    if not shape.latent:
        return _grouped_attention(shape)
    indexer = shape.indexer if kind.has_indexer else None
    return [
        *_latent_attention(shape, shape.latent),
        *(_indexer(shape.hidden_size, shape.latent, indexer) if indexer else ()),
    ]


def _delta_net(hidden: int, delta_net: DeltaNet) -> list[TensorSpec]:
    heads, parts = (delta_net.num_value_heads,), delta_net.conv_parts
    return [
        *(
            TensorSpec(name, (sum(rows), hidden), Cut.ROWS, parts=rows if len(rows) > 1 else ())
            for name, rows in delta_net.projections().items()
        ),
        TensorSpec(CONVOLUTION, (sum(parts), 1, delta_net.conv_width), Cut.ROWS, parts=parts),
        TensorSpec(BLOCK + "A_log", heads, Cut.ROWS),
        TensorSpec(BLOCK + "dt_bias", heads, Cut.ROWS),
        TensorSpec(BLOCK + "norm.weight", (delta_net.value_head_dim,), Cut.REPLICATED),
        TensorSpec(BLOCK + "out_proj.weight", (hidden, delta_net.value_size), Cut.COLUMNS),
    ]


def _mamba(hidden: int, sizes: mamba.Mamba) -> list[TensorSpec]:
    at, parts, rows = mamba.BLOCK, sizes.conv_parts, sizes.projection_parts
    return [
        TensorSpec(mamba.PROJECTION, (sum(rows), hidden), Cut.ROWS, parts=rows),
        TensorSpec(mamba.CONVOLUTION, (sum(parts), 1, sizes.conv_width), Cut.ROWS, parts=parts),
        TensorSpec(mamba.CONVOLUTION_BIAS, (sum(parts),), Cut.ROWS, parts=parts),
        *(TensorSpec(at + name, (sizes.num_heads,), Cut.ROWS) for name in mamba.BY_HEAD),
        TensorSpec(at + "norm.weight", (sizes.inner_size,), Cut.ROWS),
        TensorSpec(at + "out_proj.weight", (hidden, sizes.inner_size), Cut.COLUMNS),
    ]


def _grouped_attention(shape: ModelShape) -> list[TensorSpec]:
    hidden, head = shape.hidden_size, shape.head_dim
    at = family_of(shape.architecture).names.attention
    queries, keys = shape.num_heads * head, shape.num_kv_heads * head
    specs = [
        TensorSpec(at + "q_proj.weight", (queries * (1 + shape.output_gate), hidden), Cut.ROWS),
        TensorSpec(at + "k_proj.weight", (keys, hidden), Cut.KV_ROWS),
        TensorSpec(at + "v_proj.weight", (keys, hidden), Cut.KV_ROWS),
        TensorSpec(at + "o_proj.weight", (hidden, queries), Cut.COLUMNS),
    ]
    if shape.qkv_bias:
        specs += [
            TensorSpec(at + "q_proj.bias", (queries,), Cut.ROWS),
            TensorSpec(at + "k_proj.bias", (keys,), Cut.KV_ROWS),
            TensorSpec(at + "v_proj.bias", (keys,), Cut.KV_ROWS),
        ]
    if shape.linear_biases:
        specs.append(TensorSpec(at + "o_proj.bias", (hidden,), Cut.REPLICATED))
    if shape.attention_sinks:
        specs.append(TensorSpec(at + "sinks", (shape.num_heads,), Cut.ROWS))
    if shape.qk_norm:
        normed = (queries, keys) if shape.norms_whole_projection else (head, head)
        specs += [
            TensorSpec(at + "q_norm.weight", (normed[0],), Cut.REPLICATED),
            TensorSpec(at + "k_norm.weight", (normed[1],), Cut.REPLICATED),
        ]
    return specs


def _latent_attention(shape: ModelShape, latent: LatentAttention) -> list[TensorSpec]:
    """Return the tensors of latent attention; down-projections are replicated on both sides."""
    hidden, heads, rank = shape.hidden_size, shape.num_heads, latent.q_lora_rank
    query = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    compressed = latent.kv_lora_rank
    value = latent.qk_nope_head_dim + latent.v_head_dim
    if rank is None:
        queries = [TensorSpec("self_attn.q_proj.weight", (heads * query, hidden), Cut.ROWS)]
    else:
        queries = [
            TensorSpec("self_attn.q_a_proj.weight", (rank, hidden), Cut.REPLICATED),
            TensorSpec("self_attn.q_a_layernorm.weight", (rank,), Cut.REPLICATED),
            TensorSpec("self_attn.q_b_proj.weight", (heads * query, rank), Cut.ROWS),
        ]
    return [
        *queries,
        TensorSpec(
            "self_attn.kv_a_proj_with_mqa.weight",
            (compressed + latent.qk_rope_head_dim, hidden),
            Cut.REPLICATED,
        ),
        TensorSpec("self_attn.kv_a_layernorm.weight", (compressed,), Cut.REPLICATED),
        TensorSpec("self_attn.kv_b_proj.weight", (heads * value, compressed), Cut.ROWS),
        TensorSpec("self_attn.o_proj.weight", (hidden, heads * latent.v_head_dim), Cut.COLUMNS),
    ]


def _indexer(hidden: int, latent: LatentAttention, indexer: Indexer) -> list[TensorSpec]:
    """Return the tensors of a sparse attention's indexer, which is replicated on both sides."""
    at, heads, head = "self_attn.indexer.", indexer.num_heads, indexer.head_dim
    sizes = {
        "wq_b.weight": (heads * head, latent.q_lora_rank or hidden),
        "wk.weight": (head, hidden),
        "k_norm.weight": (head,),
        "k_norm.bias": (head,),
        "weights_proj.weight": (heads, hidden),
    }
    return [
        TensorSpec(at + name, size, Cut.REPLICATED, is_indexer=True) for name, size in sizes.items()
    ]


def _feed_forward(
    shape: ModelShape,
    prefix: str,
    width: int,
    num_experts: int = 0,
    names: TensorNames = TensorNames(),  # noqa: B008 (frozen)
) -> list[TensorSpec]:
    hidden = shape.hidden_size
    first = (names.up,) if shape.squared_relu else (names.gate, names.up)
    return [
        *(TensorSpec(prefix + name, (width, hidden), Cut.ROWS, num_experts) for name in first),
        TensorSpec(prefix + names.down, (hidden, width), Cut.COLUMNS, num_experts),
    ]


def _experts(shape: ModelShape) -> list[TensorSpec]:
    experts, hidden = shape.experts, shape.hidden_size
    assert experts is not None, "a MoE layer of a model without experts"
    count = experts.num_experts
    names = family_of(shape.architecture).names
    specs = [TensorSpec(names.router, (count, hidden), Cut.REPLICATED)]
    if experts.has_bias:
        specs.append(TensorSpec(names.router_bias, (count,), Cut.REPLICATED, dtype="float32"))
    specs += _feed_forward(shape, names.expert, experts.hidden_size, count, names)
    if shape.linear_biases:
        specs.append(TensorSpec(names.scorer_bias, (count,), Cut.REPLICATED))
        gate, up, down = (
            names.expert + bias_of(name) for name in (names.gate, names.up, names.down)
        )
        specs += [
            TensorSpec(gate, (experts.hidden_size,), Cut.ROWS, count),
            TensorSpec(up, (experts.hidden_size,), Cut.ROWS, count),
            TensorSpec(down, (hidden,), Cut.REPLICATED, count),
        ]
    if experts.shared_hidden_size:
        shared = _feed_forward(shape, names.shared_experts, experts.shared_hidden_size)
        specs += [replace(spec, is_shared_expert=True) for spec in shared]
    if experts.has_shared_gate:
        specs.append(TensorSpec(names.shared_gate, (1, hidden), Cut.REPLICATED))
    return specs


def checkpoint_tensors(shape: ModelShape) -> Iterator[tuple[str, TensorSpec]]:
    """Yield (full name, spec) of every tensor of the model, without MTP layers."""
    for spec in (*embedding_specs(shape), *head_specs(shape)):
        yield spec.name, spec
    for layer, kind in enumerate(shape.layer_kinds):
        yield from _in_layer(shape, layer, layer_specs(shape, kind))


def _in_layer(
    shape: ModelShape, layer: int, specs: Iterable[TensorSpec]
) -> Iterator[tuple[str, TensorSpec]]:
    prefix = family_of(shape.architecture).names.layers
    for spec in specs:
        for expert in range(max(1, spec.num_experts)):
            yield f"{prefix}{layer}.{spec.name.format(expert=expert)}", spec


# Suffixes of an MTP layer's copies of the model's tensors, and the originals. Engines share the
# originals with their drafters and do not read the copies.
_MTP_COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}

# Name endings that only MTP layers have.
_MTP_ALONE = (
    *_MTP_COPIES,
    *("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"),
)


def is_mtp_tensor(name: str, num_layers: int) -> bool:
    """Return whether a tensor belongs to a multi-token-prediction layer.

    Its number follows the last decoder layer's, or its name begins with "mtp"."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"] and len(parts) > 2:
        is_number = parts[2].isdecimal() and len(parts[2]) < 10  # names in a folder are arbitrary
        return is_number and int(parts[2]) >= num_layers
    return parts[0] == "mtp"


def mtp_among(names: Iterable[str], num_layers: int) -> set[str]:
    """Return the `names` of MTP layers. A layer after the last one with only a decoder layer's
    tensors is not one: its config.json describes a model of fewer layers."""
    layer_of = {name: name.split(".")[:3] for name in names if is_mtp_tensor(name, num_layers)}
    layers = [layer for name, layer in layer_of.items() if name.endswith(_MTP_ALONE)]
    return {name for name, layer in layer_of.items() if layer[0] == "mtp" or layer in layers}


def is_mtp_copy(name: str) -> bool:
    """Return whether a tensor of an MTP layer is a copy of the embedding or the head."""
    return name.endswith(tuple(_MTP_COPIES))


def copied_by_mtp(name: str, *, tied: bool) -> str | None:
    """Return the name of the tensor that an MTP layer's tensor copies; None if not a copy."""
    copied = next((whole for end, whole in _MTP_COPIES.items() if name.endswith(end)), None)
    return "model.embed_tokens.weight" if copied and tied else copied


def mtp_layer_specs(shape: ModelShape) -> list[TensorSpec]:
    """Return the tensors of one multi-token-prediction layer (arXiv 2412.19437, section 2.2).

    It has the tensors of the last decoder layer, an indexer of its own in sparse attention, three
    norms and a projection. Its copies of embedding and head are omitted."""
    width = shape.hidden_size
    kind = replace(shape.layer_kinds[-1], has_indexer=shape.indexer is not None)
    norms = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    return [
        *(TensorSpec(name, (width,), Cut.REPLICATED) for name in norms),
        TensorSpec("eh_proj.weight", (width, 2 * width), Cut.REPLICATED),
        *layer_specs(shape, kind),
    ]


def mtp_tensors(
    shape: ModelShape, num_layers: int | None = None
) -> Iterator[tuple[str, TensorSpec]]:
    """Yield (full name, spec) of the MTP layers' tensors, without copies of embedding and head.

    `num_layers` limits the layers; None: all."""
    count = shape.num_mtp_layers if num_layers is None else num_layers
    for layer in range(shape.num_layers, shape.num_layers + count):
        yield from _in_layer(shape, layer, mtp_layer_specs(shape))


def trained_vocabulary_rows(vocab_size: int, tp_size: int) -> int:
    """Return the rows of the padded vocabulary on a Megatron rank.

    The vocabulary is padded to a multiple of 64 and of TP, so that it is cut where vLLM cuts it.
    """
    multiple = math.lcm(_VLLM_VOCABULARY_MULTIPLE, tp_size)
    return math.ceil(vocab_size / multiple) * multiple // tp_size


def served_vocabulary_rows(vocab_size: int, tp_size: int) -> int:
    """Return the rows of the padded vocabulary on a vLLM rank."""
    multiple = _VLLM_VOCABULARY_MULTIPLE
    return math.ceil(vocab_size / multiple) * multiple // tp_size


def parts_of(spec: TensorSpec) -> list[TensorSpec]:
    """Return the parts of a tensor that are cut separately, each as a tensor; else itself."""
    if not spec.parts:
        return [spec]
    return [
        replace(spec, name=f"{spec.name}[{nth}]", shape=(rows, *spec.shape[1:]), parts=())
        for nth, rows in enumerate(spec.parts)
    ]


def cut_range(
    spec: TensorSpec, rank: int, size: int, *, kv_heads: int, vocabulary_rows: int
) -> tuple[int, int, int] | None:
    """Return (dimension, start, stop) of the part on `rank` in a group of `size`; None: all of it.

    `job.layout` refuses uneven sizes earlier; here they are a bug. A tensor of several parts has no
    such range: ask for each of its `parts_of`.
    """
    if spec.cut is Cut.REPLICATED or size == 1:
        return None
    assert not spec.parts, f"{spec.name} is cut by parts"
    if spec.cut is Cut.VOCABULARY:
        start = min(rank * vocabulary_rows, spec.shape[0])
        return 0, start, min(start + vocabulary_rows, spec.shape[0])
    dim = 1 if spec.cut is Cut.COLUMNS else 0
    if spec.cut is Cut.KV_ROWS and size > kv_heads:
        rank, size = rank * kv_heads // size, kv_heads
    part, rest = divmod(spec.shape[dim], size)
    assert rest == 0, f"{spec.name} of {spec.shape} does not divide into {size} parts"
    return dim, rank * part, (rank + 1) * part


def active_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that a token passes through, without the embedding."""
    of_layers = _active_parameters_of_layers(shape)
    return _active_parameters_of_head(shape) + sum(map(of_layers.__getitem__, shape.layer_kinds))


@functools.lru_cache(maxsize=1024)
def most_active_parameters(shape: ModelShape, layers: PipelineLayers) -> int:
    """Return the same of the pipeline stage that has most. The last one has the output layer."""
    of_layers = _active_parameters_of_layers(shape)
    of_stages = [
        sum(of_layers[shape.layer_kinds[layer]] for chunk in stage for layer in chunk)
        for stage in layers
    ]
    of_stages[-1] += _active_parameters_of_head(shape)
    return max(of_stages)


def _active_parameters_of_head(shape: ModelShape) -> int:
    total = sum(math.prod(spec.shape) for spec in head_specs(shape))
    return total + shape.vocab_size * shape.hidden_size * shape.tied_embeddings


def _active_parameters_of_layers(shape: ModelShape) -> dict[LayerKind, int]:
    topk = shape.experts.topk if shape.experts else 0
    return {
        kind: sum(
            math.prod(spec.shape) * (topk if spec.num_experts else 1)
            for spec in layer_specs(shape, kind)
        )
        for kind in set(shape.layer_kinds)
    }
