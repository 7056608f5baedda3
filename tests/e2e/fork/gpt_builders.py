"""A fork's builder, of the signature that Megatron-LM's own has."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer.spec_utils import import_module
from megatron.training.arguments import core_transformer_config_from_args


def gpt_builder(args, pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    """A GPTModel from `--spec`, or from Megatron's own local layers as they come."""
    config = config or core_transformer_config_from_args(args)
    if args.spec is not None:
        spec = import_module(args.spec)
    elif args.num_experts:
        spec = get_gpt_decoder_block_spec(
            config, False, normalization=args.normalization, vp_stage=vp_stage
        )
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization=args.normalization
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
