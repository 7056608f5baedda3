"""The division of a step's samples, checked against ranks, micro-batches and the model's length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.batching.rows import chunks_of_sample, round_up
from mcore_rl.batching.shared_prompts import shares_prompts
from mcore_rl.common.errors import UsageError, as_flag
from mcore_rl.config import RLConfig
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, TrainLayout


def check_batches(
    config: RLConfig, layout: TrainLayout, layers: PipelineLayers, values: Mapping[str, Any]
) -> None:
    """Check that prompts x samples divide into mini-batches, DP ranks and micro-batches, and these
    into the groups of an interleaved schedule."""
    micro_batch_size = values["micro_batch_size"]
    if config.trainer.max_tokens_per_microbatch and micro_batch_size != 1:
        raise UsageError(
            "has no effect where samples are packed by --rl-max-tokens-per-microbatch "
            f"{config.trainer.max_tokens_per_microbatch}",
            flag=f"--micro-batch-size {micro_batch_size}",
            remedy="set it to 1, or the latter to 0",
        )
    shares_prompts(config.trainer.share_prompts, values, config.trainer.max_tokens_per_microbatch)
    if not config.trainer.max_tokens_per_microbatch:
        _check_padded_indexers(layout, values)
    samples = config.samples_per_step
    parts = config.trainer.num_mini_batches * layout.dp_size * micro_batch_size
    if parts < 1 or samples < 1 or samples % parts:
        raise UsageError(
            f"x {_samples_flag(config)} = {samples} samples do not divide into "
            f"--rl-num-mini-batches {config.trainer.num_mini_batches} x {layout.dp_size} "
            f"data-parallel ranks x --micro-batch-size {micro_batch_size} = {parts}",
            flag=f"--rl-num-prompts-per-step {config.trainer.num_prompts_per_step}",
            remedy="change one of them",
        )
    mini_batch = samples // config.trainer.num_mini_batches
    if values["global_batch_size"] != mini_batch:
        raise UsageError(
            f"contradicts the {mini_batch} samples of a mini-batch ({samples} samples / "
            f"--rl-num-mini-batches {config.trainer.num_mini_batches})",
            flag=f"--global-batch-size {values['global_batch_size']}",
            remedy="drop the flag, it is derived",
        )
    if layout.pp_size > 1 and len(layers[0]) > 1:
        _check_interleaving(config, layout, values, samples // parts)


def _samples_flag(config: RLConfig) -> str:
    """Return what sets the samples per prompt."""
    if config.has_groups_of_different_size:
        return f"the samples_per_prompt of sources, at most {config.samples_per_prompt},"
    return f"--rl-num-samples-per-prompt {config.samples_per_prompt}"


def _check_padded_indexers(layout: TrainLayout, values: Mapping[str, Any]) -> None:
    """Refuse what Megatron's sparse attention does wrong in padded rows.

    Its loss counts padding, and the choice that layers share is kept in the configuration, where
    another micro-batch of a pipeline replaces it before it is recomputed."""
    remedy = "give --rl-max-tokens-per-microbatch, which packs samples"
    if values.get("dsa_indexer_loss_coeff"):
        raise UsageError(
            "would count padding in the loss of indexers",
            flag=f"--dsa-indexer-loss-coeff {values['dsa_indexer_loss_coeff']}",
            remedy=remedy,
        )
    recompute, frequency = values.get("recompute_granularity"), values.get("dsa_indexer_topk_freq")
    if recompute and (frequency or 1) > 1 and layout.pp_size > 1:
        raise UsageError(
            "would recompute layers with the keys that an indexer chose for another micro-batch",
            flag=f"--recompute-granularity {recompute}",
            remedy=remedy,
        )


def _check_interleaving(
    config: RLConfig, layout: TrainLayout, values: Mapping[str, Any], num_micro_batches: int
) -> None:
    """Check the groups of micro-batches of virtual stages, where Megatron would crash otherwise.

    Groups must have PP micro-batches or more, at least one group is complete, and the rest is empty
    or at least PP. A mini-batch is one pass of `num_micro_batches`; the log-probs of a step are one
    pass over all its mini-batches. With packing, as many micro-batches are made as needed.
    """
    pp_size = layout.pp_size
    given = values.get("microbatch_group_size_per_vp_stage")
    group = pp_size if given is None else given
    flag = f"--microbatch-group-size-per-virtual-pipeline-stage {group}"
    stages = f"--pipeline-model-parallel-size {pp_size}"
    if group < pp_size:
        raise UsageError(
            f"is less than {stages}, and an interleaved schedule cannot take fewer micro-batches "
            "at a time than it has stages",
            flag=flag,
            remedy="raise or drop it",
        )
    if config.trainer.max_tokens_per_microbatch:
        return
    rule = f"a multiple of {stages}"
    if group != pp_size:
        rule = (
            f"{flag} or more, with none or at least {stages} left over by whole groups of {group}"
        )
    passes = {
        "mini-batch": num_micro_batches,
        "step": num_micro_batches * config.trainer.num_mini_batches,
    }
    for name, count in passes.items():
        if count < group or 0 < count % group < pp_size:
            raise UsageError(
                "interleaves the micro-batches of a data-parallel rank, whose number must be "
                f"{rule}, but --rl-num-prompts-per-step {config.trainer.num_prompts_per_step}, "
                f"{_samples_flag(config)}, --rl-num-mini-batches "
                f"{config.trainer.num_mini_batches}, {layout.dp_size} data-parallel ranks and "
                f"--micro-batch-size {values['micro_batch_size']} make {count} of a {name}",
                flag=_virtual_flag(values),
                remedy="change one of them, or pack samples by --rl-max-tokens-per-microbatch, "
                "which takes care of it",
            )


def _virtual_flag(values: Mapping[str, Any]) -> str:
    """Return the flag that sets virtual stages."""
    for dest in (
        "pipeline_model_parallel_layout",
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage",
    ):
        if values.get(dest):
            return as_flag(dest, values[dest])
    raise AssertionError("virtual stages without a flag that asks for them")


def longest_row(config: RLConfig, cp_size: int) -> int:
    """Return the tokens of the longest sample in a packed row, padded for context parallelism."""
    length = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return round_up(length, chunks_of_sample(cp_size))


def check_lengths(
    config: RLConfig, shape: ModelShape, *, cp_size: int = 1, scores_only: bool = False
) -> None:
    """Raise UsageError if prompt and response exceed the model's positions or a micro-batch."""
    length = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    second = f"--rl-max-response-tokens {config.rollout.max_response_tokens}"
    remedy = "one of them"
    if scores_only:
        second, remedy = "1 that vLLM adds when it scores", "it"
    lengths = f"--rl-max-prompt-tokens {config.data.max_prompt_tokens} + {second} = {length}"
    if length > shape.max_positions:
        raise UsageError(
            f"exceeds the checkpoint's max_position_embeddings {shape.max_positions}",
            flag=lengths,
            remedy=f"lower {remedy}",
        )
    in_row = longest_row(config, cp_size)
    if 0 < config.trainer.max_tokens_per_microbatch < in_row:
        padded = f", which --context-parallel-size {cp_size} pads to {in_row}"
        raise UsageError(
            f"is less than the longest sample, {lengths}{padded if in_row > length else ''}",
            flag=f"--rl-max-tokens-per-microbatch {config.trainer.max_tokens_per_microbatch}",
            remedy="raise it to that",
        )
