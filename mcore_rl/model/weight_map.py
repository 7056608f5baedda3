"""Map from slices of Hugging Face tensors to places in a Megatron parameter shard.

Pieces describe a parameter of one rank: a box of a checkpoint tensor equals a box of the local
parameter. Pieces are used forwards to load a checkpoint into Megatron and backwards to export one.
Their intersections with the needs of a vLLM rank are the source of the hand-over.

The rules know the Megatron names of both spec families: local layers, and Transformer Engine with
grouped experts and with norms fused into the following linear layer. They serve GPTModel, and
HybridModel, in which two decoder layers are one transformer layer. Checkpoint names are common to
all model families, except for the experts' names, which `families` defines.

With Megatron-FSDP, which shards parameters over data parallelism, a rank holds only some rows. The
parameters of a layer lie in one flat bucket. Each data-parallel rank has an equal part of it, which
begins and ends at a row boundary. The pieces are cut to the rank's rows: the hand-over sends each
row from its owner and gathers nothing.

A parameter without a rule raises an error that names it.

Shape legend: o output rows of a weight, i input columns, v vocabulary, h hidden.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mcore_rl.model.boxes import Box, full_box, intersect, relative
from mcore_rl.model.config_json import LatentAttention, ModelShape
from mcore_rl.model.delta_net import BLOCK, DeltaNet, Rows
from mcore_rl.model.experts import Experts
from mcore_rl.model.families import bias_of, family_of
from mcore_rl.model.layout import TrainLayout
from mcore_rl.model.mamba import BLOCK as MIXER
from mcore_rl.model.mamba import BY_HEAD, Mamba
from mcore_rl.model.tensors import VALUE_HEAD


@dataclass(frozen=True, slots=True)
class Piece:
    """Equal boxes: `checkpoint_tensor[checkpoint_box]` is `parameter[local_box]`, of one shape.

    Example: `Piece("lm_head.weight", ((64, 128), (0, 32)), ((0, 64), (0, 32)))` on TP rank 1.
    """

    tensor: str
    checkpoint_box: Box
    local_box: Box


@dataclass(frozen=True, slots=True)
class ShardCoordinates:
    """Position of a model chunk: its share of every split dimension, and its layers.

    Example: TP2 x EP2, third and fourth layer: `ShardCoordinates(1, 2, 1, 2, 0, 1, layers=(2, 3))`.
    """

    tp_rank: int
    tp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    layers: tuple[int, ...]  # transformer layer (global, from 0) of each local decoder layer

    @classmethod
    def of(cls, layout: TrainLayout, rank: int, layers: tuple[int, ...]) -> ShardCoordinates:
        return cls(
            tp_rank=layout.tp_rank(rank),
            tp_size=layout.tp_size,
            ep_rank=layout.ep_rank(rank),
            ep_size=layout.ep_size,
            etp_rank=layout.etp_rank(rank),
            etp_size=layout.etp_size,
            layers=layers,
        )


@dataclass(frozen=True, slots=True)
class _Parameter:
    """Local parameter, as passed to a rule."""

    name: str
    shape: tuple[int, ...]
    prefix: str  # of its checkpoint tensors: "", "model.layers.7." or that of a routed expert
    rank: int  # in the group that splits this parameter: TP, or ETP for routed experts
    size: int


_Rule = Callable[[_Parameter], list[Piece]]


def _rows(tensor: str, shape: Sequence[int], start: int, local_start: int, count: int) -> Piece:
    """Map `count` checkpoint rows from `start` to parameter rows from `local_start`."""
    rest = full_box(shape[1:])
    return Piece(
        tensor,
        ((start, start + count), *rest),
        ((local_start, local_start + count), *rest),
    )


def _replicated(name: str) -> _Rule:
    """Return a rule for a replicated tensor: every rank holds all of it."""

    def rule(p: _Parameter) -> list[Piece]:
        box = full_box(p.shape)
        return [Piece(p.prefix + name, box, box)]

    return rule


def _column(name: str) -> _Rule:
    """Return a rule for split rows: rank r holds rows r*o .. (r+1)*o of the checkpoint."""

    def rule(p: _Parameter) -> list[Piece]:
        return [_rows(p.prefix + name, p.shape, p.rank * p.shape[0], 0, p.shape[0])]

    return rule


def _row(name: str) -> _Rule:
    """Return a rule for split columns: rank r holds columns r*i .. (r+1)*i of the checkpoint."""

    def rule(p: _Parameter) -> list[Piece]:
        out, width = p.shape
        first = p.rank * width
        return [Piece(p.prefix + name, ((0, out), (first, first + width)), full_box(p.shape))]

    return rule


def _stacked(*parts: tuple[str, int]) -> _Rule:
    """Return a rule for stacked tensors `(name, rows)`: all rows, or this rank's rows, of each."""

    def rule(p: _Parameter) -> list[Piece]:
        is_whole = p.shape[0] == sum(size for _, size in parts)
        pieces, local = [], 0
        for name, size in parts:
            count = size if is_whole else size // p.size
            first = 0 if is_whole else p.rank * count
            pieces.append(_rows(p.prefix + name, p.shape, first, local, count))
            local += count
        assert local == p.shape[0], (p.name, p.shape)
        return pieces

    return rule


def _listed(rows: Callable[[int, int], Iterable[Rows]]) -> _Rule:
    """Return a rule for rows of several tensors in the order that `rows(rank, size)` lists."""

    def rule(p: _Parameter) -> list[Piece]:
        pieces, local = [], 0
        for part in rows(p.rank, p.size):
            pieces.append(_rows(p.prefix + part.tensor, p.shape, part.first, local, part.count))
            local += part.count
        assert local == p.shape[0], (p.name, p.shape)
        return pieces

    return rule


def _gate_and_up(gate: str, up: str) -> _Rule:
    """Return a rule for SwiGLU's first layer: this rank's gate rows, then its up rows."""

    def rule(p: _Parameter) -> list[Piece]:
        half = p.shape[0] // 2
        first = p.rank * half
        return [
            _rows(p.prefix + gate, p.shape, first, 0, half),
            _rows(p.prefix + up, p.shape, first, half, half),
        ]

    return rule


def _qkv(kind: str, shape: ModelShape) -> _Rule:
    """Return a rule for Megatron's interleaving: [query heads, key, value] per key/value group.

    With an output gate it is [query heads, gates, key, value], and q_proj has [query, gate] per
    head."""
    head, heads = shape.head_dim, shape.num_heads // shape.num_kv_heads
    at = family_of(shape.architecture).names.attention

    def rows_of(name: str, first: int, count: int) -> Rows:
        return Rows(f"{at}{name}_proj.{kind}", first, count)

    def rows(rank: int, size: int) -> Iterator[Rows]:
        groups = shape.num_kv_heads // size
        for group in range(rank * groups, (rank + 1) * groups):
            if shape.output_gate:
                for is_gate in range(2):
                    for nth in range(group * heads, (group + 1) * heads):
                        yield rows_of("q", (2 * nth + is_gate) * head, head)
            else:
                yield rows_of("q", group * heads * head, heads * head)
            yield rows_of("k", group * head, head)
            yield rows_of("v", group * head, head)

    return _listed(rows)


def _norm_of_heads(name: str, width: int) -> _Rule:
    """Return a rule for query or key norms, which are replicated.

    It raises for another width: a fork's spec may norm each head instead of all heads together."""

    def rule(p: _Parameter) -> list[Piece]:
        if p.shape != (width,):
            raise RuntimeError(
                f"{p.name} has shape {list(p.shape)} and {name} in the checkpoint [{width}]: the "
                "model was built with other norms of queries and keys"
            )
        return _replicated(name)(p)

    return rule


def _vocabulary(name: str, vocab_size: int) -> _Rule:
    """Return a rule for split rows of the padded vocabulary; padding rows have no counterpart."""

    def rule(p: _Parameter) -> list[Piece]:
        rows = p.shape[0]
        first = p.rank * rows
        real = min(rows, vocab_size - first)
        return [_rows(name, p.shape, first, 0, real)] if real > 0 else []

    return rule


def _top_rules(shape: ModelShape) -> dict[str, _Rule]:
    """Return the rules outside the decoder layers."""
    names = family_of(shape.architecture).names
    embedding = _vocabulary(names.embedding, shape.vocab_size)
    if shape.value_head:
        head = _replicated(VALUE_HEAD)
    elif shape.tied_embeddings:  # the last pipeline stage holds a second copy of the embedding
        head = embedding
    else:
        head = _vocabulary("lm_head.weight", shape.vocab_size)
    return {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": _replicated(names.final_norm),
        "decoder.final_norm.weight": _replicated(names.final_norm),  # in a HybridModel
        "output_layer.weight": head,
    }


def _layer_rules(shape: ModelShape) -> dict[str, _Rule]:
    """Return the rules within `decoder.layers.N.`, exactly those that this model needs.

    Each norm has two names, local and fused. "N" stands for an expert's number.
    """
    names = family_of(shape.architecture).names
    input_norm, mlp_norm = _replicated(names.input_norm), _replicated(names.mlp_norm)
    rules = {
        "input_layernorm.weight": input_norm,
        "pre_mlp_layernorm.weight": mlp_norm,
        "self_attention.linear_proj.weight": _row(names.attention + "o_proj.weight"),
        "mlp.linear_fc1.layer_norm_weight": mlp_norm,
        "mlp.linear_fc1.weight": _first_layer(shape, names.dense),
        "mlp.linear_fc2.weight": _row(names.dense + "down_proj.weight"),
    }
    if shape.latent:
        rules |= _latent_attention_rules(shape.latent)
        rules |= _INDEXER_RULES if shape.indexer else {}
    else:
        rules |= _grouped_attention_rules(shape)
    if shape.delta_net:
        rules |= _delta_net_rules(shape.delta_net)
    if shape.mamba:
        rules |= _mamba_rules(shape.mamba, input_norm)
    if shape.experts:
        rules |= _expert_rules(shape, shape.experts)
    return rules


_INPUT_NORM = _replicated("input_layernorm.weight")


def _first_layer(
    shape: ModelShape, at: str, gate: str = "gate_proj.weight", up: str = "up_proj.weight"
) -> _Rule:
    """Return the rule for the first linear layer of a feed-forward layer."""
    return _column(at + up) if shape.squared_relu else _gate_and_up(at + gate, at + up)


def _grouped_attention_rules(shape: ModelShape) -> dict[str, _Rule]:
    at = "self_attention."
    rules = {
        at + "linear_qkv.layer_norm_weight": _replicated(
            family_of(shape.architecture).names.input_norm
        ),
        at + "linear_qkv.weight": _qkv("weight", shape),
    }
    if shape.qkv_bias:
        rules[at + "linear_qkv.bias"] = _qkv("bias", shape)
    if shape.linear_biases:
        rules[at + "linear_proj.bias"] = _replicated("self_attn.o_proj.bias")
    if shape.attention_sinks:
        rules[at + "core_attention.softmax_offset"] = _column("self_attn.sinks")
    if shape.qk_norm:
        whole, head = shape.norms_whole_projection, shape.head_dim
        queries, keys = (head * (n if whole else 1) for n in (shape.num_heads, shape.num_kv_heads))
        rules[at + "q_layernorm.weight"] = _norm_of_heads("self_attn.q_norm.weight", queries)
        rules[at + "k_layernorm.weight"] = _norm_of_heads("self_attn.k_norm.weight", keys)
    return rules


def _delta_net_rules(delta_net: DeltaNet) -> dict[str, _Rule]:
    at = "self_attention."
    return {
        at + "in_proj.layer_norm_weight": _INPUT_NORM,
        at + "in_proj.weight": _listed(delta_net.projection_rows),
        at + "conv1d.weight": _listed(delta_net.convolution_rows),
        at + "A_log": _column(BLOCK + "A_log"),
        at + "dt_bias": _column(BLOCK + "dt_bias"),
        at + "out_norm.weight": _replicated(BLOCK + "norm.weight"),
        at + "out_proj.weight": _row(BLOCK + "out_proj.weight"),
    }


def _mamba_rules(mamba: Mamba, norm: _Rule) -> dict[str, _Rule]:
    return {
        "norm.weight": norm,
        "mixer.in_proj.layer_norm_weight": norm,
        "mixer.in_proj.weight": _listed(mamba.projection_rows),
        "mixer.conv1d_weight": _listed(mamba.convolution_rows),
        "mixer.conv1d_bias": _listed(mamba.bias_rows),
        **{f"mixer.{name}": _column(MIXER + name) for name in BY_HEAD},
        "mixer.norm.weight": _column(MIXER + "norm.weight"),
        "mixer.out_proj.weight": _row(MIXER + "out_proj.weight"),
    }


def _latent_attention_rules(latent: LatentAttention) -> dict[str, _Rule]:
    at = "self_attention."
    kv_norm = _replicated("self_attn.kv_a_layernorm.weight")
    kv_down = (
        "self_attn.kv_a_proj_with_mqa.weight",
        latent.kv_lora_rank + latent.qk_rope_head_dim,
    )
    rules = {
        at + "linear_kv_down_proj.weight": _stacked(kv_down),
        at + "linear_kv_up_proj.weight": _column("self_attn.kv_b_proj.weight"),
        at + "linear_kv_up_proj.layer_norm_weight": kv_norm,
        at + "kv_layernorm.weight": kv_norm,
    }
    if latent.q_lora_rank is None:
        return rules | {at + "linear_q_proj.weight": _column("self_attn.q_proj.weight")}
    q_norm = _replicated("self_attn.q_a_layernorm.weight")
    q_down = ("self_attn.q_a_proj.weight", latent.q_lora_rank)
    return rules | {
        # Replicated in Transformer Engine's spec, split in Megatron's own local one.
        at + "linear_q_down_proj.weight": _stacked(q_down),
        at + "linear_q_up_proj.weight": _column("self_attn.q_b_proj.weight"),
        at + "linear_q_up_proj.layer_norm_weight": q_norm,
        at + "q_layernorm.weight": q_norm,
        # --mla-down-proj-fusion
        at + "linear_qkv_down_proj.layer_norm_weight": _INPUT_NORM,
        at + "linear_qkv_down_proj.weight": _stacked(q_down, kv_down),
    }


_INDEXER_RULES = {
    f"self_attention.core_attention.indexer.{ours}": _replicated(f"self_attn.indexer.{theirs}")
    for ours, theirs in {
        "linear_wq_b.weight": "wq_b.weight",
        "linear_wk.weight": "wk.weight",
        "k_norm.weight": "k_norm.weight",
        "k_norm.bias": "k_norm.bias",
        "linear_weights_proj.weight": "weights_proj.weight",
    }.items()
}


def _expert_rules(shape: ModelShape, experts: Experts) -> dict[str, _Rule]:
    names = family_of(shape.architecture).names
    rules = {
        "mlp.router.weight": _replicated(names.router),
        "mlp.experts.N.linear_fc1.weight": _first_layer(shape, "", names.gate, names.up),
        "mlp.experts.N.linear_fc2.weight": _row(names.down),
    }
    if shape.linear_biases:
        gate, up, down = map(bias_of, (names.gate, names.up, names.down))
        rules["mlp.router.bias"] = _replicated(names.scorer_bias)
        rules["mlp.experts.N.linear_fc1.bias"] = _gate_and_up(gate, up)
        rules["mlp.experts.N.linear_fc2.bias"] = _replicated(down)
    if experts.has_bias:
        rules["mlp.router.expert_bias"] = _replicated(names.router_bias)
    if experts.shared_hidden_size:
        at = names.shared_experts
        rules["mlp.shared_experts.linear_fc1.weight"] = _first_layer(shape, at)
        rules["mlp.shared_experts.linear_fc2.weight"] = _row(at + "down_proj.weight")
    if experts.has_shared_gate:
        rules["mlp.shared_experts.gate_weight"] = _replicated(names.shared_gate)
    return rules


# Within `mtp.layers.N.`, in addition to `mtp_model_layer.`, which is a decoder layer.
_MTP_RULES: dict[str, _Rule] = {
    "enorm.weight": _replicated("enorm.weight"),
    "hnorm.weight": _replicated("hnorm.weight"),
    "eh_proj.weight": _column("eh_proj.weight"),
    "final_layernorm.weight": _replicated("shared_head.norm.weight"),
}

# In a HybridModel a layer of two halves, as in its decoder.
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.(?:mtp_model_layer\.(?:layers\.[01]\.)?)?(.+)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# An expert is a separate module, or one weight of Transformer Engine's grouped layer.
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")


def _split_expert(rest: str) -> tuple[str, int | None]:
    """Return the rule's name and the local expert's number, for both of Megatron's namings."""
    if match := _LOCAL_EXPERT.fullmatch(rest):
        return f"mlp.experts.N.{match[2]}", int(match[1])
    if match := _GROUPED_EXPERT.fullmatch(rest):
        return f"mlp.experts.N.{match[1]}", int(match[2])
    return rest, None


def map_parameter(
    name: str, local_shape: Sequence[int], shape: ModelShape, at: ShardCoordinates
) -> tuple[Piece, ...]:
    """Return the pieces of one parameter (or persistent buffer) of one model chunk.

    `name` is Megatron's, without the wrappers' `module.`; `local_shape` is this rank's. Raises
    RuntimeError for a name without a rule, or without a place in a model of this shape.
    """
    rules, rest, prefix = _top_rules(shape), name, ""
    split = at.tp_rank, at.tp_size
    decoder, mtp = _LAYER.fullmatch(name), _MTP_LAYER.fullmatch(name)
    if match := decoder or mtp:
        rules = _layer_rules(shape) | (_MTP_RULES if mtp else {})
        rest, local_expert = _split_expert(match[2])
        index = int(match[1])
        names = family_of(shape.architecture).names
        prefix = f"{names.layers}{shape.num_layers + index if mtp else at.layers[index]}."
        if local_expert is not None and shape.experts is not None:
            expert = at.ep_rank * (shape.experts.num_experts // at.ep_size) + local_expert
            prefix += names.expert.format(expert=expert)
            split = at.etp_rank, at.etp_size
    if rest not in rules:
        raise RuntimeError(
            f"Megatron's parameter '{name}' {list(local_shape)} has no counterpart in a "
            f"{shape.architecture} checkpoint; add a rule to mcore_rl.model.weight_map"
        )
    return tuple(rules[rest](_Parameter(name, tuple(local_shape), prefix, *split)))


def layer_order(tensors: Iterable[str]) -> list[str]:
    """Sort checkpoint tensors in the order of use: embedding, layers, norm, head.

    vLLM keeps the tensors passed to its loaders until a layer is complete, so the tensors of a
    layer must come together. Experts are ordered by number.
    """

    def key(name: str) -> tuple[int, int, int, str]:
        numbers = [int(n) for n in re.findall(r"\d{1,9}", name)]
        if re.match(r"\w+\.layers\.\d", name):
            expert = numbers[1] if ".experts." in name and len(numbers) > 1 else -1
            return (1, numbers[0], expert, name)
        return (0 if "embed" in name else 2, 0, 0, name)

    return sorted(set(tensors), key=key)


def rows_of_flat_range(name: str, shape: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Return the rows that hold elements `start` to `stop` (row-major) of a parameter of `shape`.

    An empty range gives (0, 0). Raises RuntimeError naming the parameter if the range cuts a row.
    """
    if start == stop:
        return (0, 0)
    width = math.prod(shape[1:])
    if start % width or stop % width:
        raise RuntimeError(
            f"{name}: this rank holds elements {start} to {stop} of {list(shape)}, expected whole "
            f"rows of {width} elements, as Megatron-FSDP cuts them"
        )
    return (start // width, stop // width)


def box_of_rows(shape: Sequence[int], first_row: int, num_rows: int) -> Box:
    """Return the box of `num_rows` rows from `first_row` of a parameter of `shape`."""
    if not shape:
        return ()
    return ((first_row, first_row + num_rows), *full_box(shape[1:]))


def pieces_within(pieces: Iterable[Piece], held: Box) -> Iterator[Piece]:
    """Yield the parts of `pieces` in the box `held` of the parameter.

    Local boxes are relative to the corner of `held`; parts outside are dropped.
    """
    for piece in pieces:
        shared = intersect(piece.local_box, held)
        if shared is None:
            continue
        inside = relative(shared, piece.local_box)
        checkpoint_box = tuple(
            (origin + start, origin + stop)
            for (origin, _), (start, stop) in zip(piece.checkpoint_box, inside, strict=True)
        )
        yield Piece(piece.tensor, checkpoint_box, relative(shared, held))
