"""Layers of attention variants in the decoder block that mcore_rl and forks ask for.

Symptom: `--experimental-attention-variant gated_delta_net` has no effect on
`get_gpt_decoder_block_spec`, which builds attention in every layer. The function that builds the
variant asserts Transformer Engine.

Cause: Megatron's own builder of models decides between the two functions before it calls one. The
specs of variants were written for Transformer Engine's provider of layers, whose linear layer
contains the norm before it.

Why safe: without the flag nothing changes, and with Transformer Engine the layers are upstream's.
The local layers are those of Megatron's local spec: the norm is a layer of its own, stored under
the name that Transformer Engine's layers use, so that checkpoints do not differ.

Upstream: no issue; the variants are experimental.

Drop when: `get_gpt_decoder_block_spec` or `HybridModel` builds these layers without Transformer
Engine.

Versions: megatron-core 0.19 and 0.20; earlier ones have no `gated_delta_net` package.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from mcore_rl.patches.megatron.delta_net_norm import has_delta_net
from mcore_rl.patches.megatron.local_layers import DuplicatedLinear, LocalRMSNorm
from mcore_rl.patches.registry import Patch, require_parameters


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


def apply() -> None:
    """Build variants where they are asked for, and from local layers where these are."""
    _build_variants()
    _allow_local_layers()


def _build_variants() -> None:
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.models.gpt import gpt_layer_specs

    build = gpt_layer_specs.get_gpt_decoder_block_spec
    of_variant = specs.get_transformer_block_with_experimental_attention_variant_spec
    require_parameters(of_variant, "config vp_stage pp_rank")

    @functools.wraps(build)
    def build_block(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.experimental_attention_variant is None:
            return build(config, *args, **kwargs)
        stage = {name: kwargs.get(name) for name in ("vp_stage", "pp_rank")}
        return of_variant(config, **stage)

    gpt_layer_specs.get_gpt_decoder_block_spec = build_block


def _allow_local_layers() -> None:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    provider, delta_net = specs._get_backend_spec_provider, specs.get_gated_delta_net_module_spec
    attention = specs._get_self_attention_module_spec
    layers = specs.get_transformer_layer_with_experimental_attention_variant_spec
    for make in (provider, delta_net, attention, layers):
        require_parameters(make, "config" if make is provider else "config backend")

    class LocalProvider(LocalSpecProvider):
        def linear(self) -> Any:
            return DuplicatedLinear

        def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
            is_rms_norm = args[0] if args else kwargs.get("rms_norm", False)
            return LocalRMSNorm if is_rms_norm else LocalLayerNorm

    def is_local(config: Any) -> bool:
        return bool(config.transformer_impl == "local")

    @functools.wraps(provider)
    def make_provider(config: Any) -> Any:
        return LocalProvider() if is_local(config) else provider(config)

    @functools.wraps(delta_net)
    def make_delta_net(config: Any, backend: Any = None) -> Any:
        backend = backend or make_provider(config)
        spec: Any = delta_net(config, backend)
        if spec.submodules.in_proj is None:  # the backend has no layer that norms first
            spec.submodules.in_proj = backend.column_parallel_linear()
            spec.metainfo["fuse_input_layernorm"] = False
        return spec

    @functools.wraps(attention)
    def make_attention(config: Any, backend: Any = None) -> Any:
        return _local_attention(config) if is_local(config) else attention(config, backend)

    @functools.wraps(layers)
    def make_layers(config: Any, backend: Any = None) -> Any:
        made: Any = layers(config, backend)
        for layer in made if is_local(config) else ():
            layer.submodules.sharded_state_dict_keys_map = _fused_names(layer.submodules)
        return made

    specs._get_backend_spec_provider = make_provider
    specs.get_gated_delta_net_module_spec = make_delta_net
    specs._get_self_attention_module_spec = make_attention
    specs.get_transformer_layer_with_experimental_attention_variant_spec = make_layers


def _local_attention(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules

    spec = get_gpt_layer_local_submodules(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    ).self_attention
    spec.metainfo["fuse_input_layernorm"] = False
    return spec


def _fused_names(layer: Any) -> dict[str, str]:
    """Return the names under which Transformer Engine's layers store a layer's norms."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.transformer.mlp import MLP

    is_delta_net = layer.self_attention.module is GatedDeltaNet
    projection = "in_proj" if is_delta_net else "linear_qkv"
    names = {"input_layernorm.": f"self_attention.{projection}.layer_norm_"}
    if getattr(layer.mlp, "func", None) == MLP.as_mlp_submodule:  # experts norm before the router
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


PATCH = Patch(
    "megatron.attention_variant_spec",
    "the decoder block has the attention variant that flags name",
    apply,
    has_delta_net,
)
