"""Sparse attention (DSA) can be built without Transformer Engine.

Symptom: the attention of DeepSeek-V3.2 and GLM-5 cannot be built from the local layers of
`attention_variant_spec`: `absorbed_mla.TELinear` is None.

Cause: attention compares the class of its down projections with Transformer Engine's, although it
and its indexer are plain torch.

Why safe: without Transformer Engine it could not be built. Attention, indexer and their torch path
stay upstream's. Parameter names and shapes are those of the Transformer Engine spec. The gradients
of the indexer are averaged over TP, as upstream marks them: each rank has the full sequence.

Upstream: no issue; the local spec is documented as for testing.

Drop when: `absorbed_mla` takes the class from its spec.

Versions: megatron-core 0.19 to 0.20. Earlier ones have another form of sparse attention, which
`mcore_rl` refuses.
"""

from __future__ import annotations

import importlib.util

from mcore_rl.patches.megatron.local_layers import DuplicatedLinear
from mcore_rl.patches.megatron.local_layers import needed as lacks_transformer_engine
from mcore_rl.patches.registry import Patch, require_source

_ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"


def needed() -> bool:
    """Return whether Transformer Engine is missing, and this Megatron has absorbed attention."""
    return lacks_transformer_engine() and importlib.util.find_spec(_ABSORBED) is not None


def apply() -> None:
    """Let the attention use the local layers that `attention_variant_spec` provides."""
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    require_source(
        absorbed_mla.AbsorbedMLASelfAttention.__init__,
        "if submodules.linear_q_down_proj in [TELinear]:",
    )
    absorbed_mla.TELinear = DuplicatedLinear


PATCH = Patch(
    "megatron.local_sparse_attention",
    "sparse attention can be built without Transformer Engine",
    apply,
    needed,
)
