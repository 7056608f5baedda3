"""Sparse attention (DSA, arXiv 2512.02556): its indexer, read from a config.json, for Megatron.

An indexer scores all earlier positions of a query; attention sees the best `topk` of them. A layer
without an indexer uses the choice of the last layer that has one (arXiv 2603.12201).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcore_rl.model.config_fields import Fields
from mcore_rl.model.layout import PipelineLayers

# The name that families fix; transformers has one value for each class.
ROPE_INTERLEAVED = "indexer_rope_interleave"
K_NORM_EPSILON = 1e-6  # in transformers and vLLM, whatever rms_norm_eps is
_KINDS = {"F": True, "S": False, "full": True, "shared": False}


@dataclass(frozen=True, slots=True)
class Indexer:
    """Sizes of the indexers, and which decoder layers have one.

    Example, GLM-5.2: `Indexer(32, 128, 2048, True, (True, True, True, False, False, False, True,
    ...))` has `first_shared` 3 and `frequency` 4.
    """

    num_heads: int
    head_dim: int
    topk: int
    rope_interleaved: bool
    in_layer: tuple[bool, ...]

    @property
    def first_shared(self) -> int:
        """Number of layers before the first one without an indexer."""
        return self.in_layer.index(False) if False in self.in_layer else len(self.in_layer)

    @property
    def frequency(self) -> int:
        """Distance between layers with an indexer, from the last one before `first_shared`."""
        rest = self.in_layer[self.first_shared :]
        if not rest:
            return 1
        return rest.index(True) + 1 if True in rest else len(rest) + 1

    @property
    def is_regular(self) -> bool:
        """Whether Megatron's two flags can describe `in_layer`."""
        offset = self.first_shared
        return offset > 0 and self.in_layer == tuple(
            max(number - offset, 0) % self.frequency == 0
            for number in range(1, len(self.in_layer) + 1)
        )

    def separated(self, layers: PipelineLayers) -> int | None:
        """Return a layer whose keys a layer in another chunk chooses, or None."""
        chunks = (chunk for stage in layers for chunk in stage)
        apart = (n for chunk in chunks for n in chunk if self.source_of(n) not in chunk)
        return next(apart, None)

    def source_of(self, layer: int) -> int:
        """Return the layer whose choice a layer uses."""
        return max(i for i in range(layer + 1) if self.in_layer[i])


def read_indexer(fields: Fields, rope_interleaved: bool, num_layers: int) -> Indexer:
    """Read the indexer's fields; raise UsageError for layers that Megatron cannot build."""
    types = fields.get("layer_types", ["indexed_attention"] * num_layers)
    if types != ["indexed_attention"] * num_layers:
        raise fields.refuse("layer_types other than indexed_attention")
    indexer = Indexer(
        num_heads=fields.count("index_n_heads"),
        head_dim=fields.count("index_head_dim"),
        topk=fields.count("index_topk"),
        rope_interleaved=rope_interleaved,
        in_layer=_layers_with_indexer(fields, num_layers),
    )
    if not indexer.is_regular:
        raise fields.refuse(
            "indexers in layers that do not follow each other at one distance (Megatron has "
            "--dsa-indexer-topk-freq and --dsa-indexer-skip-topk-offset)"
        )
    return indexer


def _layers_with_indexer(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has an indexer: by indexer_types, which transformers reads,
    or by index_topk_pattern, index_topk_freq and index_skip_topk_offset, which vLLM reads too."""
    frequency = fields.count("index_topk_freq", 1)
    offset = fields.count("index_skip_topk_offset", 2, least=0)
    by_frequency = tuple(max(i - offset + 1, 0) % frequency == 0 for i in range(num_layers))
    given = [
        (name, _read_pattern(fields, name, num_layers))
        for name in ("index_topk_pattern", "indexer_types")
        if fields.get(name) is not None
    ]
    if frequency > 1:
        given.append(("index_topk_freq", by_frequency))
    for name, layers in given[1:]:
        if layers != given[0][1]:
            raise fields.refuse(f"other layers with an indexer by {name} than by {given[0][0]}")
    return given[0][1] if given else by_frequency


def _read_pattern(fields: Fields, name: str, num_layers: int) -> tuple[bool, ...]:
    pattern = fields[name]
    known = isinstance(pattern, (str, list)) and all(
        isinstance(kind, str) and kind in _KINDS for kind in pattern
    )
    if not known or len(pattern) != num_layers:
        raise fields.invalid(name, pattern, f"{num_layers} of {', '.join(_KINDS)}")
    return tuple(_KINDS[kind] for kind in pattern)


def sparse_attention_flags(indexer: Indexer) -> dict[str, Any]:
    """Return the architecture as Megatron's flags; True: without a value, None: left out."""
    shares = indexer.frequency > 1
    return {
        "--experimental-attention-variant": "dsa",
        "--dsa-indexer-n-heads": indexer.num_heads,
        "--dsa-indexer-head-dim": indexer.head_dim,
        "--dsa-indexer-topk": indexer.topk,
        "--dsa-indexer-topk-freq": indexer.frequency if shares else None,
        "--dsa-indexer-skip-topk-offset": indexer.first_shared if shares else None,
        "--dsa-indexer-rope-interleaved": indexer.rope_interleaved,
        "--dsa-indexer-k-norm-epsilon": K_NORM_EPSILON,
        # Orthogonal, so that scores stay: transformers and vLLM leave it out.
        "--no-dsa-indexer-rotate-activation": True,
    }
