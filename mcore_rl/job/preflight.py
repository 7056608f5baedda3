"""Single checks of a start: numbers, outputs, Megatron's switches.

Each raises UsageError. They read configuration and files only; `resolver` has the list of all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.algorithms.registry import find_advantage_estimator
from mcore_rl.common.errors import CORRECT, UsageError, as_flag, check_length, check_output_file
from mcore_rl.common.megatron_version import check_megatron
from mcore_rl.common.parameters import check_combinations
from mcore_rl.common.readers import parse_yaml
from mcore_rl.common.user_code import import_user_file
from mcore_rl.config import RLConfig, TrainerOptions
from mcore_rl.data.options import NO_CURRICULUM
from mcore_rl.data.sources import EVAL_PROMPTS, PROMPTS, check_lengths
from mcore_rl.flags.classes import check_numbers, check_order, check_refused
from mcore_rl.flags.packages import check_packages
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint
from mcore_rl.megatron.hf_files import EXPORT_MARKER, best_export
from mcore_rl.megatron.model_provider import named_spec
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.families import family_of
from mcore_rl.model.layout import PipelineLayers
from mcore_rl.model.quantization import FP8
from mcore_rl.model.tensors import mtp_tensors
from mcore_rl.moe.balance import check_bias_dtypes
from mcore_rl.moe.routing import OFF, R2
from mcore_rl.moe.routing_replay import replay_obstacle
from mcore_rl.rewards.functions import ENVIRONMENT

# numpy's limit is 32 bits; Megatron adds to the seed per pipeline stage and data-parallel rank.
_MOST_SEED = 4_000_000_000
# Flags with YAML files that Megatron reads without a check.
_YAML_FILES = ("nccl_communicator_config_path", "te_precision_config_file")


def check_versions() -> None:
    """Check that Megatron, torch, vLLM and other packages are installed in versions that fit."""
    check_megatron()
    check_packages()


def check_ranges(config: RLConfig) -> None:
    """Check which flags go together, and the parts of the algorithm."""
    check_combinations(config.values())
    for path in config.trainer.import_:  # for a fork that has parsed its arguments itself
        import_user_file(path)
    recipe = config.recipe
    recipe.overlong_buffer(config.rollout.max_response_tokens)
    if config.trainer.reference_refresh_interval and not recipe.needs_reference:
        raise UsageError(
            "has no effect without a KL to the reference",
            flag=f"--rl-reference-refresh-interval {config.trainer.reference_refresh_interval}",
            remedy="add --rl-kl-coef or --rl-kl-in-reward, or drop it",
        )
    if recipe.old_log_probs == "rollout" and config.trainer.routing_replay == R2:
        raise UsageError(
            "leaves out the scoring pass whose experts --rl-routing-replay r2 reuses",
            flag="--rl-old-log-probs rollout",
            remedy="drop one of the two, or replay those of the engine by r3",
        )
    config.rollout.check_unfinished()
    config.evaluation.check_samples()
    _check_first_finished(config)
    _check_sources(config)


def _check_sources(config: RLConfig) -> None:
    """Check the sources of prompts against the run's limits, and the curriculum."""
    data, limit = config.data, config.rollout.max_response_tokens
    for flag, value, sources in (
        (PROMPTS, data.prompts, data.train_sources() if data.prompts else ()),
        (EVAL_PROMPTS, data.eval_prompts, data.eval_sources()),
    ):
        check_lengths(
            sources,
            max_prompt_tokens=data.max_prompt_tokens,
            max_response_tokens=limit,
            given=f"{flag} {value}",
        )
        own = next((each.name for each in sources if each.max_response_tokens), None)
        if own is not None and config.recipe.overlong_buffer(limit):
            raise UsageError(
                f": source '{own}' has max_response_tokens, and the penalty of overlong responses "
                "knows one limit for all",
                flag=f"{flag} {value}",
                remedy="drop it, or give --rl-overlong-buffer-tokens 0",
            )
    _check_group_sizes(config)
    if data.curriculum == NO_CURRICULUM:
        return
    if config.rollout.samples_ahead:
        other = f"{config.rollout.separate} and --rl-max-staleness {config.rollout.staleness_limit}"
    elif config.rollout.keeps_unfinished:
        other = "--rl-partial-rollouts"
    else:
        return
    raise UsageError(
        f"cannot be combined with {other}: prompts of later steps are drawn before the outcome of "
        "earlier ones is known",
        flag=f"--rl-curriculum {data.curriculum}",
        remedy="drop one of them, or give --rl-max-staleness 0 to engines on ranks of their own",
    )


def _check_group_sizes(config: RLConfig) -> None:
    """Check sources with different numbers of samples per prompt: every step must have the same
    number of samples, and so the same draws."""
    num_samples = config.samples_per_step  # raises UsageError for shares that do not fit
    if not config.has_groups_of_different_size:
        return
    rollout, given = config.rollout, f"{PROMPTS} {config.data.prompts}"
    other, remedy = None, "drop that, or "
    if rollout.keeps_unfinished:
        other = "--rl-partial-rollouts"
    elif rollout.samples_ahead:
        other = f"{rollout.separate} (--rl-max-staleness {rollout.staleness_limit})"
        remedy = "" if rollout.servers else "give --rl-max-staleness 0, or "
    if other is not None:
        raise UsageError(
            f"has sources of different samples_per_prompt, and {other} trains on prompts that may "
            f"be of any source, so that steps would not all have {num_samples} samples",
            flag=given,
            remedy=f"{remedy}give all sources the same samples_per_prompt",
        )
    estimator = find_advantage_estimator(config.recipe.advantage)
    for source in config.data.train_sources():
        if estimator.compares_group and source.samples_per_prompt == 1:
            raise UsageError(
                f": samples_per_prompt 1 of source '{source.name}' leaves nothing to learn from, "
                f"because --rl-advantage {estimator.name} compares the responses to one prompt",
                flag=given,
                remedy="choose 2 or more",
            )


def _check_first_finished(config: RLConfig) -> None:
    """Check what groups that finish first in a step cannot be combined with."""
    recipe = config.recipe
    if not recipe.replaces_groups or not config.rewards.reward_model:
        return
    other = "--rl-dynamic-sampling"
    if not recipe.dynamic_sampling:
        other = f"--rl-group-filter {recipe.group_filter}"
    at_a_time = config.rollout.groups_at_a_time
    if at_a_time > 1.0:
        flag, remedy = f"--rl-oversample {at_a_time:g}", "drop one of the three"
    elif config.rollout.samples_ahead:  # by default
        flag = f"--rl-max-staleness {config.rollout.staleness_limit}"
        remedy = "give --rl-max-staleness 0, or drop either of the other two"
    else:
        return
    raise UsageError(
        f"cannot be combined with {other} and --rl-reward-model: a reward model scores when a "
        "step's groups are sampled, too late to replace a group",
        flag=flag,
        remedy=remedy,
    )


def check_environment_flags(config: RLConfig) -> None:
    """Check that `--rl-environment`, the flags of turns and its reward are given together."""
    rewards = config.reward_names
    if config.environments.environment is None and ENVIRONMENT in rewards:
        raise UsageError(
            f"names {ENVIRONMENT}, but --rl-environment is missing",
            flag=f"--rl-reward {','.join(rewards)}",
            remedy="give the environment whose rewards these are, or drop the name",
        )
    if config.environments.environment is not None and config.recipe.sampler is not None:
        raise UsageError(
            f"samples whole responses itself, and --rl-environment "
            f"{config.environments.environment} answers between the turns of a response",
            flag=f"--rl-sampler {config.recipe.sampler}",
            remedy="drop it",
        )
    config.environments.check(config.rollout.max_response_tokens)


def check_inputs(given: Mapping[str, Any]) -> None:
    """Check YAML files that Megatron reads when it starts or configures the model."""
    for dest in _YAML_FILES:
        if not (name := given.get(dest)):
            continue
        reason = "must be a YAML file with 'key: value' lines"
        try:
            values = parse_yaml(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            values, reason = None, f"cannot be read ({error.strerror})"
        except ValueError as error:
            values, reason = None, f"is not valid YAML ({' '.join(str(error).split())})"
        if not isinstance(values, dict):
            raise UsageError(reason, flag=as_flag(dest, name), remedy=CORRECT)


def check_outputs(config: RLConfig, given: Mapping[str, Any]) -> None:
    """Check that a run's final outputs can be written, and do not replace anything."""
    if int(os.environ.get("RANK", 0)) == 0:  # no other rank writes there
        flag = f"--rl-run-dir {config.run.run_dir}" if config.run.run_dir else "--rl-run-name"
        _check_writable(config.run.directory, flag)
        for dest in ("wandb_save_dir", "tensorboard_dir"):
            if folder := given.get(dest):
                _check_writable(Path(folder), as_flag(dest, folder))
    if given.get("save"):
        _check_writable(Path(given["save"]), f"--save {given['save']}")
    if export := config.trainer.export_hf:
        _check_export(config, export, resumes=bool(given.get("load")))
    if config.trainer.export_interval:
        _check_export_interval(config, resumes=bool(given.get("load")))
    if out := config.trainer.verify_out:
        check_output_file(Path(out), f"--rl-verify-out {out}")
        _check_writable(Path(out).absolute().parent, f"--rl-verify-out {out}")


def _check_export_interval(config: RLConfig, *, resumes: bool) -> None:
    """Check that the best export can be found, and written."""
    interval, every = config.trainer.export_interval, config.evaluation.eval_interval
    flag = f"--rl-export-interval {interval}"
    assert config.trainer.export_hf is not None, "declared as needed"
    if every and interval % every:
        raise UsageError(
            f"must be a multiple of --rl-eval-interval {every}, since the best export is the one "
            "with the best evaluation",
            flag=flag,
            remedy=f"give {-(-interval // every) * every}",
        )
    _check_export(config, str(best_export(config.trainer.export_hf)), resumes=resumes)


def _check_export(config: RLConfig, folder: str, *, resumes: bool) -> None:
    """Check that the folder is new or empty, or holds an export of this run."""
    target, flag = Path(os.path.realpath(folder)), f"--rl-export-hf {folder}"
    sources = {
        "--rl-hf-checkpoint": config.trainer.hf_checkpoint,
        "--rl-critic-init": config.critic.init,
        "--rl-reward-model": config.rewards.reward_model,
        **{each.flag: each.folder for each in config.teachers},
    }
    for name, source in sources.items():
        # Replacing deletes the folder with everything in it.
        if source is not None and Path(os.path.realpath(source)).is_relative_to(target):
            raise UsageError(
                f"would replace {name} {source}, which the run reads",
                flag=flag,
                remedy="name a new folder",
            )
    if os.path.ismount(target):
        raise UsageError(
            "is a mount point, which cannot be replaced",
            flag=flag,
            remedy="name a new folder in it",
        )
    check_length(target, flag)
    is_empty = target.is_dir() and not any(target.iterdir())
    # A resumed run may have been killed after its export.
    again = resumes and (target / EXPORT_MARKER).is_file()
    if os.path.lexists(target) and not is_empty and not again:
        raise UsageError(
            "exists and would be replaced",
            flag=flag,
            remedy="remove it or name a new folder",
        )
    _check_writable(target.parent, flag)


def check_export_dtype(options: TrainerOptions, checkpoint: HFCheckpoint) -> None:
    """Check that the checkpoint has FP8 blocks, if they are to be written."""
    if options.export_dtype != FP8:
        return
    flag = f"--rl-export-dtype {options.export_dtype}"
    if not checkpoint.float8:
        raise UsageError(
            "writes in FP8 blocks the weights that --rl-hf-checkpoint has in such blocks, and "
            f"{checkpoint.folder} has none",
            flag=flag,
            remedy="drop it, or start from the checkpoint as it was published in FP8",
        )


def _check_writable(folder: Path, flag: str) -> None:
    """Check that `folder` can be written to, or can be made."""
    check_length(folder, flag)
    existing = folder.absolute()
    while not os.path.exists(existing):
        existing = existing.parent
    try:
        # Try it, since permissions do not apply to root, except on a read-only file system.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UsageError(
            f": nothing can be written in {existing} ({error.strerror})",
            flag=flag,
            remedy="choose another folder or give yourself the permission",
        ) from error


def check_switches(given: Mapping[str, Any]) -> None:
    """Check single flags of Megatron: those that RL cannot honour, and impossible numbers."""
    check_refused(given)
    check_numbers(given)
    for dest in ("seed", "save_interval"):
        if given.get(dest) is not None and given[dest] < 1:
            flag = as_flag(dest, given[dest])
            raise UsageError("must be at least 1", flag=flag, remedy="drop it or raise it")
    if (given.get("seed") or 0) > _MOST_SEED:
        raise UsageError(
            f"must be at most {_MOST_SEED}", flag=f"--seed {given['seed']}", remedy="lower it"
        )
    if given.get("spec"):
        named_spec(given["spec"])


def check_indexer_loss(shape: ModelShape, values: Mapping[str, Any]) -> None:
    """Refuse the loss of indexers for a model that has none."""
    if values.get("dsa_indexer_loss_coeff") and shape.indexer is None:
        raise UsageError(
            f"trains the indexers of sparse attention, and {shape.architecture} has none",
            flag=f"--dsa-indexer-loss-coeff {values['dsa_indexer_loss_coeff']}",
            remedy="drop the flag",
        )


def check_routing(replay: str, shape: ModelShape, values: Mapping[str, Any]) -> None:
    """Check that experts can be replayed: the model has some, and all choices go through routers
    that accept given ones. `replay` is --rl-routing-replay."""
    flag = f"--rl-routing-replay {replay}"
    if replay == OFF:
        return
    if shape.experts is None:
        raise UsageError(
            f"is for models with experts, and {shape.architecture} of config.json has none",
            flag=flag,
            remedy="set it to off",
        )
    if against := replay_obstacle(values):
        raise UsageError(f"is not possible as {against}", flag=flag, remedy="drop one of the two")


def check_biases(checkpoint: HFCheckpoint, shape: ModelShape, values: Mapping[str, Any]) -> None:
    """Check that biases that updates change reach the engine unchanged."""
    if shape.experts is None or not shape.experts.has_bias:
        return
    name = family_of(shape.architecture).names.router_bias
    dtypes = {t: info.dtype for t, info in checkpoint.tensors.items() if t.endswith(name)}
    check_bias_dtypes(values, dtypes, checkpoint.folder)


def check_mtp(
    config: RLConfig, shape: ModelShape, layers: PipelineLayers, values: Mapping[str, Any]
) -> None:
    """Check that MTP layers to be trained exist, and that the other flags support it."""
    count = values.get("mtp_num_layers")
    if not count:
        return
    remedy = "drop it"
    if count > shape.num_mtp_layers:
        reason = (
            f"trains multi-token-prediction layers, of which config.json has "
            f"{shape.num_mtp_layers or 'none'} (num_nextn_predict_layers)"
        )
    elif not family_of(shape.architecture).has_drafter:
        reason = f"is not supported for model_type '{shape.architecture}'"
    elif not values.get("mtp_detach_heads"):
        reason = (
            "would train the policy by the loss of MTP layers without --mtp-detach-heads, which "
            "megatron-core has from 0.19 on"
        )
    elif against := _against_mtp(config, layers, values):
        reason = f"is not possible with {against}"
        if "m" in (values.get("pipeline_model_parallel_layout") or ""):
            remedy = "drop it and the m of the layout"
    else:
        return
    raise _cannot_train_mtp(reason, count, remedy)


def check_mtp_weights(
    shape: ModelShape, checkpoint: HFCheckpoint, values: Mapping[str, Any]
) -> None:
    """Check that MTP layers to be trained are in the checkpoint."""
    count = values.get("mtp_num_layers") or 0
    for name, spec in mtp_tensors(shape, count):
        stored = checkpoint.mtp.get(name)
        if stored is None or stored.shape != spec.shape:
            has = "lacks" if stored is None else f"has of shape {list(stored.shape)}"
            reason = f"trains {name} of shape {list(spec.shape)}, which {checkpoint.folder} {has}"
            raise _cannot_train_mtp(reason, count)


def _cannot_train_mtp(reason: str, count: int, remedy: str = "drop it") -> UsageError:
    return UsageError(
        reason,
        flag=f"--mtp-num-layers {count}",
        remedy=f"{remedy}; MTP layers are then carried as they are",
    )


def _against_mtp(config: RLConfig, layers: PipelineLayers, values: Mapping[str, Any]) -> str:
    """Return what rules out the training of MTP layers, or ""."""
    if (cp_size := values.get("context_parallel_size") or 1) > 1:
        return f"--context-parallel-size {cp_size}, as the next tokens are on other ranks"
    if len(layers[-1]) > 1:
        return "virtual pipeline stages, whose chunks Megatron builds without them"
    if values.get("pipeline_model_parallel_layout"):
        return "--pipeline-model-parallel-layout, as they follow the last decoder layer"
    if values.get("use_megatron_fsdp"):
        return "--use-megatron-fsdp, which would shard a second embedding"
    if values.get("overlap_grad_reduce") and len(layers) > 1:
        return "--overlap-grad-reduce, which waits for a gradient of their stage's embedding"
    if values.get("spec"):
        return f"--spec {' '.join(values['spec'])}, which does not describe them"
    if config.recipe.needs_critic:
        return f"--rl-advantage {config.recipe.advantage}, whose critic has none"
    if config.rewards.reward_model is not None:
        return f"--rl-reward-model {config.rewards.reward_model}, which has none"
    for teacher in config.teachers:
        if teacher.folder is not None:
            return f"{teacher.shown}, which is read without them"
    return ""


def check_together(values: Mapping[str, Any]) -> None:
    """Check combinations of Megatron's flags, including derived ones."""
    check_order(values)
    backend = getattr(values.get("attention_backend"), "name", None)
    by_engine = values.get("transformer_impl") != "local"
    if values.get("context_parallel_size", 1) > 1 and backend == "unfused" and by_engine:
        raise UsageError(
            "is not supported by Transformer Engine's --attention-backend unfused",
            flag=f"--context-parallel-size {values['context_parallel_size']}",
            remedy="give flash or fused, or drop one of the two",
        )
