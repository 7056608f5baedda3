"""The parser of the `--rl-*` flags next to Megatron's own."""

from __future__ import annotations

import argparse
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import ExtraArgs
from mcore_rl.config import flags, run_flags
from mcore_rl.flags.megatron_flags import SHARED_RL
from mcore_rl.flags.parsed_flags import add_negations, options_of

HELP_RL = "--help-rl"
GROUP = "mcore_rl"  # title of our flags' group in a parser


def add_rl_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--rl-*` flags to a parser, Megatron's or a fork's; return the parser.

    Raises UsageError if the parser already defines one of our flags, except for switches of
    Megatron's own RL with the same meaning.
    """
    taken = options_of(parser)
    group = parser.add_argument_group(title=GROUP)
    own = run_flags()
    for name, parameter in flags().items():
        flag, kind = parameter.flag, parameter.kind
        # A part of the algorithm that is not given comes from the recipe.
        default = parameter.default if name in own else None
        if flag in taken and taken[flag].dest in SHARED_RL:
            continue
        if flag in taken:
            raise UsageError(
                f"is already defined by this parser (as '{taken[flag].dest}') and mcore_rl needs "
                "the name",
                flag=flag,
                remedy="rename the other one",
            )
        options: dict[str, Any] = {"dest": f"rl_{name}", "help": parameter.help.replace("%", "%%")}
        if kind is bool and default is not False:
            options["default"] = default
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif kind is bool:
            group.add_argument(flag, action="store_true", **options)
        elif parameter.several:
            group.add_argument(flag, action="extend", nargs="+", type=kind, default=[], **options)
        else:
            group.add_argument(
                flag, type=kind, default=default, choices=parameter.choices, **options
            )
    group.add_argument(
        "--rl-config",
        dest="rl_config",
        default=None,
        help="YAML file of flags; given several times, the later file wins, key by key; false "
        "switches off what is on by default, as --no-X does for every switch X",
    )
    return parser


def with_rl_args(extra_args: ExtraArgs | None) -> ExtraArgs:
    """Return a function that adds to Megatron's parser a fork's flags, ours unless the fork has
    added them, and the negations of all switches."""

    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = parser if extra_args is None else extra_args(parser) or parser
        groups = {group.title: group for group in parser._action_groups}
        if GROUP not in groups:
            add_rl_args(parser)
            groups = {group.title: group for group in parser._action_groups}
        add_negations(parser, groups[GROUP])
        return parser

    return add


all_args: ExtraArgs = with_rl_args(None)
