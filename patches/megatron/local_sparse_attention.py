"""Sparse attention (DSA) can be built without Transformer Engine.

Symptom: with `--experimental-attention-variant dsa --transformer-impl local` the block spec raises
("only supports transformer engine implementation for now"). With local layers the attention of
DeepSeek-V3.2 and GLM-5 could not be built either: `absorbed_mla.TELinear` is None, and the norm of
the indexer's keys is refused under sequence parallelism.

Cause: the function that chooses the layers of the spec knows Transformer Engine only, although the
specs take any, and attention and indexer are plain torch.

Why safe: only `--transformer-impl local` gets these layers; it raised before. Attention, indexer
and their torch path stay upstream's. Parameter names and shapes are those of the Transformer Engine
spec. The gradients of the indexer are averaged over TP, as upstream marks them: each rank has the
full sequence.

Upstream: no issue; the local spec is documented as for testing.

Drop when: `_get_backend_spec_provider` supports local layers.

Versions: megatron-core 0.19 to 0.20. Earlier ones have another form of sparse attention, which
`mcore_rl` refuses.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

from mcore_rl.patches.megatron.local_layers import DuplicatedLinear, LocalRMSNorm
from mcore_rl.patches.megatron.local_layers import needed as lacks_transformer_engine
from mcore_rl.patches.registry import Patch, require_parameters, require_source

_SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
_ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"


class LocalLayerNorm(torch.nn.Module):
    """LayerNorm (arXiv 1607.06450) of the last dimension, in float32.

    `weight` and `bias` `[hidden_size]` are replicated over TP. Under sequence parallelism the input
    is the full sequence, as the indexer's is.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`."""
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)


def needed() -> bool:
    """Return whether Transformer Engine is missing, and this Megatron has absorbed attention."""
    return lacks_transformer_engine() and importlib.util.find_spec(_ABSORBED) is not None


def apply() -> None:
    """Let the specs of attention variants use local layers."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    choose = specs._get_backend_spec_provider
    require_parameters(choose, "config")
    require_source(
        absorbed_mla.AbsorbedMLASelfAttention.__init__,
        "if submodules.linear_q_down_proj in [TELinear]:",
    )

    class LocalProvider(LocalSpecProvider):
        def linear(self) -> Any:
            return DuplicatedLinear

        def layer_norm(self, rms_norm: bool = False, **unused: Any) -> Any:
            return LocalRMSNorm if rms_norm else LocalLayerNorm

    @functools.wraps(choose)
    def choose_or_local(config: Any) -> Any:
        return LocalProvider() if config.transformer_impl == "local" else choose(config)

    specs._get_backend_spec_provider = choose_or_local
    absorbed_mla.TELinear = DuplicatedLinear


PATCH = Patch(
    "megatron.local_sparse_attention",
    "sparse attention can be built without Transformer Engine",
    apply,
    needed,
)
