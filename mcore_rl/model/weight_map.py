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
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mcore_rl.model.boxes import Box, full_box, intersect, relative
from mcore_rl.model.config_json import LatentAttention, ModelShape
from mcore_rl.model.delta_net import BLOCK, DeltaNet
from mcore_rl.model.experts import Experts
from mcore_rl.model.families import family_of
from mcore_rl.model.family import bias_of
from mcore_rl.model.layout import TrainLayout
from mcore_rl.model.mamba import BLOCK as MIXER
from mcore_rl.model.mamba import BY_HEAD, Mamba
from mcore_rl.model.tensors import VALUE_HEAD
from mcore_rl.model.weight_rules import (
    Parameter,
    Piece,
    Rule,
    column,
    gate_and_up,
    listed,
    norm_of_heads,
    qkv,
    replicated,
    row,
    stacked,
    vocabulary,
)


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


def _top_rules(shape: ModelShape) -> dict[str, Rule]:
    """Return the rules outside the decoder layers."""
    names = family_of(shape.architecture).names
    embedding = vocabulary(names.embedding, shape.vocab_size)
    if shape.value_head:
        head = replicated(VALUE_HEAD)
    elif shape.tied_embeddings:  # the last pipeline stage holds a second copy of the embedding
        head = embedding
    else:
        head = vocabulary("lm_head.weight", shape.vocab_size)
    return {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": replicated(names.final_norm),
        "decoder.final_norm.weight": replicated(names.final_norm),  # in a HybridModel
        "output_layer.weight": head,
    }


def _layer_rules(shape: ModelShape) -> dict[str, Rule]:
    """Return the rules within `decoder.layers.N.`, exactly those that this model needs.

    Each norm has two names, local and fused. "N" stands for an expert's number.
    """
    names = family_of(shape.architecture).names
    input_norm, mlp_norm = replicated(names.input_norm), replicated(names.mlp_norm)
    rules = {
        "input_layernorm.weight": input_norm,
        "pre_mlp_layernorm.weight": mlp_norm,
        "self_attention.linear_proj.weight": row(names.attention + "o_proj.weight"),
        "mlp.linear_fc1.layer_norm_weight": mlp_norm,
        "mlp.linear_fc1.weight": _first_layer(shape, names.dense),
        "mlp.linear_fc2.weight": row(names.dense + "down_proj.weight"),
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


_INPUT_NORM = replicated("input_layernorm.weight")


def _first_layer(
    shape: ModelShape, at: str, gate: str = "gate_proj.weight", up: str = "up_proj.weight"
) -> Rule:
    """Return the rule for the first linear layer of a feed-forward layer."""
    return column(at + up) if shape.squared_relu else gate_and_up(at + gate, at + up)


def _grouped_attention_rules(shape: ModelShape) -> dict[str, Rule]:
    at = "self_attention."
    rules = {
        at + "linear_qkv.layer_norm_weight": replicated(
            family_of(shape.architecture).names.input_norm
        ),
        at + "linear_qkv.weight": qkv("weight", shape),
    }
    if shape.qkv_bias:
        rules[at + "linear_qkv.bias"] = qkv("bias", shape)
    if shape.linear_biases:
        rules[at + "linear_proj.bias"] = replicated("self_attn.o_proj.bias")
    if shape.attention_sinks:
        rules[at + "core_attention.softmax_offset"] = column("self_attn.sinks")
    if shape.qk_norm:
        whole, head = shape.norms_whole_projection, shape.head_dim
        queries, keys = (head * (n if whole else 1) for n in (shape.num_heads, shape.num_kv_heads))
        rules[at + "q_layernorm.weight"] = norm_of_heads("self_attn.q_norm.weight", queries)
        rules[at + "k_layernorm.weight"] = norm_of_heads("self_attn.k_norm.weight", keys)
    return rules


def _delta_net_rules(delta_net: DeltaNet) -> dict[str, Rule]:
    at = "self_attention."
    return {
        at + "in_proj.layer_norm_weight": _INPUT_NORM,
        at + "in_proj.weight": listed(delta_net.projection_rows),
        at + "conv1d.weight": listed(delta_net.convolution_rows),
        at + "A_log": column(BLOCK + "A_log"),
        at + "dt_bias": column(BLOCK + "dt_bias"),
        at + "out_norm.weight": replicated(BLOCK + "norm.weight"),
        at + "out_proj.weight": row(BLOCK + "out_proj.weight"),
    }


def _mamba_rules(mamba: Mamba, norm: Rule) -> dict[str, Rule]:
    return {
        "norm.weight": norm,
        "mixer.in_proj.layer_norm_weight": norm,
        "mixer.in_proj.weight": listed(mamba.projection_rows),
        "mixer.conv1d_weight": listed(mamba.convolution_rows),
        "mixer.conv1d_bias": listed(mamba.bias_rows),
        **{f"mixer.{name}": column(MIXER + name) for name in BY_HEAD},
        "mixer.norm.weight": column(MIXER + "norm.weight"),
        "mixer.out_proj.weight": row(MIXER + "out_proj.weight"),
    }


def _latent_attention_rules(latent: LatentAttention) -> dict[str, Rule]:
    at = "self_attention."
    kv_norm = replicated("self_attn.kv_a_layernorm.weight")
    kv_down = (
        "self_attn.kv_a_proj_with_mqa.weight",
        latent.kv_lora_rank + latent.qk_rope_head_dim,
    )
    rules = {
        at + "linear_kv_down_proj.weight": stacked(kv_down),
        at + "linear_kv_up_proj.weight": column("self_attn.kv_b_proj.weight"),
        at + "linear_kv_up_proj.layer_norm_weight": kv_norm,
        at + "kv_layernorm.weight": kv_norm,
    }
    if latent.q_lora_rank is None:
        return rules | {at + "linear_q_proj.weight": column("self_attn.q_proj.weight")}
    q_norm = replicated("self_attn.q_a_layernorm.weight")
    q_down = ("self_attn.q_a_proj.weight", latent.q_lora_rank)
    return rules | {
        # Replicated in Transformer Engine's spec, split in Megatron's own local one.
        at + "linear_q_down_proj.weight": stacked(q_down),
        at + "linear_q_up_proj.weight": column("self_attn.q_b_proj.weight"),
        at + "linear_q_up_proj.layer_norm_weight": q_norm,
        at + "q_layernorm.weight": q_norm,
        # --mla-down-proj-fusion
        at + "linear_qkv_down_proj.layer_norm_weight": _INPUT_NORM,
        at + "linear_qkv_down_proj.weight": stacked(q_down, kv_down),
    }


_INDEXER_RULES = {
    f"self_attention.core_attention.indexer.{ours}": replicated(f"self_attn.indexer.{theirs}")
    for ours, theirs in {
        "linear_wq_b.weight": "wq_b.weight",
        "linear_wk.weight": "wk.weight",
        "k_norm.weight": "k_norm.weight",
        "k_norm.bias": "k_norm.bias",
        "linear_weights_proj.weight": "weights_proj.weight",
    }.items()
}


def _expert_rules(shape: ModelShape, experts: Experts) -> dict[str, Rule]:
    names = family_of(shape.architecture).names
    rules = {
        "mlp.router.weight": replicated(names.router),
        "mlp.experts.N.linear_fc1.weight": _first_layer(shape, "", names.gate, names.up),
        "mlp.experts.N.linear_fc2.weight": row(names.down),
    }
    if shape.linear_biases:
        gate, up, down = map(bias_of, (names.gate, names.up, names.down))
        rules["mlp.router.bias"] = replicated(names.scorer_bias)
        rules["mlp.experts.N.linear_fc1.bias"] = gate_and_up(gate, up)
        rules["mlp.experts.N.linear_fc2.bias"] = replicated(down)
    if experts.has_bias:
        rules["mlp.router.expert_bias"] = replicated(names.router_bias)
    if experts.shared_hidden_size:
        at = names.shared_experts
        rules["mlp.shared_experts.linear_fc1.weight"] = _first_layer(shape, at)
        rules["mlp.shared_experts.linear_fc2.weight"] = row(at + "down_proj.weight")
    if experts.has_shared_gate:
        rules["mlp.shared_experts.gate_weight"] = replicated(names.shared_gate)
    return rules


# Within `mtp.layers.N.`, in addition to `mtp_model_layer.`, which is a decoder layer.
_MTP_RULES: dict[str, Rule] = {
    "enorm.weight": replicated("enorm.weight"),
    "hnorm.weight": replicated("hnorm.weight"),
    "eh_proj.weight": column("eh_proj.weight"),
    "final_layernorm.weight": replicated("shared_head.norm.weight"),
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
    return tuple(rules[rest](Parameter(name, tuple(local_shape), prefix, *split)))


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
