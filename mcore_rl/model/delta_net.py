"""Gated delta net layers (arXiv 2412.06464) of Qwen3-Next and Qwen3.5, read from a config.json.

Megatron's input projection on a TP rank holds the rows of its key and value heads in this order:
queries, keys, values, output gates (z), write strengths (b), decays (a). Checkpoints order the same
rows in one of two ways:

    Qwen3-Next  in_proj_qkvz: for each key head its q, k, v, z; in_proj_ba: for each its b, a
    Qwen3.5     in_proj_qkv: all q, all k, all v; in_proj_z; in_proj_b; in_proj_a
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mcore_rl.model.config_fields import Fields
from mcore_rl.model.family import Family

BLOCK = "linear_attn."  # of the tensors' names, after the layer's prefix
CONVOLUTION = BLOCK + "conv1d.weight"
_LINEAR, _FULL = "linear_attention", "full_attention"  # in layer_types


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a checkpoint tensor of a layer.

    Example: `Rows("linear_attn.in_proj_z.weight", first=256, count=256)`.
    """

    tensor: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of the gated delta net layers of a model."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    by_key_head: bool  # order of the checkpoint's input projections: Qwen3-Next's

    @property
    def key_size(self) -> int:
        """All query heads, and all key heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """All value heads, and all output gates."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """Queries, keys and values: the channels of the convolution, in order."""
        return self.key_size, self.key_size, self.value_size

    def projections(self) -> dict[str, tuple[int, ...]]:
        """Return the checkpoint's input projections: name -> rows of each part that TP cuts."""
        keys, values, heads = self.key_size, self.value_size, self.num_value_heads
        parts: dict[str, tuple[int, ...]] = (
            {"qkvz": (2 * keys + 2 * values,), "ba": (2 * heads,)}
            if self.by_key_head
            else {"qkv": self.conv_parts, "z": (values,), "b": (heads,), "a": (heads,)}
        )
        return {f"{BLOCK}in_proj_{name}.weight": rows for name, rows in parts.items()}

    def projection_rows(self, rank: int, size: int) -> Iterator[Rows]:
        """Yield the rows of Megatron's input projection on a TP rank, in its order."""
        if not self.by_key_head:
            for name, parts in self.projections().items():
                yield from share_of_parts(name, parts, rank, size)
            return
        groups = self.num_key_heads // size
        heads = range(rank * groups, (rank + 1) * groups)
        ratio = self.num_value_heads // self.num_key_heads
        key, value = self.key_head_dim, ratio * self.value_head_dim
        sizes = ((key, key, value, value), (ratio, ratio))
        for (name, (rows,)), of_head in zip(self.projections().items(), sizes, strict=True):
            first = 0
            for count in of_head:
                for head in heads:
                    yield Rows(name, head * (rows // self.num_key_heads) + first, count)
                first += count

    def convolution_rows(self, rank: int, size: int) -> Iterator[Rows]:
        """Yield the rows of Megatron's convolution on a TP rank, in its order."""
        yield from share_of_parts(CONVOLUTION, self.conv_parts, rank, size)


def share_of_parts(tensor: str, parts: tuple[int, ...], rank: int, size: int) -> Iterator[Rows]:
    """Yield a TP rank's rows of each of the stacked `parts` of a tensor."""
    first = 0
    for part in parts:
        count = part // size
        yield Rows(tensor, first + rank * count, count)
        first += part


def read_delta_net(fields: Fields, family: Family) -> DeltaNet | None:
    """Read the sizes; None for a family without such layers."""
    if family.delta_net is None:
        return None
    fields.get("mamba_ssm_dtype")  # vLLM's dtype for states between tokens, of no other effect
    delta_net = DeltaNet(
        num_key_heads=fields.count("linear_num_key_heads"),
        num_value_heads=fields.count("linear_num_value_heads"),
        key_head_dim=fields.count("linear_key_head_dim"),
        value_head_dim=fields.count("linear_value_head_dim"),
        conv_width=fields.count("linear_conv_kernel_dim"),
        by_key_head=family.delta_net == "by_key_head",
    )
    if delta_net.num_value_heads % delta_net.num_key_heads:
        raise fields.invalid(
            "linear_num_value_heads",
            delta_net.num_value_heads,
            f"a multiple of linear_num_key_heads, which is {delta_net.num_key_heads}",
        )
    return delta_net


def linear_layers(fields: Fields, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has a delta net instead of attention; () if none can."""
    if family.delta_net is None:
        return ()
    interval = fields.count("full_attention_interval", 4)
    every = [_LINEAR if (i + 1) % interval else _FULL for i in range(num_layers)]
    types = fields.get("layer_types", every)
    if len(types) != num_layers or not {*types} <= {_LINEAR, _FULL}:
        raise fields.invalid(
            "layer_types", types, f"a list of {num_layers} times '{_LINEAR}' or '{_FULL}'"
        )
    return tuple(kind == _LINEAR for kind in types)
