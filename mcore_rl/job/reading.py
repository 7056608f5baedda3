"""The inputs of a job's checks: a command line, or the arguments that a fork has parsed."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import ExtraArgs
from mcore_rl.common.platform import Platform
from mcore_rl.config import RLConfig, frozen
from mcore_rl.flags.classes import check_no_megatron_rl_flag, given_to_fork
from mcore_rl.flags.derived import check_fits_machine
from mcore_rl.flags.pages import help_text
from mcore_rl.flags.parsed_flags import FlagNames, given_values, import_given_files
from mcore_rl.flags.parser import HELP_RL, all_args
from mcore_rl.job.preflight import check_versions
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, check_tensors, open_checkpoint
from mcore_rl.model.architecture_flags import megatron_flags
from mcore_rl.model.config_json import ModelShape, model_shape, read_config_json

# Reads a model's shape from a folder, given by a flag; see `read_shape_of`.
ReadShape = Callable[[str | None, str], ModelShape]

# Values that Megatron's own validation replaces by another form.
_REWRITTEN = frozenset({"vocab_size", "moe_layer_freq", "max_position_embeddings", "kv_channels"})
_OUTSIDE = "needs the command line, and arguments were parsed outside of mcore_rl"
_BY_US = "start by mcore_rl.initialize"


def make_parser(extra_args: ExtraArgs = all_args) -> argparse.ArgumentParser:
    """Return Megatron's parser with the `--rl-*` flags and a fork's, able to print its help."""
    parser = megatron_adapter.make_parser(extra_args)
    for action in parser._actions:
        # One of Megatron's help texts contains "10%)", which makes argparse raise.
        action.help = action.help and re.sub("%(?![%(])(?<!%%)", "%%", action.help)
    return parser


def asks_for_help(tokens: Sequence[str]) -> bool:
    """Return whether `answer_help` answers."""
    return bool({"-h", "--help", HELP_RL} & set(tokens))


def answer_help(tokens: Sequence[str], extra_args: ExtraArgs) -> None:
    """Exit after printing the flags, on rank 0, if `tokens` ask for them."""
    is_first = int(os.environ.get("RANK", 0)) == 0
    if HELP_RL in tokens:
        import_given_files(tokens)
        if is_first:
            print(help_text(), end="")
        sys.exit(0)
    if asks_for_help(tokens):
        check_versions()
        import_given_files(tokens)
        if is_first:
            make_parser(extra_args).print_help()
        sys.exit(0)


def given_in(tokens: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the given flags by destination; refuse flags of Megatron's own RL."""
    given = given_values(tokens, parser)
    check_no_megatron_rl_flag(given, parser)
    return given


def given_in_fork(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return what differs from Megatron's defaults and from ours."""
    given = given_to_fork(args, parser)
    check_no_megatron_rl_flag(given, parser)
    ours = {
        f"rl_{name}": value
        for name, value in RLConfig.from_args(args).as_dict().items()
        if value != frozen(parser.get_default(f"rl_{name}"))
    }
    return {**given, **ours}


def check_needs_no_command_line(args: argparse.Namespace, config: RLConfig) -> None:
    """Refuse flags that change Megatron's command line, which a fork has parsed already."""
    if args.rl_config is not None:
        raise UsageError(
            f"{_OUTSIDE}, where it has no effect",
            flag=f"--rl-config {args.rl_config}",
            remedy=f"{_BY_US}, or give the flags in it",
        )
    if config.rewards.reward_model is not None:
        raise UsageError(
            _OUTSIDE,
            flag=f"--rl-reward-model {config.rewards.reward_model}",
            remedy=f"{_BY_US}, or use a server (--rl-reward pooling)",
        )
    if config.trainer.layout == "auto":
        raise UsageError(_OUTSIDE, flag="--rl-layout auto", remedy=f"drop it, or {_BY_US}")
    critic = config.critic
    flags = {
        "--rl-critic-tp-size": critic.tp_size,
        "--rl-critic-pp-size": critic.pp_size,
        "--rl-critic-ep-size": critic.ep_size,
        "--rl-critic-ranks": critic.ranks,
        "--rl-teacher-tp-size": config.teacher.teacher_tp_size,
        "--rl-teacher-pp-size": config.teacher.teacher_pp_size,
        "--rl-teacher-ep-size": config.teacher.teacher_ep_size,
        "--rl-teacher-ranks": config.teacher.teacher_ranks,
        "--rl-rollout-ranks": config.rollout.rollout_ranks,
        "--rl-rollout-servers": config.rollout.rollout_servers,
    }
    for flag, value in flags.items():
        if value is not None:
            raise UsageError(_OUTSIDE, flag=f"{flag} {value}", remedy=f"drop it, or {_BY_US}")


def check_fork_fits(
    args: argparse.Namespace,
    shape: ModelShape,
    config: RLConfig,
    given: Mapping[str, Any],
    *,
    parser: argparse.ArgumentParser,
    platform: Platform,
) -> None:
    """Check that `args` have the flags that config.json and the machine need: it is too late to
    derive."""
    for dest, value in given_values(megatron_flags(shape), parser).items():
        # validate_args rewrites some of these: compare only destinations whose values are kept.
        if dest not in _REWRITTEN and getattr(args, dest) != value:
            raise UsageError(
                f"the parsed {dest} is {getattr(args, dest)}, but config.json of "
                f"{config.trainer.hf_checkpoint} needs {value}",
                remedy=f"{_BY_US}, which derives it, or pass {' '.join(megatron_flags(shape))}",
            )
    check_fits_machine(args, shape, given, parser=parser, platform=platform)


def flags_of(values: Mapping[str, Any], parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return values by the flags that set them, for display and comparison."""
    names = FlagNames(parser)
    return {names.get(dest, dest): str(value) for dest, value in values.items()}


def read_shape_of(folder: str | None, flag: str) -> ModelShape:
    """Read the shape from config.json of a checkpoint's folder, which `flag` names."""
    if folder is None:
        raise UsageError(
            "is missing",
            flag=flag,
            remedy="give the folder of the Hugging Face checkpoint to train",
        )
    values = read_config_json(Path(folder), flag=flag)  # of a folder, not of a file
    return model_shape(values, Path(folder) / "config.json", flag=flag)


def read_checkpoint(config: RLConfig, shape: ModelShape) -> HFCheckpoint:
    """Read the headers of the weights and compare them with the model of config.json."""
    assert config.trainer.hf_checkpoint is not None, "its config.json was read"
    folder = Path(config.trainer.hf_checkpoint)
    checkpoint = open_checkpoint(folder, shape)
    check_tensors(checkpoint, shape, flag="--rl-hf-checkpoint")
    return checkpoint
