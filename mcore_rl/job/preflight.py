"""Everything a user can get wrong, checked on the host before any model is built.

Each check raises UsageError with one sentence. They read configuration and files only, so that the
whole takes seconds, and `mcore_rl.common.agreement` makes all ranks fail together. What Megatron
itself would refuse comes last: its own validation is run once beforehand.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_rl.algorithms.registry import import_user_file
from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import Platform
from mcore_rl.flags.allocator import check_allocator
from mcore_rl.flags.classes import (
    check_critic_rate,
    check_no_megatron_rl_flag,
    check_numbers,
    check_refused,
    given_to_fork,
    notes,
)
from mcore_rl.flags.derived import DerivedFlags, check_fits_machine, derive_flags
from mcore_rl.flags.fsdp import check_fsdp
from mcore_rl.flags.given import expand_config, given_values, import_given_files
from mcore_rl.flags.megatron_flags import SET_BY_VALIDATION
from mcore_rl.flags.options import (
    HELP_RL,
    ExtraArgs,
    RLConfig,
    add_rl_args,
    check_bounds,
    config_from,
    flag_of,
)
from mcore_rl.flags.packages import check_packages
from mcore_rl.flags.pages import help_text
from mcore_rl.flags.roles import CRITIC, REWARD, Roles, describe_ranks, parse_roles
from mcore_rl.flags.wandb import check_wandb
from mcore_rl.hybrid_engine.memory.offload import offload_kinds
from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.job.device import case_of_run, check_device, training_of
from mcore_rl.job.layout import (
    check_batches,
    check_layout,
    check_lengths,
    check_rollout,
    check_stages,
    note_on_experts,
)
from mcore_rl.job.validation import check_megatron_accepts
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.hf_checkpoint import EXPORT_MARKER, HFCheckpoint, open_checkpoint
from mcore_rl.megatron.policy_head import named_spec
from mcore_rl.megatron.version import check_megatron
from mcore_rl.model.config_json import ModelShape, megatron_flags, read_model_shape
from mcore_rl.model.families import family_of
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.planner.models import TrainedModel
from mcore_rl.roles.critic_startup import check_critic, check_critic_of_fork
from mcore_rl.roles.reward_model import check_reward_model, check_reward_model_flags
from mcore_rl.roles.value_startup import CheckedValueModel
from mcore_rl.roles.world import world_of_size

# What Megatron's own validation replaces by something of another form.
_REWRITTEN = frozenset({"vocab_size", "moe_layer_freq", "max_position_embeddings", "kv_channels"})

# Of what a fork has parsed by itself.
_OUTSIDE = "needs the command line, and arguments were parsed outside of mcore_rl"
_BY_US = "start by mcore_rl.initialize"


@dataclass(frozen=True, slots=True)
class Checked:
    """A command line that passed: what the run is made of, before Megatron starts."""

    config: RLConfig
    shape: ModelShape
    checkpoint: HFCheckpoint
    roles: Roles
    train_layout: TrainLayout  # of the actor's ranks
    layers: PipelineLayers
    rollout_layout: RolloutLayout
    derived: DerivedFlags
    tokens: tuple[str, ...]  # for Megatron's parser: derived flags, then the user's
    notes: tuple[str, ...]  # of flags that were given and do nothing
    save: str | None  # Megatron's --save
    critic: CheckedValueModel | None
    reward_model: CheckedValueModel | None
    trust_remote_code: bool


def make_parser(extra_args: ExtraArgs = add_rl_args) -> argparse.ArgumentParser:
    """Megatron's parser with the `--rl-*` flags and a fork's, able to print its help."""
    parser = megatron_adapter.make_parser(extra_args)
    for action in parser._actions:
        # One of Megatron's texts says "10%)", at which argparse raises.
        action.help = action.help and re.sub("%(?![%(])(?<!%%)", "%%", action.help)
    return parser


def check_command_line(
    tokens: Sequence[str],
    *,
    platform: Platform,
    scores_only: bool = False,
    extra_args: ExtraArgs = add_rl_args,
    device_bytes: Callable[[], int] | None = None,
) -> Checked:
    """Check the whole command line and everything it names but the prompts; see the module.

    With `scores_only`, prompts are scored and not answered: of --rl-max-response-tokens there is
    the one token left that vLLM generates whenever it scores. `extra_args` adds all flags that are
    not Megatron's own, ours among them. With `--help` or `--help-rl` it leaves with SystemExit,
    after rank 0 has printed the flags. `device_bytes`, which tells how large this rank's device is,
    is asked where there is CUDA, and late: the environment may be changed for it before.
    """
    if HELP_RL in tokens:
        import_given_files(tokens)
        if _rank() == 0:
            print(help_text(), end="")
        sys.exit(0)
    check_versions()
    import_given_files(tokens)  # which may bring flags
    parser = make_parser(extra_args)
    if {"-h", "--help"} & set(tokens):
        if _rank() == 0:
            parser.print_help()
        sys.exit(0)
    tokens = expand_config(tokens, parser)
    given = given_values(tokens, parser)
    check_no_megatron_rl_flag(given, parser)
    config = config_from(given)
    check_ranges(config)
    if scores_only:
        config = replace(config, max_response_tokens=1)
    shape, checkpoint = _check_by_themselves(config, given, scores_only=scores_only)
    derived = derive_flags(shape, config, given, parser=parser, platform=platform)
    values = {**given_values(derived.tokens, parser), **given}
    check_switches(values)
    if values.get("use_megatron_fsdp"):
        megatron_adapter.allow_many_queues()
    roles = parse_roles(
        int(os.environ.get("WORLD_SIZE", 1)), config.critic_ranks, config.reward_ranks
    )
    layout, layers, rollout = _check_together(config, shape, values, roles, platform)
    all_tokens = (*derived.tokens, *tokens)
    with world_of_size(len(roles.actor)):
        check_megatron_accepts(all_tokens, shape, extra_args=extra_args)
    critic, reward_model = (
        check(
            config,
            (shape, checkpoint),
            given,
            tokens,
            parser=parser,
            extra_args=extra_args,
            world_size=len(roles.ranks(role)),
            platform=platform,
        )
        for role, check in ((CRITIC, check_critic), (REWARD, check_reward_model))
    )
    may_lack: tuple[str, ...] = ()
    if platform.cuda and device_bytes is not None:
        case = case_of_run(
            config,
            values,
            (shape, layout, layers),
            rollout,
            _trained(critic, config, parser, roles),
            device_bytes=device_bytes(),
        )
        may_lack = () if case is None else check_device(case, scores_only=scores_only)
    return Checked(
        config=config,
        shape=shape,
        checkpoint=checkpoint,
        roles=roles,
        train_layout=layout,
        layers=layers,
        rollout_layout=rollout,
        derived=derived,
        tokens=all_tokens,
        notes=(
            *notes(given, megatron_adapter.make_parser()),  # none of a fork's flags
            *note_on_experts(config, Placement(shape, layout, layers, rollout)),
            *may_lack,
        ),
        save=given.get("save"),
        critic=critic,
        reward_model=reward_model,
        trust_remote_code=bool(values.get("trust_remote_code")),
    )


def _trained(
    critic: CheckedValueModel | None,
    config: RLConfig,
    parser: argparse.ArgumentParser,
    roles: Roles,
) -> TrainedModel | None:
    """The critic, as the planner sees it."""
    if critic is None or critic.tokens is None:
        return None
    values = given_values(critic.tokens, parser)
    layers = check_stages(critic.shape, critic.layout.pp_size, values)
    return TrainedModel(
        name=CRITIC,
        shape=critic.shape,
        train=critic.layout,
        layers=layers,
        training=training_of(config, values, critic.layout, layers),
        ranks=roles.critic,
    )


def _check_by_themselves(
    config: RLConfig, values: Mapping[str, Any], *, scores_only: bool = False
) -> tuple[ModelShape, HFCheckpoint]:
    """Our flags and the files they name, and Megatron's as far as they concern these."""
    check_reward_model_flags(config)
    check_outputs(config, values)
    check_wandb(values)
    shape, checkpoint = read_checkpoint(config)
    check_lengths(
        config, shape, cp_size=values.get("context_parallel_size", 1), scores_only=scores_only
    )
    return shape, checkpoint


def _check_together(
    config: RLConfig,
    shape: ModelShape,
    values: Mapping[str, Any],
    roles: Roles,
    platform: Platform,
) -> tuple[TrainLayout, PipelineLayers, RolloutLayout]:
    """All flags together: what the machine, the layouts and the batches allow."""
    check_critic_rate(config.critic_lr, values)
    if platform.cuda:
        check_allocator(os.environ)
    check_fsdp(values, os.environ, platform=platform)
    offload_kinds(config.offload, values, has_cuda=platform.cuda)
    layout = actor_layout(shape, values, roles)
    layers = check_stages(shape, layout.pp_size, values)
    rollout = check_rollout(config, shape, layout, layers, has_cuda=platform.cuda)
    check_batches(config, layout, values)
    return layout, layers, rollout


def actor_layout(shape: ModelShape, values: Mapping[str, Any], roles: Roles) -> TrainLayout:
    """`check_layout` of the actor's ranks; the error says so where others are of other roles."""
    try:
        return check_layout(shape, values, len(roles.actor))
    except UsageError as error:
        if len(roles.actor) == roles.world_size:
            raise
        raise UsageError(f"of the actor, on {describe_ranks(roles.actor)}: {error}") from error


def check_parsed_args(args: argparse.Namespace, *, platform: Platform) -> Checked:
    """The same checks for arguments that a fork has parsed with Megatron's parser.

    Nothing can be derived any more, so the architecture in `args` must be that of config.json:
    raises UsageError naming the first value that is not.
    """
    check_versions()
    config, values = RLConfig.from_args(args), vars(args)
    if args.rl_config is not None:
        raise UsageError(
            f"--rl-config {args.rl_config} {_OUTSIDE}, where it has no effect; {_BY_US}, or give "
            "the flags in it"
        )
    check_ranges(config)
    shape, checkpoint = _check_by_themselves(config, values)
    if config.reward_model is not None:
        raise UsageError(
            f"--rl-reward-model {config.reward_model} {_OUTSIDE}; {_BY_US}, or use a server "
            "(--rl-reward pooling)"
        )
    parser = make_parser()
    given = given_to_fork(args, parser)
    check_no_megatron_rl_flag(given, parser)
    wanted = given_values(megatron_flags(shape), parser)
    for dest, value in wanted.items():
        # validate_args rewrites some of these, so names are compared where values still tell.
        if dest not in _REWRITTEN and getattr(args, dest) != value:
            raise UsageError(
                f"the parsed {dest} is {getattr(args, dest)}, but config.json of "
                f"{config.hf_checkpoint} needs {value}; {_BY_US}, which derives it, or pass "
                f"{' '.join(megatron_flags(shape))}"
            )
    check_fits_machine(args, shape, given, parser=parser, platform=platform)
    check_switches({**values, **dict.fromkeys(SET_BY_VALIDATION)})
    roles = Roles(args.world_size)
    layout, layers, rollout = _check_together(config, shape, values, roles, platform)
    critic = check_critic_of_fork(config, (shape, checkpoint), layout)
    return Checked(
        config=config,
        shape=shape,
        checkpoint=checkpoint,
        roles=roles,
        train_layout=layout,
        layers=layers,
        rollout_layout=rollout,
        derived=DerivedFlags((), (), ()),
        tokens=(),
        notes=(
            *notes(given, parser),
            *note_on_experts(config, Placement(shape, layout, layers, rollout)),
        ),
        save=args.save,
        critic=critic,
        reward_model=None,
        trust_remote_code=args.trust_remote_code,
    )


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def check_versions() -> None:
    """Megatron, torch and vLLM must be there, and they and what else is, in versions that fit."""
    check_megatron()
    check_packages()


def check_ranges(config: RLConfig) -> None:
    """Each number by itself, and the parts of the algorithm together."""
    check_bounds(config)
    for path in config.import_:  # where a fork has parsed by itself
        import_user_file(path)
    recipe = config.recipe
    recipe.overlong_buffer(config.max_response_tokens)
    if config.reference_refresh_interval and not recipe.needs_reference:
        raise UsageError(
            f"--rl-reference-refresh-interval {config.reference_refresh_interval} has no effect "
            "without a KL to the reference; add --rl-kl-coef or --rl-kl-in-reward, or drop it"
        )


def check_outputs(config: RLConfig, values: Mapping[str, Any]) -> None:
    """What a run writes at its end must not fail then, nor replace what is there."""
    if _rank() == 0:  # nobody else writes there
        flag = f"--rl-run-dir {config.run_dir}" if config.run_dir else "--rl-run-name"
        _check_writable(config.directory, flag)
        for dest in ("wandb_save_dir", "tensorboard_dir"):
            if folder := values.get(dest):
                _check_writable(Path(folder), f"--{dest.replace('_', '-')} {folder}")
    if values.get("save"):
        _check_writable(Path(values["save"]), f"--save {values['save']}")
    if config.export_hf:
        _check_export(config, config.export_hf, goes_on=bool(values.get("load")))
    if config.verify_out:
        target, flag = Path(config.verify_out), f"--rl-verify-out {config.verify_out}"
        if target.is_dir() or not target.absolute().parent.is_dir():
            raise UsageError(f"{flag} must name a file in a folder that exists")
        _check_writable(target.absolute().parent, flag)


def _check_export(config: RLConfig, folder: str, *, goes_on: bool) -> None:
    """The folder must be new or empty, unless an export may be replaced by the run's own."""
    target, flag = Path(os.path.realpath(folder)), f"--rl-export-hf {folder}"
    for name in ("hf_checkpoint", "critic_init", "reward_model"):
        source = getattr(config, name)
        # What is replaced is deleted, with all that lies in it.
        if source is not None and Path(os.path.realpath(source)).is_relative_to(target):
            raise UsageError(
                f"{flag} would replace {flag_of(name)} {source}, which the run reads; name a new "
                "folder"
            )
    if os.path.ismount(target):
        raise UsageError(
            f"{flag} is a mount point, which nothing can take the place of; name a new folder in it"
        )
    is_empty = target.is_dir() and not any(target.iterdir())
    # A run that goes on may have been killed after its export.
    again = goes_on and (target / EXPORT_MARKER).is_file()
    if os.path.lexists(target) and not is_empty and not again:
        raise UsageError(
            f"{flag} is there already and would be replaced; remove it or name a new folder"
        )
    _check_writable(target.parent, flag)


def _check_writable(folder: Path, flag: str) -> None:
    """`folder` is one that can be written to, or can be made."""
    existing = folder.absolute()
    while not os.path.exists(existing):
        existing = existing.parent
    try:
        # Tried rather than asked: root may do everything but on a read-only file system.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UsageError(
            f"{flag}: nothing can be written in {existing} ({error.strerror}); choose another "
            "folder or give yourself the permission"
        ) from error


def read_checkpoint(config: RLConfig) -> tuple[ModelShape, HFCheckpoint]:
    """config.json and the headers of the weights, which must speak of the same model."""
    if config.hf_checkpoint is None:
        raise UsageError(
            "--rl-hf-checkpoint is missing; give the folder of the Hugging Face checkpoint to train"
        )
    folder = Path(config.hf_checkpoint)
    shape = read_model_shape(folder)
    checkpoint = open_checkpoint(folder, shape)
    for tensor, expected in _landmarks(shape):
        info = checkpoint.tensors.get(tensor)
        if info is None or info.shape != expected:
            held = f"has {tensor} of shape {list(info.shape)}" if info else f"lacks {tensor}"
            raise UsageError(
                f"--rl-hf-checkpoint {folder} {held}, but its config.json describes one of shape "
                f"{list(expected)}; they are of two models: copy the checkpoint again"
            )
    return shape, checkpoint


def _landmarks(shape: ModelShape) -> list[tuple[str, tuple[int, ...]]]:
    """A few tensors that tell by their shapes whether weights and config.json belong together."""
    hidden = shape.hidden_size
    tensors = [("model.embed_tokens.weight", (shape.vocab_size, hidden))]
    if not shape.tied_embeddings:
        tensors.append(("lm_head.weight", (shape.vocab_size, hidden)))
    for layer, is_moe in enumerate(shape.is_moe_layer):
        gate, width = "mlp.gate_proj.weight", shape.ffn_hidden_size
        if is_moe and shape.experts:
            names = family_of(shape.architecture).names
            gate = names.expert.format(expert=shape.experts.num_experts - 1) + names.gate
            width = shape.experts.hidden_size
        tensors.append((f"model.layers.{layer}.{gate}", (width, hidden)))
    return tensors


def check_switches(values: Mapping[str, Any]) -> None:
    """Megatron's flags that RL cannot honour, and numbers that nobody can."""
    check_refused(values)
    check_numbers(values)
    for dest in ("seed", "save_interval"):
        if values.get(dest) is not None and values[dest] < 1:
            flag = f"--{dest.replace('_', '-')}"
            raise UsageError(f"{flag} {values[dest]} must be at least 1; drop it or raise it")
    if values.get("spec"):
        named_spec(values["spec"])
    backend = getattr(values.get("attention_backend"), "name", None)
    by_engine = values.get("transformer_impl") != "local"
    if values.get("context_parallel_size", 1) > 1 and backend == "unfused" and by_engine:
        raise UsageError(
            f"--context-parallel-size {values['context_parallel_size']} is beyond Transformer "
            "Engine's --attention-backend unfused; give flash or fused, or drop one of the two"
        )
