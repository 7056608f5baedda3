"""A direct query projection in latent attention has no norm before it.

Symptom: DeepSeek-V2-Lite (`q_lora_rank` null) with `--qk-layernorm`, which its key/value latent
needs, cannot be built without Transformer Engine ("qk_layernorm requires TransformerEngine"). With
it, the query projection gets a norm that neither the architecture nor its checkpoints have.

Cause: `QKNormConfigResolver` norms both latents or none. Without a query latent it places the norm
before the projection of the hidden states, which are already normalised.

Why safe: only the case `q_lora_rank is None` changes, from a layer that fits no DeepSeek checkpoint
to the plain projection that the layer spec names.

Upstream: introduced with the resolver in 0.19; earlier releases built the plain projection.

Drop when: the resolver leaves a direct query projection alone.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from mcore_rl.patches.registry import Patch, require_parameters, require_source

_RESOLVER = "megatron.core.transformer.mla_qk_norm_config"


def needed() -> bool:
    """Return whether the resolver exists; the fault does not depend on the machine."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    if importlib.util.find_spec(_RESOLVER) is not None:
        return True
    require_source(
        MLASelfAttention.__init__, "self.linear_q_proj = build_module(submodules.linear_q_proj,"
    )
    return False


def apply() -> None:
    """Use the layer spec's projection for a direct query."""
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    resolve = QKNormConfigResolver._mla_fused_linear_or_default
    require_parameters(resolve, "self module_spec module_name")
    require_source(resolve, "self.fused_norm_linear_impl")

    def resolve_but_direct_query(self: Any, module_spec: Any, module_name: Any) -> Any:
        if module_name == "linear_q_proj":
            return self.submodules.linear_q_proj or self.linear_impl
        return resolve(self, module_spec, module_name)

    QKNormConfigResolver._mla_fused_linear_or_default = resolve_but_direct_query


PATCH = Patch(
    "megatron.mla_direct_query",
    "DeepSeek-V2-Lite's query projection has no norm of its own",
    apply,
    needed,
)
