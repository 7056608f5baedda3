"""Conversion of a Hugging Face config.json into a model shape.

`ModelShape` describes an architecture to the rest of the package, and `architecture_flags`
expresses it as Megatron flags. So an architecture is specified once, by its config.json.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError, unreadable
from mcore_rl.common.parameters import Bounds
from mcore_rl.common.readers import InvalidData, parse_json
from mcore_rl.model.config_fields import Fields
from mcore_rl.model.delta_net import DeltaNet, linear_layers, read_delta_net
from mcore_rl.model.experts import Experts, moe_layers, read_experts
from mcore_rl.model.families import FAMILIES, TEXT_CONFIG, text_values
from mcore_rl.model.family import Family
from mcore_rl.model.mamba import ATTENTION, DENSE, EXPERTS, MAMBA, Mamba, read_blocks, read_mamba
from mcore_rl.model.quantization import (
    GIVE_BLOCKS_OR_GROUPS,
    GIVE_MXFP4,
    quantization_method,
    unsupported_quantization,
)
from mcore_rl.model.rope import read_rope
from mcore_rl.model.sparse_attention import ROPE_INTERLEAVED, Indexer, read_indexer
from mcore_rl.model.unsupported import why_unsupported
from mcore_rl.model.vllm_fields import unmapped_field

_MOST_EXPERTS = 500_000  # in all layers; each has its own name; Kimi-K2 has 23,424


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int | None  # None: queries are projected directly, as in DeepSeek-V2-Lite
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, order=True)
class LayerKind:
    """What decides which tensors a decoder layer has."""

    is_moe: bool  # experts instead of an MLP
    is_linear: bool = False  # a gated delta net instead of attention
    has_indexer: bool = False  # of sparse attention
    block: str = ""  # the only block of the layer, by its symbol; "": attention and feed-forward

    @property
    def has_mamba(self) -> bool:
        return self.block == MAMBA

    @property
    def has_attention(self) -> bool:
        return not self.is_linear and self.block in ("", ATTENTION)

    @property
    def has_mixer(self) -> bool:
        """Whether it has a block that mixes positions."""
        return self.block in ("", MAMBA, ATTENTION)

    @property
    def has_dense(self) -> bool:
        """Whether it has a feed-forward layer without experts."""
        return not self.is_moe and self.block in ("", DENSE)

    @property
    def name(self) -> str:
        """The kind as part of a name, such as "moe", "linear_dense" or "indexer_moe"."""
        if self.block:
            return _BLOCK_NAMES[self.block]
        attention = "linear_" if self.is_linear else "indexer_" if self.has_indexer else ""
        return attention + ("moe" if self.is_moe else "dense")


_BLOCK_NAMES = {MAMBA: "mamba", ATTENTION: "attention", DENSE: "dense", EXPERTS: "moe"}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and features that determine a checkpoint's tensors, independent of their layout."""

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent: LatentAttention | None
    experts: Experts | None
    is_moe_layer: tuple[bool, ...]
    qk_norm: bool
    qkv_bias: bool
    tied_embeddings: bool
    norm_epsilon: float
    # Normalised: rope_type, rope_theta and the fields the type needs.
    rope: Mapping[str, Any] = field(hash=False)
    max_positions: int
    # In addition to num_layers. They are neither trained nor sampled from, and are not compared:
    # transformers drops them, and reports one where config.json has no such field.
    num_mtp_layers: int = field(compare=False)
    # Quantisation method of the checkpoint's weights; all sizes describe dequantised weights.
    quantization: str | None = field(default=None, compare=False)
    # The norms of queries and keys run over all heads together, not over each head.
    norms_whole_projection: bool = False
    linear_biases: bool = False  # in every linear layer, including experts and router
    attention_sinks: bool = False
    # Positions that a token sees, its own included, in every other layer from the first.
    sliding_window: int | None = None
    clamps_glu: bool = False  # gpt-oss's SwiGLU
    delta_net: DeltaNet | None = None
    is_linear_layer: tuple[bool, ...] = ()  # whether each has a delta net; empty: none
    output_gate: bool = False  # of attention
    zero_centered_norms: bool = False
    indexer: Indexer | None = None  # of sparse attention
    mamba: Mamba | None = None
    # The symbol of each layer's only block; "": each layer has attention and feed-forward.
    blocks: str = ""
    squared_relu: bool = False  # instead of SwiGLU: feed-forward layers without a gate
    # `score.weight` `[1, h]` instead of `lm_head.weight`: a critic, or a reward model.
    value_head: bool = False
    # The text model of a folder that has others, too: its tensors have a prefix.
    is_multimodal: bool = field(default=False, compare=False)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every decoder layer."""
        return _layer_kinds(self)

    @property
    def needs_gpu(self) -> str | None:
        """What of the model vLLM computes on GPUs only, or None."""
        if self.indexer:
            return "sparse attention"
        return "experts without a gate" if self.experts and self.squared_relu else None

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Global numbers (from 0) of the layers with experts."""
        return tuple(layer for layer, is_moe in enumerate(self.is_moe_layer) if is_moe)


@functools.lru_cache(maxsize=16)  # a search of layouts asks thousands of times
def _layer_kinds(shape: ModelShape) -> tuple[LayerKind, ...]:
    none = (False,) * shape.num_layers
    has_indexer = shape.indexer.in_layer if shape.indexer else none
    blocks = shape.blocks or ("",) * shape.num_layers
    features = zip(
        shape.is_moe_layer, shape.is_linear_layer or none, has_indexer, blocks, strict=True
    )
    return tuple(LayerKind(*each) for each in features)


def read_config_json(folder: Path, *, flag: str = "--rl-hf-checkpoint") -> dict[str, Any]:
    """Parse the config.json of a checkpoint folder; raise UsageError if it cannot be read."""
    path = folder / "config.json"
    if not os.path.isfile(path):  # False as well if permissions forbid the look-up
        raise UsageError(
            "has no config.json that can be read"
            if os.path.isdir(folder)
            else "is not a directory",
            flag=f"{flag} {folder}",
            remedy="give the folder of a Hugging Face checkpoint",
        )
    return _read_json_object(path, flag)


def _read_json_object(path: Path, flag: str) -> dict[str, Any]:
    try:
        values = parse_json(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error, flag) from error
    except InvalidData as error:
        raise UsageError(
            f": {path} cannot be read as JSON ({error})",
            flag=flag,
            remedy="copy the published config.json again",
        ) from error
    if not isinstance(values, dict):
        raise UsageError(
            f": {path} is not a JSON object", flag=flag, remedy="use the published config.json"
        )
    return values


def read_model_shape(
    source: Path, *, flag: str = "--rl-hf-checkpoint", for_planning: bool = False
) -> ModelShape:
    """Read the config.json in the folder `source`, or the file `source` itself.

    Raises UsageError for a missing folder, file or field, an unsupported family, and unsupported
    features of a supported family (biases, other activations). Weights in FP8 blocks or INT4 groups
    are described as the bfloat16 weights they represent, and `quantization` names the published
    method. Other quantised weights are refused, except with `for_planning`. Of a multimodal model
    it is the shape of the text model.
    """
    if source.is_file():
        values, path = _read_json_object(source, flag), source
    else:
        values, path = read_config_json(source, flag=flag), source / "config.json"
    return model_shape(values, path, flag=flag, for_planning=for_planning)


def model_shape(
    values: Mapping[str, Any],
    path: Path,
    *,
    flag: str = "--rl-hf-checkpoint",
    for_planning: bool = False,
) -> ModelShape:
    """Do `read_model_shape` for a parsed config.json; `path` is for messages."""
    whole, values = values, text_values(values)
    is_multimodal = values is not whole
    fields = Fields(values, path, flag, f"{TEXT_CONFIG}." if is_multimodal else "")
    family = _family(fields, values, path, flag)
    fields.check_spelt_out(family.spelt_out)
    what = unsupported_quantization(values, is_mxfp4=family.has_mxfp4)
    if what and not for_planning:
        remedy = GIVE_MXFP4 if family.has_mxfp4 else GIVE_BLOCKS_OR_GROUPS
        raise fields.refuse(f"quantised weights ({what})", remedy)
    _refuse_features(fields, family)
    blocks = read_blocks(fields, family)
    num_layers = len(blocks) or fields.count("num_hidden_layers")
    is_moe_layer = moe_layers(fields, family, num_layers, blocks)
    num_heads = fields.count("num_attention_heads")
    latent = _latent_attention(fields) if family.latent_attention else None
    router = family.router if any(is_moe_layer) or not blocks else None
    experts = read_experts(fields, router) if router else None
    if experts is not None and num_layers * experts.num_experts > _MOST_EXPERTS:
        raise fields.refuse(f"{experts.num_experts} experts in each of {num_layers} layers")
    shape = ModelShape(
        architecture=family.model_type,
        num_layers=num_layers,
        hidden_size=fields.count("hidden_size"),
        ffn_hidden_size=fields.count(family.dense_size),
        vocab_size=fields.count("vocab_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads if latent else fields.count("num_key_value_heads", num_heads),
        head_dim=_head_dim(fields, num_heads, latent),
        latent=latent,
        experts=experts,
        is_moe_layer=is_moe_layer,
        qk_norm=_switch(fields, family.qk_norm),
        qkv_bias=_switch(fields, family.qkv_bias),
        tied_embeddings=fields.switch("tie_word_embeddings"),
        norm_epsilon=fields.number(family.norm_epsilon, bounds=Bounds(above=0, below=1)),
        rope=read_rope(fields, family),
        max_positions=fields.count("max_position_embeddings"),
        num_mtp_layers=fields.count("num_nextn_predict_layers", 0, least=0),
        quantization=quantization_method(values),
        norms_whole_projection=family.norms_whole_projection,
        linear_biases=family.linear_biases,
        attention_sinks=family.attention_sinks,
        sliding_window=_sliding_window(fields, num_layers) if family.alternates_windows else None,
        clamps_glu=family.clamps_glu,
        delta_net=read_delta_net(fields, family),
        is_linear_layer=linear_layers(fields, family, num_layers),
        output_gate=family.output_gate,
        zero_centered_norms=family.zero_centered_norms,
        indexer=read_indexer(fields, family.fixed[ROPE_INTERLEAVED], num_layers)
        if family.sparse_attention
        else None,
        mamba=read_mamba(fields, family),
        blocks=blocks,
        squared_relu=family.squared_relu,
        is_multimodal=is_multimodal,
    )
    if name := unmapped_field(values, family.class_name, fields.read):
        raise fields.refuse(f"{name} (vLLM would compute it, Megatron would not)")
    return shape


def _family(fields: Fields, values: Mapping[str, Any], path: Path, flag: str) -> Family:
    """Return the family of the model_type; raise UsageError if it is not supported."""
    if not isinstance(fields["model_type"], str):
        raise fields.invalid("model_type", fields["model_type"], "a text")
    types = fields.get("layer_types", [])
    if not isinstance(types, list):
        raise fields.invalid("layer_types", types, "a list")
    fields.read.discard("layer_types")  # only its type was checked
    family = FAMILIES.get(fields["model_type"])
    if family is None:
        reason = why_unsupported(values)
        raise UsageError(
            f": {path} has {fields.inside}model_type '{fields['model_type']}', which is not "
            "supported" + (f" ({reason})" if reason else ""),
            flag=flag,
            remedy=f"supported are {', '.join(FAMILIES)}; give a checkpoint of one of these",
        )
    return family


def _sliding_window(fields: Fields, num_layers: int) -> int:
    """Return the sliding window of every other layer."""
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    if fields.get("layer_types", types) != types:
        raise fields.refuse(
            "layer_types that do not begin with sliding_attention and alternate (vLLM's do)"
        )
    return fields.count("sliding_window")


def _head_dim(fields: Fields, num_heads: int, latent: LatentAttention | None) -> int:
    """Return head_dim; ignore the field in latent attention, where transformers writes another."""
    from_width = fields.count("hidden_size") // num_heads
    return from_width if latent else fields.count("head_dim", from_width)


def _switch(fields: Fields, of_family: bool | str) -> bool:
    """Return the family's fixed value, or read the field that it names."""
    return fields.switch(of_family) if isinstance(of_family, str) else of_family


def _refuse_features(fields: Fields, family: Family) -> None:
    """Raise UsageError for a feature that config.json enables and the family does not support."""
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.refuse(f"the activation '{fields['hidden_act']}'")
    for name in ("attention_bias", "mlp_bias"):
        known = name == family.qkv_bias or name in family.fixed
        if not known and fields.get(name, False):
            raise fields.refuse("biases (attention_bias, mlp_bias)")
    if fields.get("use_sliding_window", False):
        raise fields.refuse("sliding-window attention (use_sliding_window)")
    for name in family.also_refused:
        if fields.get(name, False):
            raise fields.refuse(f"{name} {fields[name]} with model_type '{family.model_type}'")
    for name, value in family.fixed.items():
        if fields.get(name, value) != value:
            raise fields.refuse(
                f"{name} {fields.get(name)} with model_type '{family.model_type}' "
                f"(vLLM has {value})"
            )
    for of_vllm, saved in family.vllm_names.items():
        if fields.get(of_vllm, fields[saved]) != fields[saved]:
            raise fields.refuse(
                f"{of_vllm} {fields[of_vllm]} beside {saved} {fields[saved]} (vLLM reads the first)"
            )
    if not fields.get("rope_interleave", True):
        raise fields.refuse("rotary positions that are not interleaved (rope_interleave false)")


def _latent_attention(fields: Fields) -> LatentAttention:
    return LatentAttention(
        q_lora_rank=None if fields.get("q_lora_rank") is None else fields.count("q_lora_rank"),
        kv_lora_rank=fields.count("kv_lora_rank"),
        qk_nope_head_dim=fields.count("qk_nope_head_dim"),
        qk_rope_head_dim=fields.count("qk_rope_head_dim"),
        v_head_dim=fields.count("v_head_dim"),
    )
