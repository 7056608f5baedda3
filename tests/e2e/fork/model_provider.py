"""A fork's provider, of the signature that Megatron-LM's own has."""

from __future__ import annotations

from megatron.training import get_args


def model_provider(
    model_builder,
    pre_process=True,
    post_process=True,
    vp_stage=None,
    config=None,
    pg_collection=None,
):
    """What the builder makes of Megatron's arguments."""
    args = get_args()
    return model_builder(args, pre_process, post_process, vp_stage, config, pg_collection)
