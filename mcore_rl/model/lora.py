"""LoRA (arXiv 2106.09685): which linear layers have adapters, and the names of their tensors.

An adapter belongs to one linear layer of the Hugging Face model, with weight W `[o, i]`. It has
A `[r, i]` and B `[o, r]`, and the model computes with W + (alpha / r) B A. Layers that Megatron
fuses (query, key and value; gate and up-projection) therefore have one adapter each, and a routed
expert has its own. A starts as in PEFT, from values that depend only on the layer's name and the
seed; B starts at zero.

Shape legend: o output rows of a weight, i input columns, r rank.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters, param
from mcore_rl.model.config_json import LayerKind, ModelShape
from mcore_rl.model.families import family_of
from mcore_rl.model.tensors import TensorSpec, layer_specs

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_WEIGHT = ".weight"
_EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")
_NUMBER = "{expert}."  # as in `TensorSpec.name`

# What a hand-over brings to engines: merged weights, or adapters beside the weights of the base.
MERGED, ADAPTERS = "merged", "adapters"
# Ranks for which vLLM has LoRA layers; a smaller one is padded with zeros.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True)
class LoraOptions(Parameters):
    """The flags of LoRA."""

    _flag_prefix = "lora_"
    _needs = "lora_rank"

    rank: int = param(
        0, "train adapters of this rank and freeze all other weights of the policy; 0: off", least=0
    )
    alpha: float | None = param(
        None, "adapters are scaled by alpha / rank; default: twice the rank", above=0
    )
    targets: str | None = param(
        None,
        "layers with adapters, by the ends of their Hugging Face names, separated by commas: "
        "q_proj, shared_experts.up_proj, experts.down_proj (all routed experts); default: all "
        "linear layers of attention, MLP and experts",
    )
    adapter: str | None = param(None, "folder of an adapter in PEFT's format to start from")
    export: str | None = param(
        None, "folder to write the trained adapter to at the end, in PEFT's format"
    )
    rollout: str = param(
        MERGED,
        "what weight syncs bring to engines: merged weights, or adapters alone, which vLLM's LoRA "
        "layers apply to the base that the first one brings",
        choices=(MERGED, ADAPTERS),
    )


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters of a model.

    Example: `Lora(rank=8, alpha=16.0, targets=("q_proj", "v_proj"), modules={
    "model.layers.0.self_attn.q_proj": (64, 32)})`.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    modules: dict[str, tuple[int, int]]  # linear layer -> shape of its weight, in layer order

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def describe(self) -> str:
        """Return rank, alpha and targets, as checkpoints record them."""
        return f"rank {self.rank}, alpha {self.alpha:g}, targets {','.join(self.targets)}"

    @property
    def num_parameters(self) -> int:
        return sum(self.rank * (rows + columns) for rows, columns in self.modules.values())


def has_weight(shape: ModelShape, spec: TensorSpec) -> bool:
    """Return whether a tensor of a layer is the weight of a linear layer that can have an adapter.

    Those of routers, gates of shared experts, indexers and recurrent layers cannot.
    """
    names = family_of(shape.architecture).names
    of_experts = (name.removesuffix(_WEIGHT) for name in (names.gate, names.up, names.down))
    layer = spec.name.removesuffix(_WEIGHT)
    last_parts = {*_ATTENTION, *_LATENT_ATTENTION, *_MLP, *of_experts}
    return layer != spec.name and not spec.is_indexer and layer.rsplit(".", 1)[-1] in last_parts


def matches(layer: str, target: str) -> bool:
    """Return whether `target` is the end of a linear layer's name within a decoder layer, in which
    the number of an expert is left out: of "mlp.experts.up_proj", for example."""
    within = layer.replace(_NUMBER, "")
    return within == target or within.endswith(f".{target}")


def is_adapted(shape: ModelShape, spec: TensorSpec, targets: Sequence[str]) -> bool:
    """Return whether a tensor of a layer is a weight with an adapter."""
    layer = spec.name.removesuffix(_WEIGHT)
    return has_weight(shape, spec) and any(matches(layer, target) for target in targets)


def adapted_specs(
    shape: ModelShape, kind: LayerKind, targets: Sequence[str]
) -> Iterator[TensorSpec]:
    """Return the weights of a layer that have adapters."""
    return (spec for spec in layer_specs(shape, kind) if is_adapted(shape, spec, targets))


def targets_of(options: LoraOptions, shape: ModelShape) -> tuple[str, ...]:
    """Return the targets of the flags, by default the last parts of all linear layers' names.

    Raises UsageError for a target that matches no layer of the model.
    """
    layers = {
        spec.name.removesuffix(_WEIGHT): None
        for kind in shape.layer_kinds
        for spec in layer_specs(shape, kind)
        if has_weight(shape, spec)
    }
    possible = tuple(dict.fromkeys(layer.rsplit(".", 1)[-1] for layer in layers))
    if options.targets is None:
        return possible
    targets = tuple(target.strip() for target in options.targets.split(","))
    for target in targets:
        if not any(matches(layer, target) for layer in layers):
            raise UsageError(
                f"names '{target}', which is not the end of the name of any linear layer of "
                f"{shape.architecture}",
                flag=f"--rl-lora-targets {options.targets}",
                remedy=f"choose from {', '.join(possible)}",
            )
    return targets


def alpha_of(options: LoraOptions) -> float:
    """Return alpha, by default twice the rank."""
    return 2.0 * options.rank if options.alpha is None else float(options.alpha)


def resolve_lora(options: LoraOptions, shape: ModelShape) -> Lora | None:
    """Return the adapters that the flags describe; None without LoRA.

    Raises UsageError for a target that matches no layer of the model.
    """
    if not options.rank:
        return None
    targets = targets_of(options, shape)
    prefix = family_of(shape.architecture).names.layers
    modules = {}
    for number, kind in enumerate(shape.layer_kinds):
        for spec in adapted_specs(shape, kind, targets):
            layer, (rows, columns) = spec.name.removesuffix(_WEIGHT), spec.shape
            for expert in range(max(1, spec.num_experts)):
                modules[f"{prefix}{number}.{layer.format(expert=expert)}"] = (rows, columns)
    return Lora(options.rank, alpha_of(options), targets, modules)


def is_expert(layer: str) -> bool:
    """Return whether a layer is part of a routed expert."""
    return _EXPERT_NUMBER.search(layer) is not None


def seed_of(layer: str, seed: int) -> int:
    """Return the seed of a layer's A, below 2^63."""
    digest = hashlib.sha256(f"lora {seed} {layer}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def bound_of(columns: int) -> float:
    """Return the bound of a layer's A, which starts uniform within it, as PEFT's does
    (kaiming_uniform with a = sqrt(5))."""
    return 1.0 / math.sqrt(columns)


def vllm_rank(rank: int) -> int | None:
    """Return the smallest rank of vLLM's LoRA layers that holds adapters of `rank`; None: none."""
    return next((served for served in VLLM_RANKS if served >= rank), None)


def factor_names(layer: str) -> tuple[str, str]:
    """Return the names of a layer's A and B in an adapter's file."""
    prefix = f"base_model.model.{layer}."
    return f"{prefix}lora_A.weight", f"{prefix}lora_B.weight"


def peft_names(lora: Lora) -> Iterator[tuple[str, str, str]]:
    """Yield layer, and names of its A and B in an adapter's file."""
    for layer in lora.modules:
        yield (layer, *factor_names(layer))


def factor_shapes(lora: Lora) -> dict[str, tuple[int, int]]:
    """Return the shapes of all factors, by their names in an adapter's file."""
    shapes = {}
    for layer, a, b in peft_names(lora):
        rows, columns = lora.modules[layer]
        shapes[a], shapes[b] = (lora.rank, columns), (rows, lora.rank)
    return shapes
