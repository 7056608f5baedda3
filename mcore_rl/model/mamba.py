"""Mamba-2 layers (arXiv 2405.21060) and models whose layers have one block each: Nemotron-H.

A layer of Nemotron-H is a norm and one block. `hybrid_override_pattern` has a symbol for each, as
Megatron's patterns have: M Mamba-2, * attention, - feed-forward, E experts.

The input projection has the rows of the output gates (z), the inputs (x), what the state takes (B)
and gives (C) and the time steps (dt), in this order. A TP rank of Megatron, or of vLLM, has its
share of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mcore_rl.model.config_fields import Fields
from mcore_rl.model.delta_net import Rows, share_of_parts
from mcore_rl.model.family import Family

MAMBA, ATTENTION, DENSE, EXPERTS = "M*-E"
BLOCK = "mixer."  # of the tensors' names, after the layer's prefix
PROJECTION = BLOCK + "in_proj.weight"
CONVOLUTION = BLOCK + "conv1d.weight"
CONVOLUTION_BIAS = BLOCK + "conv1d.bias"
BY_HEAD = ("A_log", "D", "dt_bias")  # a number for each head
_PATTERN, _TYPES = "hybrid_override_pattern", "layers_block_type"
# Of layers_block_type, now and before transformers 5.19.
_SYMBOLS = {
    **{"linear_attention": MAMBA, "full_attention": ATTENTION, "mlp": DENSE, "moe": EXPERTS},
    **{"mamba": MAMBA, "attention": ATTENTION},
}
_MEGATRON_CONV_WIDTH, _MEGATRON_EPSILON = 4, 1e-5


@dataclass(frozen=True, slots=True)
class Mamba:
    """Sizes of the Mamba-2 layers of a model."""

    num_heads: int
    head_dim: int
    num_groups: int  # of heads with the same B and C
    state_size: int
    conv_width: int
    state_bytes: int  # of an element that the engine keeps between tokens

    @property
    def inner_size(self) -> int:
        """All heads of z, x and the output."""
        return self.num_heads * self.head_dim

    @property
    def projection_parts(self) -> tuple[int, ...]:
        """z, x, B, C, dt: the rows of the input projection, in order."""
        return self.inner_size, *self.conv_parts, self.num_heads

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """x, B, C: the channels of the convolution, in order."""
        state = self.num_groups * self.state_size
        return self.inner_size, state, state

    def projection_rows(self, rank: int, size: int) -> Iterator[Rows]:
        """Yield the rows of the input projection on a TP rank, in Megatron's order."""
        yield from share_of_parts(PROJECTION, self.projection_parts, rank, size)

    def convolution_rows(self, rank: int, size: int) -> Iterator[Rows]:
        """Yield the channels of the convolution on a TP rank, in Megatron's order."""
        yield from share_of_parts(CONVOLUTION, self.conv_parts, rank, size)

    def bias_rows(self, rank: int, size: int) -> Iterator[Rows]:
        """Yield the biases of `convolution_rows`."""
        yield from share_of_parts(CONVOLUTION_BIAS, self.conv_parts, rank, size)


def read_mamba(fields: Fields, family: Family) -> Mamba | None:
    """Read the sizes; None for a family without such layers. Refuse what Megatron fixes."""
    if not family.one_block_a_layer:
        return None
    width, epsilon = fields.count("conv_kernel"), fields.get(family.norm_epsilon)
    for name, value, fixed in (
        ("conv_kernel", width, _MEGATRON_CONV_WIDTH),
        (family.norm_epsilon, epsilon, _MEGATRON_EPSILON),
        ("attention_head_dim", fields.get("attention_head_dim"), fields.get("head_dim")),
    ):
        if value is not None and value != fixed:
            raise fields.refuse(f"{name} {value} (Megatron has {fixed})")
    mamba = Mamba(
        num_heads=fields.count("mamba_num_heads"),
        head_dim=fields.count("mamba_head_dim"),
        num_groups=fields.count("n_groups"),
        state_size=fields.count("ssm_state_size"),
        conv_width=width,
        state_bytes=4 if fields.get("mamba_ssm_cache_dtype", "float32") == "float32" else 2,
    )
    fields.get("chunk_size")  # positions that a kernel computes at once, of no effect on the result
    if mamba.num_heads % mamba.num_groups:
        raise fields.invalid(
            "mamba_num_heads", mamba.num_heads, f"a multiple of n_groups, {mamba.num_groups}"
        )
    return mamba


def read_blocks(fields: Fields, family: Family) -> str:
    """Return the symbol of each layer's block; "" for a family with attention and feed-forward in
    each."""
    if not family.one_block_a_layer:
        return ""
    types = fields.get(_TYPES, fields.get("layer_types"))
    pattern = fields.get(_PATTERN) if types is None else _pattern_of(fields, types)
    if pattern is None:
        fields[_PATTERN]  # raises
    if not isinstance(pattern, str) or not {*pattern} <= {*_SYMBOLS.values()}:
        raise fields.invalid(
            _PATTERN, pattern, f"of the symbols {MAMBA}{ATTENTION}{DENSE}{EXPERTS}"
        )
    if MAMBA not in pattern:
        raise fields.refuse(f"no Mamba-2 layer ({_PATTERN} {pattern[:60]})")
    if fields.get(_PATTERN, pattern) != pattern:
        raise fields.refuse(f"other layers by {_PATTERN} than by {_TYPES}")
    if fields.count("num_hidden_layers", len(pattern)) != len(pattern):
        raise fields.refuse(
            f"num_hidden_layers {fields['num_hidden_layers']} and a pattern of {len(pattern)}"
        )
    return pattern


def _pattern_of(fields: Fields, types: Any) -> str:
    known = isinstance(types, list) and all(isinstance(kind, str) for kind in types)
    if not known or not {*types} <= _SYMBOLS.keys():
        raise fields.invalid(_TYPES, types, f"a list of {', '.join(_SYMBOLS)}")
    return "".join(_SYMBOLS[kind] for kind in types)
