"""The division of samples by the flags: into micro-batches, sequences and updates."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mcore_rl.batching.accounting import BatchAccounting, batch_accounting
from mcore_rl.batching.dealing import SampleFlops
from mcore_rl.batching.rows import MicroBatching, chunks_of_sample, round_up
from mcore_rl.batching.shared_prompts import shares_prompts
from mcore_rl.common.errors import UsageError
from mcore_rl.flags.options import RLConfig
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import TrainLayout


def micro_batching_of_args(
    config: RLConfig, shape: ModelShape, layout: TrainLayout, args: argparse.Namespace
) -> MicroBatching:
    """Return how samples become micro-batches of a model in its layout; `args` are Megatron's."""
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    return micro_batching_of(config, shape, layout, vars(args), interleaved=interleaved)


def micro_batching_of(
    config: RLConfig,
    shape: ModelShape,
    layout: TrainLayout,
    values: Mapping[str, Any],
    *,
    interleaved: bool,
) -> MicroBatching:
    """Return the same from Megatron's flags by destination, validated or not; `interleaved` says
    whether a pipeline stage has several model chunks."""
    group = values.get("microbatch_group_size_per_vp_stage") or layout.pp_size
    return MicroBatching(
        max_tokens=config.max_tokens_per_microbatch,
        micro_batch_size=values["micro_batch_size"],
        multiple_of=layout.tp_size * layout.cp_size,
        cp_size=layout.cp_size,
        same_length=layout.pp_size > 1,
        count_multiple_of=group if interleaved else 1,
        share_prompts=shares_prompts(
            config.share_prompts, values, config.max_tokens_per_microbatch
        ),
        cost=SampleFlops.of(shape),
    )


def accounting_of(
    config: RLConfig,
    *,
    actor: tuple[int, MicroBatching],
    critic: tuple[int, MicroBatching] | None,
) -> BatchAccounting:
    """Return the sequences, micro-batches and updates of the flags, given the data-parallel sizes
    and micro-batches of the trained models."""
    recipe = config.recipe
    return batch_accounting(
        num_prompts=config.num_prompts_per_step,
        samples_per_prompt=config.samples_per_prompt,
        num_mini_batches=config.num_mini_batches,
        num_epochs=config.num_epochs,
        num_steps=config.num_steps,
        max_sequence_tokens=config.max_prompt_tokens + config.max_response_tokens,
        actor=actor,
        critic=critic,
        critic_warmup_steps=config.critic_warmup_steps or 0,
        max_draws=1 + recipe.max_refills if recipe.dynamic_sampling else 1,
    )


def check_lengths(
    config: RLConfig, shape: ModelShape, *, cp_size: int = 1, scores_only: bool = False
) -> None:
    """Raise UsageError if prompt and response exceed the model's positions or a micro-batch."""
    length = config.max_prompt_tokens + config.max_response_tokens
    second = f"--rl-max-response-tokens {config.max_response_tokens}"
    remedy = "one of them"
    if scores_only:
        second, remedy = "1 that vLLM adds when it scores", "it"
    lengths = f"--rl-max-prompt-tokens {config.max_prompt_tokens} + {second} = {length}"
    if length > shape.max_positions:
        raise UsageError(
            f"exceeds the checkpoint's max_position_embeddings {shape.max_positions}",
            flag=lengths,
            remedy=f"lower {remedy}",
        )
    in_row = round_up(length, chunks_of_sample(cp_size))
    if 0 < config.max_tokens_per_microbatch < in_row:
        padded = f", which --context-parallel-size {cp_size} pads to {in_row}"
        raise UsageError(
            f"is less than the longest sample, {lengths}{padded if in_row > length else ''}",
            flag=f"--rl-max-tokens-per-microbatch {config.max_tokens_per_microbatch}",
            remedy="raise it to that",
        )
