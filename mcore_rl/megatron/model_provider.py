"""Megatron's `model_provider` for a checkpoint: a GPTModel or a HybridModel from one description.

The description is the spec of the decoder layers on this pipeline stage, Megatron's configuration
and arguments, and the checkpoint's shape. `hybrid_model` splits the layers for HybridModel.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from mcore_rl.common.errors import UsageError
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.model_class import AUTO, HYBRID, choose_model_class
from mcore_rl.megatron.projection_norms import set_projection_norms
from mcore_rl.model.config_json import ModelShape


def named_spec(spec: Sequence[str]) -> Any:
    """Import the object of `--spec MODULE NAME`: a layer or block spec, or a function making one.

    Raises UsageError if there are not two names, the import fails, or it is a function and this
    Megatron lacks the configuration to call it with.
    """
    flag = f"--spec {' '.join(spec)}"
    if len(spec) != 2:
        raise UsageError(
            "must be a module and a name in it", flag=flag, remedy="correct it or drop the flag"
        )
    try:
        named = getattr(importlib.import_module(spec[0]), spec[1])
    except Exception as error:  # the module may raise anything
        raise UsageError(
            f"cannot be imported ({type(error).__name__}: {error})",
            flag=flag,
            remedy="correct it, or put the module's folder on PYTHONPATH",
        ) from error
    from megatron.training import argument_utils

    is_function = callable(named) and not isinstance(named, ModuleSpec)
    if is_function and not hasattr(argument_utils, "gpt_config_from_args"):
        raise UsageError(
            "is a function, which Megatron calls from 0.19 on only",
            flag=flag,
            remedy="name a ModuleSpec, or install megatron-core 0.19 or later",
        )
    return named


def _layer_spec(args: argparse.Namespace, config: Any, vp_stage: int | None) -> Any:
    """Return the spec of `--spec`, used as Megatron's GPT builder uses it, or the default."""
    if not args.spec:
        return megatron_adapter.block_spec(config, vp_stage)
    spec = named_spec(args.spec)
    if isinstance(spec, ModuleSpec) or not callable(spec):
        return spec
    from megatron.training.argument_utils import gpt_config_from_args  # as `named_spec` checked

    stage = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(spec).parameters else {}
    return spec(gpt_config_from_args(args, config), **stage)


def make_actor_provider(
    args: argparse.Namespace, shape: ModelShape, requested_class: str = AUTO
) -> Any:
    """Return Megatron's `model_provider` for a checkpoint of this shape.

    `requested_class` is `--rl-model-class`.
    """
    chosen = choose_model_class(requested_class, vars(args), has_mamba=shape.mamba is not None)

    def provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> torch.nn.Module:
        config = config or megatron_adapter.transformer_config(args)
        spec = _layer_spec(args, config, vp_stage)
        if shape.norms_whole_projection and not args.spec:
            set_projection_norms(spec)
        model = _built(
            args,
            shape,
            chosen.name,
            config=config,
            decoder_spec=spec,
            mtp_spec=_mtp_block_spec(config, spec, vp_stage),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        )
        for name, parameter in model.named_parameters():
            if name.endswith("softmax_offset"):
                # Transformer Engine does not set it. Without it only the first rank's gradient
                # would count in the norm, though each rank has its own heads.
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # Megatron's
        return model

    return provider


def _built(
    args: argparse.Namespace,
    shape: ModelShape,
    name: str,
    *,
    config: Any,
    decoder_spec: Any,
    mtp_spec: Any,
    **stage: Any,
) -> torch.nn.Module:
    """Build the class `name`; the specs describe this stage's layers, `stage` is its place."""
    common: dict[str, Any] = {
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "parallel_output": True,
        "share_embeddings_and_output_weights": shape.tied_embeddings,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        **stage,
    }
    # Imported on use: Megatron up to 0.18 lacks HybridModel, and a later one will lack GPTModel.
    if name == HYBRID:
        from mcore_rl.megatron.hybrid_model import build_hybrid_model

        return build_hybrid_model(args, shape, config, decoder_spec, mtp_spec, **common)
    from megatron.core.models.gpt import GPTModel

    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec,
        mtp_block_spec=mtp_spec,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        **common,
    )
    return model


def as_in_checkpoints(model: torch.nn.Module) -> torch.nn.Module:
    """Let checkpoints of a model, a fork's too, fit both classes where they can; in place."""
    if hasattr(model, "hybrid_layer_pattern"):
        from mcore_rl.megatron.hybrid_model import store_as_gpt  # as in `_built`

        store_as_gpt(model)
    return model


def _mtp_block_spec(config: Any, decoder_spec: Any, vp_stage: int | None) -> Any:
    """Return the spec of this stage's MTP layers, made like its last decoder layer, or None.

    `decoder_spec` comes from `megatron_adapter.block_spec`.
    """
    if not config.mtp_num_layers:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    return get_gpt_mtp_block_spec(
        config,
        decoder_spec,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        vp_stage=vp_stage,
    )
