"""Adapters as PEFT saves them: the keys of adapter_config.json, and where a file has each factor.

PEFT has options that change the base or what an adapter computes, and each release adds some. A
configuration is therefore read by a list: whatever is not on it is refused.

Shape legend: o output rows of a weight, i input columns, r rank, e experts, q rank of a stack.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.readers import finite_number, integer_within
from mcore_rl.common.user_code import shortened
from mcore_rl.model.lora import Lora, factor_names, factor_shapes, is_expert

Shape = tuple[int, ...]

# Keys that change neither the base nor what an adapter computes. The tensors say which layers have
# adapters, dropout is part of a training, and PEFT ignores `runtime_config` in a file.
_WITHOUT_EFFECT = frozenset(
    "base_model_name_or_path revision inference_mode auto_mapping peft_version runtime_config "
    "target_modules exclude_modules target_parameters lora_dropout megatron_core qalora_group_size "
    "r lora_alpha".split()  # these two are read
)
_UNSET: tuple[Any, ...] = (None, False, "", [], {})
_STACKED = r".*\.gate_up_proj"  # PEFT's pattern for stacked gate and up-projections
# Values of other keys besides the unset ones. Unset is what PEFT does without the key.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian"),
    "use_rslora": (True,),
}
_CHANGES_BASE = "changes the weights of the base: the adapter does not fit those of the checkpoint"
_STARTS_CHANGING_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_SOME_LAYERS = "gives adapters to some of the layers, and --rl-lora-targets to all of a name"
_OTHER_WEIGHTS = "trains weights that have no adapters"
_WHY = {
    "use_dora": "scales the rows of merged weights",
    "alora_invocation_tokens": "applies the adapter to a part of the tokens",
    "modules_to_save": _OTHER_WEIGHTS,
    "trainable_token_indices": _OTHER_WEIGHTS,
    "bias": _OTHER_WEIGHTS,
    "lora_bias": "adds biases to adapters",
    "layers_to_transform": _SOME_LAYERS,
    "layers_pattern": _SOME_LAYERS,
    "layer_replication": "repeats layers of the base",
    "fan_in_fan_out": "is for weights that are stored transposed",
    "rank_pattern": "gives layers ranks of their own",
    "alpha_pattern": "gives layers alphas of their own",
    "kasa_config": _CHANGES_BASE,
    "arrow_config": "chooses among adapters",
}
MERGE_IT = "merge it by PEFT's merge_and_unload, and give the result as --rl-hf-checkpoint"
_ANOTHER = "name another adapter"
_CANNOT_BE_MERGED = ("alora_invocation_tokens", "arrow_config", "peft_type", "task_type")

# Layers that transformers 5, and so PEFT, calls by other names than checkpoints do.
_RENAMED = (
    ("base_model.model.backbone.", "base_model.model.model."),
    ("base_model.model.model.language_model.", "base_model.model.model."),
    (".block_sparse_moe.", ".mlp."),
    (".shared_mlp.", ".shared_experts."),
)
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
# Projections of experts that transformers stacks in one tensor, in the order of its rows.
_STACKS = (("gate_proj", "up_proj"), ("w1", "w3"), ("down_proj",), ("w2",))
# Families whose stacked experts PEFT 0.21 does not find by the names of their layers.
_NOT_CONVERTED = (
    *("qwen2_moe", "qwen3_5_moe_text", "gpt_oss", "hy_v3", "nemotron_h"),
    *("qwen3_vl_moe_text", "glm4v_moe_text"),
)


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What is read of adapter_config.json."""

    rank: int
    alpha: float
    pair_rank: int  # of stacked gate and up-projections
    pair_alpha: float
    is_rank_stabilized: bool  # rsLoRA, arXiv 2312.03732

    def scale(self, *, of_pair: bool = False) -> float:
        """Return the factor with which B A enters the merged weight."""
        rank, alpha = (self.pair_rank, self.pair_alpha) if of_pair else (self.rank, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_config(config: Mapping[str, Any], lora: Lora, flag: str) -> PeftConfig:
    """Read adapter_config.json. Raises UsageError, with `flag`, for what is not on the list, and
    for another rank or alpha than that of `lora`."""
    read = _pair_of(config)
    special = {"rank_pattern", "alpha_pattern"} if read is not None else set()
    for key, value in config.items():
        if key in _WITHOUT_EFFECT | special or value in _UNSET + _ALLOWED.get(key, ()):
            continue
        why = _WHY.get(key, "is not supported")
        if key == "init_lora_weights" and str(value).lower().startswith(_STARTS_CHANGING_BASE):
            why = _CHANGES_BASE
        remedy = _ANOTHER if key in _CANNOT_BE_MERGED else MERGE_IT
        raise UsageError(f"has {_shown(key, value)}, which {why}", flag=flag, remedy=remedy)
    rank, alpha = config.get("r"), finite_number(config.get("lora_alpha"))
    is_rank_stabilized = bool(config.get("use_rslora"))
    # With rsLoRA also the alpha that has the same scale without it.
    factors = (1.0, math.sqrt(lora.rank)) if is_rank_stabilized else (1.0,)
    is_alpha = alpha is not None and any(math.isclose(alpha * f, lora.alpha) for f in factors)
    is_rank = integer_within(rank, lora.rank, lora.rank) is not None
    for key, is_ours, ours in (
        ("r", is_rank, f"--rl-lora-rank {lora.rank}"),
        ("lora_alpha", is_alpha, f"--rl-lora-alpha {lora.alpha:g}"),
    ):
        if not is_ours:
            raise UsageError(
                f"has {_shown(key, config.get(key))}, which {ours} contradicts",
                flag=flag,
                remedy="give the adapter's",
            )
    assert rank is not None and alpha is not None
    pair_rank, pair_alpha = read or (rank, alpha)
    return PeftConfig(rank, alpha, pair_rank, pair_alpha, is_rank_stabilized)


def _pair_of(config: Mapping[str, Any]) -> tuple[int, float] | None:
    """Return rank and alpha of stacked gate and up-projections, if no other layer has its own."""
    ranks, alphas = config.get("rank_pattern"), config.get("alpha_pattern")
    if not (isinstance(ranks, dict) and isinstance(alphas, dict)):
        return None
    if not (ranks.keys() == alphas.keys() == {_STACKED}):
        return None
    rank, alpha = integer_within(ranks[_STACKED], 1, 1 << 30), finite_number(alphas[_STACKED])
    return None if rank is None or alpha is None else (rank, alpha)


def _shown(key: str, value: Any) -> str:
    return shortened(f"{key} {json.dumps(value)}")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a file has a factor; `scale` is what B is multiplied by for the scale of `Lora`.

    A stack of `num_experts` holds that of `expert`: A `[e q, i]`, expert by expert, B `[o, q e]`,
    rank by rank. `rows` of B and `ranks` are its part of them.
    Example: `Stored("base_model.model.model.layers.0.mlp.experts.lora_B.weight", 1.0, expert=3,
    num_experts=8, rows=(0, 64), ranks=(0, 4))`.
    """

    name: str
    scale: float = 1.0
    expert: int = 0
    num_experts: int = 0  # 0: the tensor is the factor
    rows: tuple[int, int] = (0, 0)
    ranks: tuple[int, int] = (0, 0)


def find_factors(lora: Lora, config: PeftConfig, shapes: Mapping[str, Shape]) -> dict[str, Stored]:
    """Return where a file with tensors of `shapes` has the factors of `lora`, by their names.

    Factors that it does not have, or not in the right shape, are left out.
    """
    file = {renamed(name): (name, shape) for name, shape in shapes.items()}
    factors: dict[str, Stored] = {}
    scale = config.scale() / lora.scale
    for factor, shape in factor_shapes(lora).items():
        name, its_shape = file.get(renamed(factor), ("", ()))
        if its_shape == shape:
            factors[factor] = Stored(name, scale)
    for container, by_part in _experts(lora).items():
        for parts in _STACKS:
            if all(part in by_part for part in parts):
                factors |= _of_stack(container, [by_part[p] for p in parts], lora, config, file)
    return factors


def renamed(name: str) -> str:
    """Return the name of a tensor or layer, from its dot on, as transformers 5 has it."""
    for old, new in _RENAMED:
        name = name.replace(old, new)
    return name


def _experts(lora: Lora) -> dict[str, dict[str, list[str]]]:
    """Return the layers of routed experts, in order, by container and last part of the name."""
    by_container: dict[str, dict[str, list[str]]] = {}
    for layer in lora.modules:
        if match := _EXPERT.fullmatch(layer):
            container, _, part = match.groups()
            if part != "w1" or ".mlp." not in container:  # gpt-oss mixes the rows of w1 and w3
                by_container.setdefault(container, {}).setdefault(part, []).append(layer)
    return by_container


def _of_stack(
    container: str,
    parts: list[list[str]],
    lora: Lora,
    config: PeftConfig,
    file: Mapping[str, tuple[str, Shape]],
) -> dict[str, Stored]:
    """Return the factors of stacked experts, from the stack that has the shape of `parts`: layers
    of one projection of all experts, or of two."""
    num_experts, is_pair = len(parts[0]), len(parts) == 2
    rows, columns = lora.modules[parts[0][0]]
    rank = config.pair_rank if is_pair else config.rank
    if rank not in (lora.rank, len(parts) * lora.rank):
        return {}
    expected = ((num_experts * rank, columns), (len(parts) * rows, num_experts * rank))
    scale = config.scale(of_pair=is_pair) / lora.scale
    factors = {}
    for stack in (f"{container}.base_layer", container):
        stored = [file.get(renamed(name), ("", ())) for name in factor_names(stack)]
        if tuple(shape for _, shape in stored) != expected:
            continue
        for position, layers in enumerate(parts):
            first = position * lora.rank if rank > lora.rank else 0
            of_rows, of_ranks = (position * rows, (position + 1) * rows), (first, first + lora.rank)
            for expert, layer in enumerate(layers):
                for factor, (name, _) in zip(factor_names(layer), stored, strict=True):
                    factors[factor] = Stored(name, scale, expert, num_experts, of_rows, of_ranks)
    return factors


def left_out_by_peft(lora: Lora, architecture: str) -> str:
    """Name the layers whose adapters PEFT 0.21 does not load from our export; "" for none.

    It takes names of experts' layers for parts of the stacked experts of transformers 5.
    """
    of_experts, others = (
        {layer.rsplit(".", 1)[-1] for layer in lora.modules if is_expert(layer) == of_expert}
        for of_expert in (True, False)
    )
    if of_experts and architecture in _NOT_CONVERTED:
        return "routed experts"
    if of_experts & others:
        return "other MLPs than routed experts"
    loads = not of_experts or of_experts in ({"down_proj"}, {"w2"}) or len(of_experts) == 3
    return "" if loads else "gate and up-projections of routed experts"
