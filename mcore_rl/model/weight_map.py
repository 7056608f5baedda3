"""Map from slices of Hugging Face tensors to places in a Megatron parameter shard.

Pieces describe a parameter of one rank: a box of a checkpoint tensor equals a box of the local
parameter. Pieces are used forwards to load a checkpoint into Megatron and backwards to export one.
Their intersections with the needs of a vLLM rank are the source of the hand-over.

The rules know the Megatron names of both spec families: local layers, and Transformer Engine with
grouped experts and with norms fused into the following linear layer. Checkpoint names are common to
all model families, except for the experts' names, which `families` defines.

With Megatron-FSDP, which shards parameters over data parallelism, a rank holds only some rows. The
parameters of a layer lie in one flat bucket. Each data-parallel rank has an equal part of it, which
begins and ends at a row boundary. The pieces are cut to the rank's rows: the hand-over sends each
row from its owner and gathers nothing.

This module is pure: names, shapes and integers go in, boxes come out. A parameter without a rule
raises an error that names it.

Shape legend: o output rows of a weight, i input columns, v vocabulary, h hidden.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.model.boxes import Box, full_box, intersect, relative
from mcore_rl.model.config_json import LatentAttention, ModelShape
from mcore_rl.model.families import TensorNames, bias_of, family_of
from mcore_rl.model.layout import TrainLayout


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
    layers: tuple[int, ...]  # global number (from 0) of each local decoder layer

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
    layer: str  # "model.layers.7." or "" outside the decoder layers
    rank: int  # in the group that splits this parameter: TP, or ETP for routed experts
    size: int
    expert: int | None  # global number


_Rule = Callable[[_Parameter, ModelShape], list[Piece]]


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

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        box = full_box(p.shape)
        return [Piece(p.layer + name, box, box)]

    return rule


def _column(name: str) -> _Rule:
    """Return a rule for split rows: rank r holds rows r*o .. (r+1)*o of the checkpoint."""

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        return [_rows(p.layer + name, p.shape, p.rank * p.shape[0], 0, p.shape[0])]

    return rule


def _row(name: str) -> _Rule:
    """Return a rule for split columns: rank r holds columns r*i .. (r+1)*i of the checkpoint."""

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        out, width = p.shape
        first = p.rank * width
        return [Piece(p.layer + name, ((0, out), (first, first + width)), full_box(p.shape))]

    return rule


def _stacked(*parts: tuple[str, Callable[[ModelShape], int]]) -> _Rule:
    """Return a rule for stacked tensors `(name, rows)`: all rows, or this rank's rows, of each."""

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        sizes = [rows(shape) for _, rows in parts]
        is_whole = p.shape[0] == sum(sizes)
        pieces, local = [], 0
        for (name, _), size in zip(parts, sizes, strict=True):
            count = size if is_whole else size // p.size
            first = 0 if is_whole else p.rank * count
            pieces.append(_rows(p.layer + name, p.shape, first, local, count))
            local += count
        assert local == p.shape[0], (p.name, p.shape)
        return pieces

    return rule


def _gate_and_up(gate: str, up: str) -> _Rule:
    """Return a rule for SwiGLU's first layer: this rank's gate rows, then its up rows."""

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        half = p.shape[0] // 2
        first = p.rank * half
        return [
            _rows(p.layer + gate, p.shape, first, 0, half),
            _rows(p.layer + up, p.shape, first, half, half),
        ]

    return rule


def _gated(prefix: str) -> _Rule:
    """Return `_gate_and_up` for a feed-forward network that is not a routed expert."""
    return _gate_and_up(f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")


def _names(shape: ModelShape) -> TensorNames:
    return family_of(shape.architecture).names


def _expert(rule: Callable[..., _Rule], *names: Callable[[TensorNames], str]) -> _Rule:
    """Return `rule` for the tensors of a routed expert, whose names depend on the family."""

    def of_expert(p: _Parameter, shape: ModelShape) -> list[Piece]:
        of_family = _names(shape)
        prefix = of_family.expert.format(expert=p.expert)
        return rule(*(prefix + name(of_family) for name in names))(p, shape)

    return of_expert


def _of_family(rule: Callable[[str], _Rule], name: Callable[[TensorNames], str]) -> _Rule:
    """Return `rule` for a tensor whose name depends on the family."""
    return lambda p, shape: rule(name(_names(shape)))(p, shape)


def _qkv(kind: str) -> _Rule:
    """Return a rule for Megatron's interleaving: [query heads, key, value] per key/value group."""

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        head = shape.head_dim
        queries = shape.num_heads // shape.num_kv_heads * head
        groups = shape.num_kv_heads // p.size
        assert p.shape[0] == groups * (queries + 2 * head), (p.name, p.shape)
        pieces, local = [], 0
        for group in range(p.rank * groups, (p.rank + 1) * groups):
            for name, start, count in (
                ("q", group * queries, queries),
                ("k", group * head, head),
                ("v", group * head, head),
            ):
                tensor = f"{p.layer}self_attn.{name}_proj.{kind}"
                pieces.append(_rows(tensor, p.shape, start, local, count))
                local += count
        return pieces

    return rule


def _norm_of_heads(name: str, heads: str) -> _Rule:
    """Return a rule for query and key norms, which are replicated.

    It raises for another width: a fork's spec may norm each head instead of all heads together."""

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        width = shape.head_dim * (getattr(shape, heads) if shape.norms_whole_projection else 1)
        if p.shape != (width,):
            raise RuntimeError(
                f"{p.name} has shape {list(p.shape)} and {name} in the checkpoint [{width}]: the "
                "model was built with other norms of queries and keys"
            )
        return _replicated(name)(p, shape)

    return rule


def _vocabulary(name: str) -> _Rule:
    """Return a rule for split rows of the padded vocabulary; padding rows have no counterpart."""

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        rows = p.shape[0]
        first = p.rank * rows
        real = min(rows, shape.vocab_size - first)
        return [_rows(name, p.shape, first, 0, real)] if real > 0 else []

    return rule


def _output_layer(p: _Parameter, shape: ModelShape) -> list[Piece]:
    if shape.value_head:
        return _replicated("score.weight")(p, shape)
    # With tied embeddings the last pipeline stage holds a second copy of the embedding.
    name = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
    return _vocabulary(name)(p, shape)


def _latent(shape: ModelShape) -> LatentAttention:
    assert shape.latent is not None, f"{shape.architecture} has no latent attention"
    return shape.latent


def _q_rank(shape: ModelShape) -> int:
    return _latent(shape).q_lora_rank or 0


def _kv_rank_and_rope(shape: ModelShape) -> int:
    return _latent(shape).kv_lora_rank + _latent(shape).qk_rope_head_dim


_INPUT_NORM = _replicated("input_layernorm.weight")
_MLP_NORM = _replicated("post_attention_layernorm.weight")
_KV_LATENT_NORM = _replicated("self_attn.kv_a_layernorm.weight")

# Outside the decoder layers.
_TOP_RULES: Mapping[str, _Rule] = {
    "embedding.word_embeddings.weight": _vocabulary("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": _replicated("model.norm.weight"),
    "output_layer.weight": _output_layer,
}

# Within `decoder.layers.N.`; each norm has two names, local and fused.
_COMMON_RULES: Mapping[str, _Rule] = {
    "input_layernorm.weight": _INPUT_NORM,
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "self_attention.linear_proj.weight": _row("self_attn.o_proj.weight"),
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,
    "mlp.linear_fc1.weight": _gated("mlp."),
    "mlp.linear_fc2.weight": _row("mlp.down_proj.weight"),
}

_GROUPED_ATTENTION_RULES: Mapping[str, _Rule] = {
    "self_attention.linear_qkv.layer_norm_weight": _INPUT_NORM,
    "self_attention.linear_qkv.weight": _qkv("weight"),
}
_QKV_BIAS_RULES: Mapping[str, _Rule] = {"self_attention.linear_qkv.bias": _qkv("bias")}
_OUTPUT_BIAS_RULES: Mapping[str, _Rule] = {
    "self_attention.linear_proj.bias": _replicated("self_attn.o_proj.bias"),
}
_SINK_RULES: Mapping[str, _Rule] = {
    "self_attention.core_attention.softmax_offset": _column("self_attn.sinks"),
}
_HEAD_NORM_RULES: Mapping[str, _Rule] = {
    "self_attention.q_layernorm.weight": _norm_of_heads("self_attn.q_norm.weight", "num_heads"),
    "self_attention.k_layernorm.weight": _norm_of_heads("self_attn.k_norm.weight", "num_kv_heads"),
}

_LATENT_ATTENTION_RULES: Mapping[str, _Rule] = {
    "self_attention.linear_kv_down_proj.weight": _stacked(
        ("self_attn.kv_a_proj_with_mqa.weight", _kv_rank_and_rope)
    ),
    "self_attention.linear_kv_up_proj.weight": _column("self_attn.kv_b_proj.weight"),
    "self_attention.linear_kv_up_proj.layer_norm_weight": _KV_LATENT_NORM,
    "self_attention.kv_layernorm.weight": _KV_LATENT_NORM,
}
_DIRECT_QUERY_RULES: Mapping[str, _Rule] = {
    "self_attention.linear_q_proj.weight": _column("self_attn.q_proj.weight"),
}
_LATENT_QUERY_RULES: Mapping[str, _Rule] = {
    # Replicated in Transformer Engine's spec, split in Megatron's own local one.
    "self_attention.linear_q_down_proj.weight": _stacked(("self_attn.q_a_proj.weight", _q_rank)),
    "self_attention.linear_q_up_proj.weight": _column("self_attn.q_b_proj.weight"),
    "self_attention.linear_q_up_proj.layer_norm_weight": _replicated(
        "self_attn.q_a_layernorm.weight"
    ),
    "self_attention.q_layernorm.weight": _replicated("self_attn.q_a_layernorm.weight"),
    # --mla-down-proj-fusion
    "self_attention.linear_qkv_down_proj.layer_norm_weight": _INPUT_NORM,
    "self_attention.linear_qkv_down_proj.weight": _stacked(
        ("self_attn.q_a_proj.weight", _q_rank),
        ("self_attn.kv_a_proj_with_mqa.weight", _kv_rank_and_rope),
    ),
}

_EXPERT_RULES: Mapping[str, _Rule] = {
    "mlp.router.weight": _of_family(_replicated, lambda names: names.router),
    "mlp.experts.N.linear_fc1.weight": _expert(_gate_and_up, lambda n: n.gate, lambda n: n.up),
    "mlp.experts.N.linear_fc2.weight": _expert(_row, lambda n: n.down),
}
_EXPERT_BIAS_RULES: Mapping[str, _Rule] = {
    "mlp.router.bias": _of_family(_replicated, lambda names: names.scorer_bias),
    "mlp.experts.N.linear_fc1.bias": _expert(
        _gate_and_up, lambda n: bias_of(n.gate), lambda n: bias_of(n.up)
    ),
    "mlp.experts.N.linear_fc2.bias": _expert(_replicated, lambda n: bias_of(n.down)),
}
_ROUTER_BIAS_RULES: Mapping[str, _Rule] = {
    "mlp.router.expert_bias": _of_family(_replicated, lambda names: names.router_bias),
}
_SHARED_EXPERT_RULES: Mapping[str, _Rule] = {
    "mlp.shared_experts.linear_fc1.weight": _of_family(_gated, lambda names: names.shared_experts),
    "mlp.shared_experts.linear_fc2.weight": _of_family(
        _row, lambda names: f"{names.shared_experts}down_proj.weight"
    ),
}
_SHARED_GATE_RULES: Mapping[str, _Rule] = {
    "mlp.shared_experts.gate_weight": _of_family(_replicated, lambda names: names.shared_gate),
}


def _layer_rules(shape: ModelShape) -> Iterator[Mapping[str, _Rule]]:
    """Yield exactly the rule tables that apply to a layer of this shape."""
    yield _COMMON_RULES
    if shape.latent:
        yield _LATENT_ATTENTION_RULES
        yield _DIRECT_QUERY_RULES if shape.latent.q_lora_rank is None else _LATENT_QUERY_RULES
    else:
        yield _GROUPED_ATTENTION_RULES
        if shape.qkv_bias:
            yield _QKV_BIAS_RULES
        if shape.linear_biases:
            yield _OUTPUT_BIAS_RULES
        if shape.attention_sinks:
            yield _SINK_RULES
        if shape.qk_norm:
            yield _HEAD_NORM_RULES
    if shape.experts:
        yield _EXPERT_RULES
        if shape.linear_biases:
            yield _EXPERT_BIAS_RULES
        if shape.experts.has_bias:
            yield _ROUTER_BIAS_RULES
        if shape.experts.shared_hidden_size:
            yield _SHARED_EXPERT_RULES
        if shape.experts.has_shared_gate:
            yield _SHARED_GATE_RULES


# Within `mtp.layers.N.`, in addition to `mtp_model_layer.`, which is a decoder layer.
_MTP_RULES: Mapping[str, _Rule] = {
    "enorm.weight": _replicated("enorm.weight"),
    "hnorm.weight": _replicated("hnorm.weight"),
    "eh_proj.weight": _column("eh_proj.weight"),
    "final_layernorm.weight": _replicated("shared_head.norm.weight"),
}

_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.(?:mtp_model_layer\.)?(.+)")
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
    rule, layer, expert = _TOP_RULES.get(name), "", None
    decoder, mtp = _LAYER.fullmatch(name), _MTP_LAYER.fullmatch(name)
    if match := decoder or mtp:
        rest, local_expert = _split_expert(match[2])
        tables = [*_layer_rules(shape), *([_MTP_RULES] if mtp else [])]
        rule = next((rules[rest] for rules in tables if rest in rules), None)
        index = int(match[1])
        layer = f"model.layers.{shape.num_layers + index if mtp else at.layers[index]}."
        if local_expert is not None and shape.experts is not None:
            expert = at.ep_rank * (shape.experts.num_experts // at.ep_size) + local_expert
    if rule is None:
        raise RuntimeError(
            f"Megatron's parameter '{name}' {list(local_shape)} has no counterpart in a "
            f"{shape.architecture} checkpoint; add a rule to mcore_rl.model.weight_map"
        )
    split = (at.etp_rank, at.etp_size) if expert is not None else (at.tp_rank, at.tp_size)
    parameter = _Parameter(name, tuple(local_shape), layer, *split, expert)
    return tuple(rule(parameter, shape))


def layer_order(tensors: Iterable[str]) -> list[str]:
    """Sort checkpoint tensors in the order of use: embedding, layers, norm, head.

    vLLM keeps the tensors passed to its loaders until a layer is complete, so the tensors of a
    layer must come together. Experts are ordered by number.
    """

    def key(name: str) -> tuple[int, int, int, str]:
        numbers = [int(n) for n in re.findall(r"\d{1,9}", name)]
        if name.startswith("model.layers."):
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
