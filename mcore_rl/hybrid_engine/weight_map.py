"""Which slice of which Hugging Face tensor lies where in a Megatron parameter shard.

A parameter of one rank is described by pieces: a box of a checkpoint tensor equals a box of the
local parameter. Read forwards, the pieces load a checkpoint into Megatron; read backwards, they
export one; intersected with what a vLLM rank needs, they are the hand-over's source.

Names are those of both of Megatron's spec families: local layers, and Transformer Engine with its
norms fused into the following linear layer and its grouped experts.

This module is pure: names, shapes and integers go in, boxes come out. A parameter that no rule
knows is an error that names it.

Shape legend: o output rows of a weight, i input columns, v vocabulary, h hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.hf_config import LatentAttention, ModelShape
from mcore_rl.hybrid_engine.boxes import Box, full_box


@dataclass(frozen=True, slots=True)
class Piece:
    """`checkpoint_tensor[checkpoint_box]` is `parameter[local_box]`; both boxes have one shape."""

    tensor: str
    checkpoint_box: Box
    local_box: Box


@dataclass(frozen=True, slots=True)
class ShardCoordinates:
    """Where a model chunk sits: its share of every split dimension, and its layers."""

    tp_rank: int
    tp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    layers: tuple[int, ...]  # global number of each local decoder layer, counted from 0


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One local parameter on its way through a rule."""

    name: str
    shape: tuple[int, ...]
    layer: str  # "model.layers.7." or "" outside the decoder layers
    rank: int  # in the group this parameter is split over: TP, or ETP for routed experts
    size: int
    expert: int | None  # global number


_Rule = Callable[[_Parameter, ModelShape], list[Piece]]


def _rows(tensor: str, shape: Sequence[int], start: int, local_start: int, count: int) -> Piece:
    """`count` rows from `start` of the checkpoint are those from `local_start` of the parameter."""
    rest = full_box(shape[1:])
    return Piece(
        tensor,
        ((start, start + count), *rest),
        ((local_start, local_start + count), *rest),
    )


def _replicated(name: str) -> _Rule:
    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        box = full_box(p.shape)
        return [Piece(p.layer + name, box, box)]

    return rule


def _column(name: str) -> _Rule:
    """Rows are split: rank r holds rows r*o .. (r+1)*o of the checkpoint."""

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        return [_rows(p.layer + name, p.shape, p.rank * p.shape[0], 0, p.shape[0])]

    return rule


def _row(name: str) -> _Rule:
    """Columns are split: rank r holds columns r*i .. (r+1)*i of the checkpoint."""

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        out, width = p.shape
        first = p.rank * width
        return [Piece(p.layer + name, ((0, out), (first, first + width)), full_box(p.shape))]

    return rule


def _column_or_replicated(name: str, full_rows: Callable[[ModelShape], int]) -> _Rule:
    """MLA's down-projections: replicated in Transformer Engine's spec, split in the local one."""

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        kind = _replicated if p.shape[0] == full_rows(shape) else _column
        return kind(name)(p, shape)

    return rule


def _gated(gate: str, up: str) -> _Rule:
    """SwiGLU's first layer: this rank's rows of the gate, then its rows of the up-projection."""

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        half = p.shape[0] // 2
        first = p.rank * half
        experts = f"mlp.experts.{p.expert}." if p.expert is not None else ""
        return [
            _rows(p.layer + experts + gate, p.shape, first, 0, half),
            _rows(p.layer + experts + up, p.shape, first, half, half),
        ]

    return rule


def _expert_row(name: str) -> _Rule:
    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        return _row(f"mlp.experts.{p.expert}.{name}")(p, shape)

    return rule


def _qkv(kind: str) -> _Rule:
    """Megatron interleaves by key/value group: [its query heads, its key, its value] per group."""

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


def _vocabulary(name: str) -> _Rule:
    """Rows of the padded vocabulary are split; padding rows have no counterpart."""

    def rule(p: _Parameter, shape: ModelShape) -> list[Piece]:
        rows = p.shape[0]
        first = p.rank * rows
        real = min(rows, shape.vocab_size - first)
        return [_rows(name, p.shape, first, 0, real)] if real > 0 else []

    return rule


def _output_layer(p: _Parameter, shape: ModelShape) -> list[Piece]:
    # With tied embeddings the last pipeline stage holds a second copy of the embedding.
    name = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
    return _vocabulary(name)(p, shape)


def _latent(shape: ModelShape) -> LatentAttention:
    assert shape.latent is not None, f"{shape.architecture} has no latent attention"
    return shape.latent


def _q_norm(p: _Parameter, shape: ModelShape) -> list[Piece]:
    name = "self_attn.q_a_layernorm.weight" if shape.latent else "self_attn.q_norm.weight"
    return _replicated(name)(p, shape)


_GATED = _gated("gate_proj.weight", "up_proj.weight")

# Outside the decoder layers.
_TOP_RULES: Mapping[str, _Rule] = {
    "embedding.word_embeddings.weight": _vocabulary("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": _replicated("model.norm.weight"),
    "output_layer.weight": _output_layer,
}

# Within `decoder.layers.N.`; the norms stand under two names each, local and fused.
_LAYER_RULES: Mapping[str, _Rule] = {
    "input_layernorm.weight": _replicated("input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": _replicated("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": _replicated("post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": _replicated("post_attention_layernorm.weight"),
    "self_attention.linear_proj.weight": _row("self_attn.o_proj.weight"),
    # grouped-query attention
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": _q_norm,
    "self_attention.k_layernorm.weight": _replicated("self_attn.k_norm.weight"),
    # multi-head latent attention
    "self_attention.linear_q_proj.weight": _column("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": _column_or_replicated(
        "self_attn.q_a_proj.weight", lambda shape: _latent(shape).q_lora_rank or 0
    ),
    "self_attention.linear_q_up_proj.weight": _column("self_attn.q_b_proj.weight"),
    "self_attention.linear_q_up_proj.layer_norm_weight": _q_norm,
    "self_attention.linear_kv_down_proj.weight": _column_or_replicated(
        "self_attn.kv_a_proj_with_mqa.weight",
        lambda shape: _latent(shape).kv_lora_rank + _latent(shape).qk_rope_head_dim,
    ),
    "self_attention.linear_kv_up_proj.weight": _column("self_attn.kv_b_proj.weight"),
    "self_attention.linear_kv_up_proj.layer_norm_weight": _replicated(
        "self_attn.kv_a_layernorm.weight"
    ),
    "self_attention.kv_layernorm.weight": _replicated("self_attn.kv_a_layernorm.weight"),
    # dense layers
    "mlp.linear_fc1.weight": _gated("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": _row("mlp.down_proj.weight"),
    # mixture of experts
    "mlp.router.weight": _replicated("mlp.gate.weight"),
    "mlp.router.expert_bias": _replicated("mlp.gate.e_score_correction_bias"),
    "mlp.experts.linear_fc1.weight": _GATED,
    "mlp.experts.linear_fc2.weight": _expert_row("down_proj.weight"),
    "mlp.shared_experts.linear_fc1.weight": _gated(
        "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"
    ),
    "mlp.shared_experts.linear_fc2.weight": _row("mlp.shared_experts.down_proj.weight"),
}

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)")


def _split_expert(rest: str) -> tuple[str, int | None]:
    """The rule's name and the local expert's number, of either way Megatron names experts."""
    if match := _LOCAL_EXPERT.fullmatch(rest):
        return f"mlp.experts.{match[2]}", int(match[1])
    if match := _GROUPED_EXPERT.fullmatch(rest):
        return f"mlp.experts.{match[1]}", int(match[2])
    return rest, None


def map_parameter(
    name: str, local_shape: Sequence[int], shape: ModelShape, at: ShardCoordinates
) -> tuple[Piece, ...]:
    """The pieces of one parameter (or persistent buffer) of one model chunk.

    `name` is Megatron's, without the wrappers' `module.`; `local_shape` is this rank's. Raises
    RuntimeError for a name that no rule knows, and where the pieces do not fill the parameter.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        rule, layer, expert = _TOP_RULES.get(name), "", None
    else:
        rest, local_expert = _split_expert(match[2])
        rule, layer = _LAYER_RULES.get(rest), f"model.layers.{at.layers[int(match[1])]}."
        expert = None
        if local_expert is not None:
            assert shape.experts is not None, name
            expert = at.ep_rank * (shape.experts.num_experts // at.ep_size) + local_expert
    if rule is None:
        raise RuntimeError(
            f"Megatron's parameter '{name}' {list(local_shape)} has no counterpart in a "
            f"{shape.architecture} checkpoint; add a rule to mcore_rl.hybrid_engine.weight_map"
        )
    split = (at.etp_rank, at.etp_size) if expert is not None else (at.tp_rank, at.tp_size)
    parameter = _Parameter(name, tuple(local_shape), layer, *split, expert)
    return tuple(rule(parameter, shape))


def layer_order(tensors: Iterable[str]) -> list[str]:
    """Checkpoint tensors in the order in which a model uses them: embedding, layers, norm, head.

    vLLM keeps what its loaders were given until a layer is complete, so that a layer's tensors must
    come together. Experts are ordered by number.
    """

    def key(name: str) -> tuple[int, int, int, str]:
        numbers = [int(n) for n in re.findall(r"\d+", name)]
        if name.startswith("model.layers."):
            expert = numbers[1] if ".experts." in name and len(numbers) > 1 else -1
            return (1, numbers[0], expert, name)
        return (0 if "embed" in name else 2, 0, 0, name)

    return sorted(set(tensors), key=key)
