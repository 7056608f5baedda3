"""A transformer as Megatron's HybridModel, from the description that GPTModel takes.

HybridModel has two layers where GPTModel has one: attention with its norm, then MLP or experts with
theirs. Both halves get the number of the transformer layer that they are of. So everything that
goes by layers is as with GPTModel: windows and lists in the configuration, routers, and the names
in a checkpoint, which either class reads.

Import it on use: Megatron has HybridModel from 0.19 on.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.parallel_state import get_pipeline_model_parallel_rank
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from megatron.core.transformer.utils import sharded_state_dict_default

from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.hybrid_pattern import (
    DELTA_NET,
    LATENT_ATTENTION,
    SPARSE_ATTENTION,
    halves,
    hybrid_pattern,
    is_transformer,
    transformer_layers,
)
from mcore_rl.model.layout import PipelineLayers, layers_of_chunks
from mcore_rl.model.mamba import ATTENTION, DENSE, EXPERTS, MAMBA
from mcore_rl.patches.megatron import hybrid_checkpoints
from mcore_rl.patches.registry import apply_patch


class _HalfLayer:
    """A layer of HybridModel that has the number of its transformer layer."""

    has_transformer_number = True

    def __init__(self, *args: Any, layer_number: int, **kwargs: Any) -> None:
        number = (layer_number + 1) // 2
        super().__init__(*args, layer_number=number, **kwargs)  # type: ignore[call-arg]  # mixin


class AttentionLayer(_HalfLayer, TransformerLayer):
    """The first half of a transformer layer."""


class DenseLayer(_HalfLayer, MLPLayer):
    """The second half of a transformer layer without experts."""


class ExpertLayer(_HalfLayer, MoETransformerLayer):
    """The second half of a transformer layer with experts."""


class TransformerStack(HybridStack):
    """A stack of halves of transformer layers, stored under the names of GPTModel's layers."""

    is_stored_as_gpt = True
    num_transformer_layers: int  # of all stages

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the stack's tensors, for a checkpoint of either class."""
        tensors: dict[str, Any] = {}
        has_axis = not self.is_mtp_layer and _stores_layers_as_axis(self.config, metadata)
        layer: Any  # torch takes it for any module
        for index, layer in enumerate(self.layers):
            here = f"{prefix}layers.{index}."
            number = layer.layer_number - 1
            if not hasattr(layer, "has_transformer_number"):  # a fork's, numbered by position
                number //= 2
            offsets = [(0, number, self.num_transformer_layers)] if has_axis else []
            stored = layer.sharded_state_dict(here, offsets, metadata)
            name = f"{prefix}layers." if has_axis else f"{prefix}layers.{number}."
            if self.is_mtp_layer:
                name = prefix.replace("mtp_model_layer", "transformer_layer")
            replace_prefix_for_sharding(stored, here, name)
            tensors.update(stored)
        if hasattr(self, "final_norm"):
            here = f"{prefix}final_norm."
            stored = sharded_state_dict_default(
                self.final_norm, here, (), metadata, tp_group=self.tp_group
            )
            replace_prefix_for_sharding(stored, here, f"{prefix}final_layernorm.")
            tensors.update(stored)
        return tensors


def _stores_layers_as_axis(config: Any, metadata: dict[str, Any] | None) -> bool:
    """Return whether GPTModel stores a weight of all layers as one tensor, as its block decides."""
    frequencies = (config.moe_layer_freq, config.linear_attention_freq)
    are_alike = not any(isinstance(f, list) or (f is not None and f > 1) for f in frequencies)
    by_layer = ("non_homogeneous_layers", "singleton_local_shards")
    return (
        are_alike
        and not config.hetereogenous_dist_checkpoint
        and not any((metadata or {}).get(name) for name in by_layer)
    )


class _StoredAsGPT:
    """Mixin to place before HybridModel."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return this stage's tensors, for a checkpoint of either class."""
        tensors: dict[str, Any]
        tensors = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        tensors.pop(f"{prefix}output_layer._extra_state", None)  # empty; GPTModel leaves it out
        return tensors


@functools.cache
def _stored_as_gpt(base: type) -> type:
    return type(base.__name__, (_StoredAsGPT, base), {})


def store_as_gpt(model: Any) -> None:
    """Let checkpoints of a HybridModel, in place, fit GPTModel, if its layers are whole transformer
    layers in Megatron's own stack; others keep Megatron's names."""
    if type(model.decoder) is not HybridStack or not is_transformer(model.hybrid_layer_pattern):
        return
    apply_patch(hybrid_checkpoints.PATCH)
    base: Any = type(model)  # mypy: not Hashable
    model.__class__ = _stored_as_gpt(base)
    model.decoder.__class__ = TransformerStack
    model.decoder.num_transformer_layers = 1 + transformer_layers(model.hybrid_layer_pattern)[-1]
    if model.mtp_process:
        for layer in model.mtp.layers:
            layer.mtp_model_layer.__class__ = TransformerStack


def build_hybrid_model(
    args: argparse.Namespace,
    shape: ModelShape,
    config: Any,
    decoder_spec: Any,
    mtp_spec: Any,
    **common: Any,
) -> torch.nn.Module:
    """Build this stage of a HybridModel.

    `decoder_spec` and `mtp_spec` are those of GPTModel for this stage, `common` the arguments that
    both classes take."""
    layers = _layers_of_stages(config)
    here = layers[get_pipeline_model_parallel_rank()][common["vp_stage"] or 0]
    pairs = halves(shape)
    model: Any = HybridModel(
        config=_hybrid_config(config, len(pairs[0])),
        hybrid_stack_spec=_stack_spec(decoder_spec, mtp_spec, [pairs[layer] for layer in here]),
        hybrid_layer_pattern=hybrid_pattern(pairs, layers, config.mtp_num_layers or 0),
        **common,
    )
    if hasattr(model, "rotary_pos_emb") and args.position_embedding_type == "rope":
        model.rotary_pos_emb = _rotary_embedding(args, model)
    if model.mtp_process:
        for layer in model.mtp.layers:
            _recompute_once(layer, config.recompute_num_layers)
    store_as_gpt(model)
    built: torch.nn.Module = model
    return built


def _layers_of_stages(config: Any) -> PipelineLayers:
    """Return the layers of all stages and chunks, as Megatron divides them for GPTModel."""
    if layout := config.pipeline_model_parallel_layout:
        # Megatron's function would return this rank's number for every stage.
        stages = ((chunk.count(LayerType.decoder) for chunk in stage) for stage in layout.layout)
        return layers_of_chunks([list(stage) for stage in stages])
    chunks = config.virtual_pipeline_model_parallel_size
    counts = [
        [
            get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
            for chunk in (range(chunks) if chunks else (None,))
        ]
        for stage in range(config.pipeline_model_parallel_size)
    ]
    return layers_of_chunks(counts)


def _hybrid_config(config: Any, layers_each: int) -> Any:
    """Return the configuration as HybridModel is to read it, with `layers_each` for a layer."""
    config = copy.copy(config)
    # The pattern says which layers a stage has.
    config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
    config.mla_down_proj_fusion = False  # the specs are fused
    if config.recompute_num_layers is not None:
        config.recompute_num_layers *= layers_each
    return config


def _recompute_once(mtp_layer: Any, num_layers: int | None) -> None:
    """Let an MTP layer recompute itself, as in a GPTModel, and not its stack again within."""
    mtp_layer.config = copy.copy(mtp_layer.config)
    mtp_layer.config.recompute_num_layers = num_layers  # it accepts 1 only
    stack = mtp_layer.mtp_model_layer
    stack.config = copy.copy(stack.config)
    if stack.config.recompute_granularity == "full":
        stack.config.recompute_granularity = None


# The classes of the halves, and Megatron's names for their specs.
_LAYERS: dict[str, tuple[type, str]] = {
    ATTENTION: (AttentionLayer, "attention_layer"),
    LATENT_ATTENTION: (AttentionLayer, "mla_layer"),
    SPARSE_ATTENTION: (AttentionLayer, "dsa_layer"),
    DELTA_NET: (AttentionLayer, "gdn_layer"),
    DENSE: (DenseLayer, "mlp_layer"),
    EXPERTS: (ExpertLayer, "moe_layer"),
}
# The classes where a layer is one block.
_BLOCKS: dict[str, tuple[type, str]] = {
    ATTENTION: (TransformerLayer, "attention_layer"),
    DENSE: (MLPLayer, "mlp_layer"),
    EXPERTS: (MoETransformerLayer, "moe_layer"),
}


def _stack_spec(decoder_spec: Any, mtp_spec: Any, pairs: Sequence[str]) -> ModuleSpec:
    """Split the layers of GPTModel's block spec, whose `halves` are `pairs`."""
    kinds: dict[str, ModuleSpec] = {}
    for layer, pair in zip(decoder_spec.layer_specs, pairs, strict=True):
        whole = layer.submodules
        attention = dataclasses.replace(
            whole, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp
        )
        rest = dataclasses.replace(
            whole,
            input_layernorm=IdentityOp,
            self_attention=IdentityOp,
            self_attn_bda=IdentityFuncOp,
        )
        for symbol in pair:
            if symbol == MAMBA:
                kinds["mamba_layer"] = _mamba_spec(whole)
                continue
            module, name = (_LAYERS if len(pair) == 2 else _BLOCKS)[symbol]
            half = rest if symbol in (DENSE, EXPERTS) else attention
            kinds[name] = ModuleSpec(module=module, submodules=half)
    submodules = HybridStackSubmodules(mtp_block_spec=mtp_spec, **kinds)
    return ModuleSpec(module=HybridStack, submodules=submodules)


def _mamba_spec(transformer: Any) -> ModuleSpec:
    """Return the spec of a Mamba-2 layer with the norm and the linear layers of attention."""
    linear = transformer.self_attention.submodules
    mixer = MambaMixerSubmodules(in_proj=linear.linear_qkv, out_proj=linear.linear_proj)
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=transformer.input_layernorm,
            mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
            mamba_bda=transformer.self_attn_bda,
        ),
    )


def _rotary_embedding(args: argparse.Namespace, model: Any) -> RotaryEmbedding:
    """Return the rotary embedding of GPTModel; HybridModel's own cannot scale or interleave."""
    return RotaryEmbedding(
        kv_channels=model.config.kv_channels,
        rotary_percent=args.rotary_percent,
        rotary_interleaved=model.config.rotary_interleaved,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        use_cpu_initialization=model.config.use_cpu_initialization,
        cp_group=model.pg_collection.cp,
    )
