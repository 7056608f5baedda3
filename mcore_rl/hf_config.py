"""A Hugging Face config.json, read into the shape of a model and into Megatron's flags.

`ModelShape` is what the rest of the package knows of an architecture; `megatron_flags` says the
same in Megatron's own words. Both are derived from config.json alone, so that nobody types an
architecture twice.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.errors import UsageError

ARCHITECTURES = ("deepseek_v3", "deepseek_v2", "qwen3_moe", "qwen3")

# Fields that must be spelt out, if only as null: where one is left out, transformers fills in the
# values of a published model, vLLM others (of DeepSeek-V3's router: those of V2) and we neither.
_SPELT_OUT = {
    "deepseek_v3": (
        "q_lora_rank n_shared_experts first_k_dense_replace n_group topk_method scoring_func "
        "norm_topk_prob routed_scaling_factor"
    ).split(),
    "deepseek_v2": ["q_lora_rank", "n_shared_experts"],
    "qwen3_moe": ["num_key_value_heads"],
    "qwen3": ["num_key_value_heads", "head_dim"],
}


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int | None  # None: queries are projected directly, as in DeepSeek-V2-Lite
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture-of-experts part of a model."""

    num_experts: int
    topk: int
    hidden_size: int  # of one routed expert
    shared_hidden_size: int | None  # of all shared experts together
    score_function: str  # "sigmoid" or "softmax"
    has_bias: bool  # auxiliary-loss-free balancing, arXiv 2408.15664
    normalize_topk: bool
    scaling_factor: float
    num_groups: int | None
    topk_groups: int | None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a checkpoint's tensors look like, whoever holds them."""

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
    rope: Mapping[str, Any]  # normalised: rope_type, rope_theta and what the type needs
    max_positions: int
    num_mtp_layers: int


class _Fields:
    """Reads fields of config.json; a missing or senseless one is an error that names it."""

    def __init__(self, values: Mapping[str, Any], path: Path, flag: str) -> None:
        self._values, self._path, self._flag = values, path, flag

    def __getitem__(self, name: str) -> Any:
        if self._values.get(name) is None:
            raise self._missing(name)
        return self._values[name]

    def _missing(self, name: str) -> UsageError:
        return UsageError(
            f"{self._flag}: {self._path} has no field '{name}', which its architecture needs; "
            "use the config.json that was published with the checkpoint"
        )

    def check_spelt_out(self, names: Iterable[str]) -> None:
        """Each of `names` must be there, null or not."""
        for name in names:
            if name not in self._values:
                raise self._missing(name)

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least`; needed unless there is a default."""
        value = self[name] if default is None else self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(
                f"{self._flag}: {self._path} has {name} {value!r}, which must be an integer of at "
                f"least {least}; use the config.json that was published with the checkpoint"
            )
        return value

    def refuse(self, what: str, remedy: str = "choose another checkpoint") -> UsageError:
        return UsageError(
            f"{self._flag}: {self._path} asks for {what}, which is not supported; {remedy}"
        )


def read_config_json(folder: Path, *, flag: str = "--rl-hf-checkpoint") -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder; raises UsageError if there is none to read."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise UsageError(
            f"{flag} {folder} is not a directory; give the folder of a Hugging Face checkpoint"
        )
    if not path.is_file():
        raise UsageError(
            f"{flag} {folder} has no config.json; give the folder of a Hugging Face checkpoint"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{flag}: {path} cannot be read as JSON ({error}); copy the published config.json again"
        ) from error
    if not isinstance(values, dict):
        raise UsageError(f"{flag}: {path} holds no JSON object; use the published config.json")
    return values


def read_model_shape(folder: Path, *, flag: str = "--rl-hf-checkpoint") -> ModelShape:
    """Read `folder`/config.json.

    Raises UsageError for a missing folder, file or field, an architecture that is not supported,
    and features of a supported one that are not (quantised weights, biases, other activations).
    """
    folder = Path(folder)
    values = read_config_json(folder, flag=flag)
    fields = _Fields(values, folder / "config.json", flag)
    architecture = fields["model_type"]
    if architecture not in ARCHITECTURES:
        raise UsageError(
            f"{flag}: {folder / 'config.json'} has model_type '{architecture}'; supported are "
            f"{', '.join(ARCHITECTURES)}; give a checkpoint of one of these"
        )
    fields.check_spelt_out(_SPELT_OUT[architecture])
    if fields.get("quantization_config"):
        raise fields.refuse(
            "quantised weights (quantization_config)", "dequantise the checkpoint to bfloat16 first"
        )
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.refuse(f"the activation '{values['hidden_act']}'")
    if fields.get("attention_bias", False) or fields.get("mlp_bias", False):
        raise fields.refuse("biases (attention_bias, mlp_bias)")
    if fields.get("use_sliding_window", False):
        raise fields.refuse("sliding-window attention (use_sliding_window)")
    if not fields.get("rope_interleave", True):
        raise fields.refuse("rotary positions that are not interleaved (rope_interleave false)")

    latent = _latent_attention(fields) if architecture.startswith("deepseek") else None
    experts = None if architecture == "qwen3" else _experts(fields, architecture)
    num_layers = fields.count("num_hidden_layers")
    num_heads = fields.count("num_attention_heads")
    return ModelShape(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=fields.count("hidden_size"),
        ffn_hidden_size=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads if latent else fields.count("num_key_value_heads", num_heads),
        head_dim=fields.count("head_dim", fields.count("hidden_size") // num_heads),
        latent=latent,
        experts=experts,
        is_moe_layer=_moe_layers(fields, architecture, num_layers),
        qk_norm=True,  # of the heads in Qwen3, of the latents in DeepSeek
        qkv_bias=False,
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        norm_epsilon=fields["rms_norm_eps"],
        rope=_rope(fields),
        max_positions=fields.count("max_position_embeddings"),
        num_mtp_layers=fields.count("num_nextn_predict_layers", 0, least=0),
    )


def _latent_attention(fields: _Fields) -> LatentAttention:
    return LatentAttention(
        q_lora_rank=None if fields.get("q_lora_rank") is None else fields.count("q_lora_rank"),
        kv_lora_rank=fields.count("kv_lora_rank"),
        qk_nope_head_dim=fields.count("qk_nope_head_dim"),
        qk_rope_head_dim=fields.count("qk_rope_head_dim"),
        v_head_dim=fields.count("v_head_dim"),
    )


def _experts(fields: _Fields, architecture: str) -> Experts:
    normalize = bool(fields.get("norm_topk_prob", False))
    common = {
        "topk": fields.count("num_experts_per_tok"),
        "hidden_size": fields.count("moe_intermediate_size"),
        "normalize_topk": normalize,
    }
    if architecture == "qwen3_moe":
        return Experts(
            num_experts=fields.count("num_experts"),
            shared_hidden_size=None,
            score_function="softmax",
            has_bias=False,
            scaling_factor=1.0,
            num_groups=None,
            topk_groups=None,
            **common,
        )
    is_v3 = architecture == "deepseek_v3"
    scoring = fields["scoring_func"] if is_v3 else fields.get("scoring_func", "softmax")
    if scoring != ("sigmoid" if is_v3 else "softmax"):
        raise fields.refuse(f"scoring_func '{scoring}' with model_type '{architecture}'")
    method = fields["topk_method"] if is_v3 else fields.get("topk_method", "greedy")
    if method not in (["noaux_tc"] if is_v3 else ["greedy", "group_limited_greedy"]):
        raise fields.refuse(f"topk_method '{method}' with model_type '{architecture}'")
    if is_v3 and not normalize:
        raise fields.refuse("norm_topk_prob false with a sigmoid router")
    if not is_v3 and normalize and common["topk"] > 1:
        raise fields.refuse("norm_topk_prob true with model_type 'deepseek_v2'")
    num_groups, topk_groups = _expert_groups(fields, method, common["topk"])
    num_shared = fields.count("n_shared_experts", 0, least=0)
    return Experts(
        num_experts=fields.count("n_routed_experts"),
        shared_hidden_size=num_shared * common["hidden_size"] if num_shared else None,
        score_function=scoring,
        has_bias=is_v3,
        scaling_factor=float(fields.get("routed_scaling_factor", 1.0)),
        num_groups=num_groups,
        topk_groups=topk_groups,
        **common,
    )


def _expert_groups(fields: _Fields, method: str, topk: int) -> tuple[int | None, int | None]:
    """Number of groups and how many of them a token may use; None without group-limited routing."""
    num_groups = fields.count("n_group", 1)
    if num_groups == 1:
        return None, None
    if method == "greedy":
        raise fields.refuse(f"n_group {num_groups} with topk_method 'greedy'")
    # A group is ranked by its best experts: DeepSeek-V3 adds two, V2 takes one; Megatron adds
    # topk // topk_group of them.
    topk_groups = fields.count("topk_group")
    added = topk // topk_groups
    if added != (2 if method == "noaux_tc" else 1):
        raise fields.refuse(
            f"group-limited routing with num_experts_per_tok {topk} and topk_group {topk_groups} "
            f"(Megatron would rank a group by its best {added} experts)"
        )
    return num_groups, topk_groups


def _moe_layers(fields: _Fields, architecture: str, num_layers: int) -> tuple[bool, ...]:
    if architecture == "qwen3":
        return (False,) * num_layers
    if architecture == "qwen3_moe":
        dense = set(fields.get("mlp_only_layers", []))
        step = fields.count("decoder_sparse_step", 1)
        return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    first = fields.count("first_k_dense_replace", 0, least=0)
    frequency = fields.count("moe_layer_freq", 1)
    return tuple(i >= first and i % frequency == 0 for i in range(num_layers))


def _rope(fields: _Fields) -> dict[str, Any]:
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise fields.refuse(f"rope scaling {given!r}")
    given = dict(given)
    rope_type = given.pop("type", None)
    rope_type = given.pop("rope_type", rope_type) or "default"
    theta = given.pop("rope_theta", fields.get("rope_theta", 10000.0))
    if theta != int(theta):
        raise fields.refuse(f"rope_theta {theta} (Megatron's --rotary-base is an integer)")
    if rope_type not in ("default", "yarn"):
        raise fields.refuse(f"rope scaling of type '{rope_type}'")
    if rope_type == "yarn" and fields.get("kv_lora_rank") is None:
        raise fields.refuse("yarn rope scaling outside latent attention")
    if rope_type == "yarn":
        if given.get("factor") is None:
            raise fields.refuse("yarn rope scaling without a factor")
        # Megatron's MLA keeps these three out of its flags and fixes them at these values.
        fixed = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
        for name, value in fixed.items():
            if given.get(name, value) != value:
                raise fields.refuse(f"yarn with {name} {given[name]} (Megatron has {value})")
    return {"rope_type": rope_type, "rope_theta": float(theta), **given}


def megatron_flags(shape: ModelShape) -> list[str]:
    """The architecture of `shape` as Megatron command-line tokens."""
    tokens: list[str] = []

    def add(flag: str, *values: Any) -> None:
        tokens.extend([flag, *(str(value) for value in values)])

    add("--num-layers", shape.num_layers)
    add("--hidden-size", shape.hidden_size)
    add("--ffn-hidden-size", shape.ffn_hidden_size)
    add("--num-attention-heads", shape.num_heads)
    add("--max-position-embeddings", shape.max_positions)
    add("--normalization", "RMSNorm")
    add("--norm-epsilon", shape.norm_epsilon)
    add("--position-embedding-type", "rope")
    add("--rotary-base", int(shape.rope["rope_theta"]))
    add("--vocab-size", shape.vocab_size)
    for flag in ("--swiglu", "--disable-bias-linear"):
        add(flag)
    if shape.qk_norm:
        add("--qk-layernorm")
    if not shape.tied_embeddings:
        add("--untie-embeddings-and-output-weights")
    if shape.latent:
        _add_latent_attention(add, shape.latent, shape.rope)
    else:
        add("--kv-channels", shape.head_dim)
        if shape.num_kv_heads != shape.num_heads:
            add("--group-query-attention")
            add("--num-query-groups", shape.num_kv_heads)
    if shape.experts:
        _add_experts(add, shape.experts, shape.is_moe_layer)
    return tokens


def _add_latent_attention(add: Any, latent: LatentAttention, rope: Mapping[str, Any]) -> None:
    add("--multi-latent-attention")
    if latent.q_lora_rank is not None:
        add("--q-lora-rank", latent.q_lora_rank)
    add("--kv-lora-rank", latent.kv_lora_rank)
    add("--qk-head-dim", latent.qk_nope_head_dim)
    add("--qk-pos-emb-head-dim", latent.qk_rope_head_dim)
    add("--v-head-dim", latent.v_head_dim)
    if rope["rope_type"] == "yarn":
        add("--rope-type", "yarn")
        add("--rotary-scaling-factor", rope["factor"])
        add("--mscale", rope.get("mscale", 1.0))
        add("--mscale-all-dim", rope.get("mscale_all_dim", 0.0))
    else:
        add("--rope-type", "rope")


def _add_experts(add: Any, experts: Experts, is_moe_layer: tuple[bool, ...]) -> None:
    add("--num-experts", experts.num_experts)
    add("--moe-router-topk", experts.topk)
    add("--moe-ffn-hidden-size", experts.hidden_size)
    add("--moe-layer-freq", "([" + ",".join(str(int(x)) for x in is_moe_layer) + "])")
    if experts.shared_hidden_size:
        add("--moe-shared-expert-intermediate-size", experts.shared_hidden_size)
    add("--moe-router-score-function", experts.score_function)
    # DeepSeek-V2 and Qwen3 without normalisation weigh by the softmax over all experts; with it,
    # the softmax over the chosen ones is the same thing, and that is Megatron's other order.
    if experts.score_function == "softmax" and not experts.normalize_topk:
        add("--moe-router-pre-softmax")
    if experts.has_bias:
        add("--moe-router-enable-expert-bias")
    if experts.scaling_factor != 1.0:
        add("--moe-router-topk-scaling-factor", experts.scaling_factor)
    if experts.num_groups:
        add("--moe-router-num-groups", experts.num_groups)
        add("--moe-router-group-topk", experts.topk_groups)
