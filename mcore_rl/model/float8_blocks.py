"""FP8 blocks: the format of a weight, and which weights of a model engines hold in it.

A weight `[r, c]` is float8_e4m3fn. Each of its blocks of 128 x 128 has a float32 scale in
`<weight>_scale_inv` `[ceil(r / 128), ceil(c / 128)]`. DeepSeek-V3 is published in this format.

With `--rl-rollout-dtype fp8`, engines hold the linear layers of attention, of dense feed-forward
layers and of experts in FP8 blocks. Router, norms, embedding, head and MTP layers keep their dtype,
and so does every weight that a published `quantization_config` leaves out. vLLM merges some linear
layers and splits others over TP, and requires that no block is cut. It quantises the input of a
layer in groups of 128 elements, and on a rank requires whole groups. A merged layer, or the experts
of a layer, for which that does not hold keeps its dtype as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mcore_rl.model.boxes import Box
from mcore_rl.model.config_json import LayerKind, ModelShape
from mcore_rl.model.delta_net import BLOCK as DELTA_NET
from mcore_rl.model.families import family_of
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.model.tensors import Cut, TensorInfo, TensorSpec, layer_specs, mtp_layer_specs

BLOCK = 128
FLOAT8 = "float8_e4m3fn"
_SCALE_BYTES = 4

# Linear layers that vLLM merges into one, in its order.
_MERGED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("wk", "weights_proj"),
)


def scale_name(weight: str) -> str:
    """Return the name of a weight's scales."""
    return f"{weight}_scale_inv"


def grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of blocks in each dimension."""
    return tuple(math.ceil(size / BLOCK) for size in shape)


def blocks_of(box: Box) -> Box:
    """Return the box of the scales that a weight's `box` needs."""
    return tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in box)


@dataclass(frozen=True, slots=True)
class Float8Weights:
    """The weights of a model that engines hold in FP8 blocks, and what vLLM must know about them.

    Example: `Float8Weights(frozenset({"model.layers.0.mlp.down_proj.weight"}),
    kept_modules=("model.layers.0.mlp.gate_proj", ...), powers_of_two=False)`.
    """

    weights: frozenset[str]  # names in the checkpoint
    kept_modules: tuple[str, ...]  # modules of the layers that keep their dtype
    powers_of_two: bool = False  # scales are powers of two: scale_fmt ue8m0

    def quantization_config(self) -> dict[str, Any]:
        """Return the field of config.json that describes these weights."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(self.kept_modules),
        }

    def in_blocks(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return `tensors` with these weights in FP8 blocks, each followed by its scales."""
        infos: dict[str, TensorInfo] = {}
        for name, info in tensors.items():
            if name in self.weights:
                infos[name] = replace(info, dtype=FLOAT8, itemsize=1)
                infos[scale_name(name)] = TensorInfo(grid(info.shape), "float32", _SCALE_BYTES)
            else:
                infos[name] = info
        return infos


def float8_weights(
    shape: ModelShape,
    rollout: RolloutLayout,
    *,
    published: frozenset[str] | None = None,
    powers_of_two: bool = False,
) -> Float8Weights:
    """Return the weights that engines of layout `rollout` hold in FP8 blocks.

    `published` are the weights that the checkpoint has in FP8 blocks; None: it has none.
    """
    weights: set[str] = set()
    kept: list[str] = []
    layers = family_of(shape.architecture).names.layers
    for layer, kind in enumerate(shape.layer_kinds):
        prefix = f"{layers}{layer}."
        for modules, fits in _layers_that_fit(shape, rollout, kind):
            names = [prefix + name for spec in modules for name in _names(spec)]
            if fits and (published is None or published.issuperset(names)):
                weights.update(names)
            else:
                kept += [prefix + _module(spec) for spec in modules]
    for layer in range(shape.num_layers, shape.num_layers + shape.num_mtp_layers):
        linear = [spec for spec in mtp_layer_specs(shape) if len(spec.shape) == 2]
        kept += [f"{layers}{layer}.{_module(spec)}" for spec in linear]
    return Float8Weights(frozenset(weights), tuple(dict.fromkeys(kept)), powers_of_two)


def specs_in_float8(
    shape: ModelShape, rollout: RolloutLayout, kind: LayerKind
) -> frozenset[TensorSpec]:
    """Return the specs of a layer's weights that `float8_weights` selects by layout alone."""
    groups = _layers_that_fit(shape, rollout, kind)
    return frozenset(spec for modules, fits in groups if fits for spec in modules)


def _layers_that_fit(
    shape: ModelShape, rollout: RolloutLayout, kind: LayerKind
) -> Iterator[tuple[list[TensorSpec], bool]]:
    """Yield the layers of vLLM within a decoder layer, and whether they can be in FP8 blocks."""
    for modules in _layers_of_vllm(layer_specs(shape, kind)):
        yield (
            modules,
            _is_quantised(shape, modules) and _has_whole_blocks(shape, rollout, modules),
        )


def _layers_of_vllm(specs: list[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Yield the weight matrices of a layer, grouped as vLLM merges them."""
    groups: dict[tuple[str, str], list[TensorSpec]] = {}
    for spec in specs:
        if len(spec.shape) != 2:
            continue
        parent, _, leaf = _module(spec).rpartition(".")
        merged = next((names[0] for names in _MERGED if leaf in names), leaf)
        groups.setdefault((parent, merged), []).append(spec)
    yield from groups.values()


def _module(spec: TensorSpec) -> str:
    """Return the module of a weight; that of all routed experts for one of theirs."""
    if spec.num_experts:
        return spec.name.partition(".{expert}")[0]
    return spec.name.rpartition(".")[0]


def _names(spec: TensorSpec) -> Iterator[str]:
    return (spec.name.format(expert=expert) for expert in range(max(1, spec.num_experts)))


def _is_quantised(shape: ModelShape, modules: list[TensorSpec]) -> bool:
    names = family_of(shape.architecture).names
    first = modules[0]
    if first.is_indexer and len(modules) > 1:  # vLLM merges its keys and head weights in bfloat16
        return False
    # vLLM has no FP8 blocks for the narrow projections of a delta net; the others stay with them.
    is_kept = first.name in (names.router, names.shared_gate) or first.name.startswith(DELTA_NET)
    return not is_kept


def _has_whole_blocks(shape: ModelShape, rollout: RolloutLayout, modules: list[TensorSpec]) -> bool:
    """Return whether vLLM's ranks hold whole blocks of these merged layers, as it requires."""
    if modules[0].num_experts:
        width = shape.experts.hidden_size if shape.experts else 0
        on_rank = width // (1 if rollout.expert_parallel else rollout.tp_size)
        return on_rank % BLOCK == shape.hidden_size % BLOCK == 0
    whole = modules[0].is_shared_expert and rollout.has_whole_shared_experts
    tp_size = 1 if whole else rollout.tp_size
    rows = [_rows(shape, spec, tp_size) for spec in modules]
    is_split = tp_size > 1 and modules[0].cut is not Cut.REPLICATED
    by_input = is_split and modules[0].cut is Cut.COLUMNS
    columns = modules[0].shape[1] // (tp_size if by_input else 1)
    # The last of merged layers may end with a part of a block, unless they are split.
    checked = rows if is_split and not by_input else rows[:-1]
    return not any(size % BLOCK for size in (columns, *checked))


def _rows(shape: ModelShape, spec: TensorSpec, tp_size: int) -> int:
    """Return the rows of a weight on one of vLLM's ranks."""
    if spec.cut is Cut.KV_ROWS:
        return spec.shape[0] // min(tp_size, shape.num_kv_heads)
    return spec.shape[0] // (tp_size if spec.cut is Cut.ROWS else 1)
