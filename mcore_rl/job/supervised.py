"""Checks of supervised training: which flags have an effect, and what a step may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.common.errors import UsageError, as_flag
from mcore_rl.common.parameters import parameters_of
from mcore_rl.config import SECTIONS, RLConfig, run_flags
from mcore_rl.data.sources import EVAL_PROMPTS, PROMPTS, check_lengths, source_of_rows
from mcore_rl.model.layout import PipelineLayers, TrainLayout

# Sections, and flags of others, that supervised training reads.
_SECTIONS = ("trainer", "lora", "data", "run", "alarms")
_FLAGS = frozenset(
    "sft_loss_on sft_response_column sft_append_end max_response_tokens eval_interval "
    "num_eval_prompts ranks_per_node loss_aggregation loss_constant entropy_coef dpo_beta "
    "dpo_label_smoothing dpo_length_normalized".split()
)
# Flags of these sections that it does not read.
_UNREAD = frozenset(
    "routing_replay reference_refresh_interval answer_column curriculum num_logged_rollouts "
    "alarm_reward_std alarm_kl alarm_response_tokens alarm_clip_fraction alarm_mismatch "
    "alarm_tokens_per_second".split()
)
_UNREAD_BY_PAIRS = frozenset(
    "sft_loss_on sft_response_column eval_prompts eval_interval num_eval_prompts loss_aggregation "
    "loss_constant".split()
)
_OF_ESTIMATORS = {"demonstrations": "sft", "dpo": "dpo"}


def check_supervised(
    config: RLConfig, given: Mapping[str, Any], *, scores_only: bool = False
) -> None:
    """Refuse flags without effect, if the algorithm is supervised, and its flags, if not;
    `scores_only`: in mcore_rl.verify."""
    recipe, name = config.recipe, config.trainer.algorithm
    if recipe.is_supervised and scores_only:
        raise UsageError(
            "starts no engine, so that no hand-over can be verified",
            flag=f"--rl-algorithm {name}",
            remedy="drop it, which verifies the hand-over of a run that samples",
        )
    if not recipe.is_supervised:
        _check_reinforced(config, given)
        return
    read = _FLAGS | {p.name for title in _SECTIONS for p in parameters_of(SECTIONS[title])}
    unread = _UNREAD | (_UNREAD_BY_PAIRS if recipe.trains_on == "pairs" else frozenset())
    for dest, value in given.items():
        flag = dest.removeprefix("rl_")
        if not dest.startswith("rl_") or flag == "config" or flag in read - unread:
            continue
        known = run_flags().get(flag)
        if known is None or value != known.default:
            raise UsageError(
                f"has no effect with --rl-algorithm {name}, which trains on the rows of "
                "--rl-prompts without engines and rewards",
                flag=as_flag(dest, value),
                remedy="drop it",
            )
    for flag, path in ((PROMPTS, config.data.prompts), (EVAL_PROMPTS, config.data.eval_prompts)):
        if path is not None:
            source_of_rows(path, flag)
    updates = config.trainer.num_mini_batches, config.trainer.num_epochs
    if recipe.trains_on == "pairs" and updates != (1, 1):
        raise UsageError(
            f"and --rl-num-epochs {updates[1]} make several updates of a step, and the loss of "
            f"--rl-algorithm {name} compares the policy before the update with the reference",
            flag=f"--rl-num-mini-batches {updates[0]}",
            remedy="set both to 1, and lower --rl-num-prompts-per-step for smaller updates",
        )


def _check_reinforced(config: RLConfig, given: Mapping[str, Any]) -> None:
    algorithm = _OF_ESTIMATORS.get(config.recipe.advantage)
    if algorithm is not None:
        raise UsageError(
            "is for rows of a file, and this algorithm samples",
            flag=f"--rl-advantage {config.recipe.advantage}",
            remedy=f"give --rl-algorithm {algorithm}, or choose another",
        )
    options = config.supervised
    if options.demonstrations is None and options.coef:
        raise UsageError(
            "is the weight of demonstrations that are missing",
            flag=f"--rl-sft-coef {options.coef}",
            remedy="give their file as --rl-sft-demonstrations, or drop it",
        )
    if options.demonstrations is not None:
        if not options.coef:
            raise UsageError(
                "has no effect without a weight",
                flag=f"--rl-sft-demonstrations {options.demonstrations}",
                remedy="give for example --rl-sft-coef 0.1, or drop it",
            )
        _check_demonstrations(config, options.demonstrations)
        return
    for dest, value in given.items():
        if dest.startswith("rl_sft_") and value != run_flags()[dest.removeprefix("rl_")].default:
            raise UsageError(
                "has no effect, because nothing is learned from demonstrations",
                flag=as_flag(dest, value),
                remedy="give --rl-algorithm sft or --rl-sft-demonstrations, or drop it",
            )


def _check_demonstrations(config: RLConfig, path: str) -> None:
    flag = "--rl-sft-demonstrations"
    check_lengths(
        [source_of_rows(path, flag)],
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        given=f"{flag} {path}",
    )


def check_mixed_batches(
    config: RLConfig, layout: TrainLayout, layers: PipelineLayers, values: Mapping[str, Any]
) -> None:
    """Check that the rows of --rl-sft-demonstrations divide as the samples do."""
    options = config.supervised
    if options.demonstrations is None:
        return
    parts = config.trainer.num_mini_batches
    what = f"--rl-num-mini-batches {parts}"
    if not config.trainer.max_tokens_per_microbatch:
        size = values["micro_batch_size"]
        group = 1
        if len(layers[0]) > 1:
            group = values.get("microbatch_group_size_per_vp_stage") or layout.pp_size
        parts *= layout.dp_size * size * group
        what += f" x {layout.dp_size} data-parallel ranks x --micro-batch-size {size}"
        what += f" x {group} micro-batches at a time" if group > 1 else ""
    if options.rows_per_step % parts:
        raise UsageError(
            f"do not divide into {what} = {parts}",
            flag=f"--rl-sft-rows-per-step {options.rows_per_step}",
            remedy=f"choose a multiple of {parts}",
        )
