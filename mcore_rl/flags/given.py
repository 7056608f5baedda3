"""What a command line gives: the flags of YAML files, and which flags were given at all."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.algorithms.registry import import_user_file
from mcore_rl.common.errors import UsageError


def expand_config(
    tokens: Sequence[str],
    parser: argparse.ArgumentParser,
    *,
    refused: Callable[[UsageError], None] | None = None,
) -> list[str]:
    """Replace every `--rl-config FILE` by the flags in the files, put before all others.

    Keys are flag names, with or without the leading dashes, with `-` or `_`. Where several files
    have a key the last one counts, so that `false` or an empty value takes back what an earlier one
    said. Raises UsageError for a missing file, what is not a mapping, and an unknown key (naming
    the nearest known one). With `refused`, what is wrong in a file is told to it and left out.
    """

    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--rl-config", action="append", default=[])
    found, rest = parse_known(finder, tokens)
    flags: dict[str, list[str]] = {}
    for path in found.rl_config:
        for flag, tokens_of_flag in _read_config(Path(path), parser, refused).items():
            # Last, as argparse has it: there are flags that undo each other.
            flags.pop(flag, None)
            flags[flag] = tokens_of_flag
    return [token for tokens_of_flag in flags.values() for token in tokens_of_flag] + rest


def import_given_files(
    tokens: Sequence[str], *, refused: Callable[[UsageError], None] | None = None
) -> None:
    """Run the files of every `--rl-import`, also of one that stands in a file of `--rl-config`.

    What they register may bring flags, so this comes before a parser is made. UsageError: a file
    that cannot be used; with `refused` that is told, and the next file is run. What is wrong
    besides is left to those who read all flags.
    """

    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--rl-import", nargs="+", action="extend", default=[])
    try:
        expanded = expand_config(tokens, finder, refused=lambda error: None)
        paths = parse_known(finder, expanded)[0].rl_import
    except UsageError:
        return
    for path in paths:
        try:
            import_user_file(path)
        except UsageError as error:
            if refused is None:
                raise
            refused(error)


def _read_config(
    path: Path,
    parser: argparse.ArgumentParser,
    refused: Callable[[UsageError], None] | None,
) -> dict[str, list[str]]:
    """One file of `--rl-config`: the flag of each key under its first name, and its tokens."""

    def refuse(error: UsageError) -> None:
        if refused is None:
            raise error
        refused(error)

    try:
        values = _mapping_in(path)
    except UsageError as error:
        refuse(error)
        return {}
    flags: dict[str, list[str]] = {}
    for key, value in values.items():
        try:
            action, tokens = _tokens_of(str(key), value, parser, path)
        except UsageError as error:
            refuse(error)
            continue
        flags[action.option_strings[0]] = tokens
    return flags


def _mapping_in(path: Path) -> dict[Any, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(
            f"cannot be read: {reason}", flag=f"--rl-config {path}", remedy="correct the path"
        ) from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"is not valid YAML: {reason}", flag=f"--rl-config {path}", remedy="correct it there"
        ) from error
    if not isinstance(values, dict):
        raise UsageError(
            "must hold 'flag: value' lines, not a list or a text",
            flag=f"--rl-config {path}",
            remedy="write it so",
        )
    return values


def _tokens_of(
    key: str, value: Any, parser: argparse.ArgumentParser, path: Path
) -> tuple[argparse.Action, list[str]]:
    flags = parser._option_string_actions
    flag = "--" + key.lstrip("-")
    if flag not in flags:  # some of Megatron's do have a "_"
        flag = flag.replace("_", "-")
    action = flags.get(flag)
    if action is None:
        raise UsageError(
            f": unknown key '{key}'",
            flag=f"--rl-config {path}",
            remedy=_suggestion(flag, parser),
        )
    if action.dest == "rl_config":
        raise UsageError(
            "cannot name another file", flag=f"--rl-config {path}", remedy="give the flag twice"
        )
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(
                f": '{key}' is a switch",
                flag=f"--rl-config {path}",
                remedy="its value is true or false",
            )
        if isinstance(action, argparse.BooleanOptionalAction) and not value:
            return action, [option for option in action.option_strings if option != flag]
        return action, [flag] if value else []
    if value is None or value == []:
        return action, []
    if isinstance(value, list) and not action.nargs:
        return action, [flag, str(value).replace(" ", "")]  # as Megatron's patterns are written
    if not action.nargs and str(value).startswith("-"):  # not to be taken for a flag
        return action, [f"{flag}={value}"]
    return action, [flag, *(str(v) for v in (value if isinstance(value, list) else [value]))]


def as_config(tokens: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The flags of `tokens` as a file of `--rl-config` holds them: key -> value, in their order.

    Such a file, given in the place of these tokens, is read as they are. `tokens` have been read by
    `parser` before, `--rl-config` is expanded in them.
    """
    recorder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config: dict[str, Any] = {}
    for action in parser._actions:
        if action.option_strings and not isinstance(action, argparse._HelpAction):
            recorder.add_argument(
                *action.option_strings,
                dest="config",
                action=_Recorded,
                nargs=action.nargs,
                metavar="VALUE",
                flag=action,
            )
    recorder.parse_args(list(tokens), argparse.Namespace(config=config))
    return config


class _Recorded(argparse.Action):
    """Notes that a flag stands there and the text of its value, before anything is made of it."""

    def __init__(self, *, flag: argparse.Action, **options: Any) -> None:
        super().__init__(**options)
        self._flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        assert option is not None, "a flag is an option"
        config, key = namespace.config, option.lstrip("-")
        texts = [_typed(text) for text in values] if isinstance(values, list) else _typed(values)
        if isinstance(self._flag, argparse.BooleanOptionalAction):
            on = self._flag.option_strings[0]
            key, texts = on.lstrip("-"), option == on
        elif self.nargs == 0:
            texts = True
        elif isinstance(self._flag, argparse._ExtendAction):
            texts = config.get(key, []) + texts
        config.pop(key, None)  # the last one counts, and stands where it was said
        config[key] = texts


def _typed(text: str) -> int | float | str:
    """A number where that is written as `text` is again, else the text."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text and math.isfinite(number):
            return number
    return text


def _suggestion(flag: str, parser: argparse.ArgumentParser) -> str:
    near = difflib.get_close_matches(flag, list(parser._option_string_actions), n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else "see --help for the known flags"


def given_values(tokens: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """dest -> value of the flags that `tokens` set, without any default.

    From here on the errors of `parser` are UsageErrors and none of its flags is required; it may be
    given here again. Raises UsageError for unknown flags (naming the nearest known one) and values
    that do not fit their flag.
    """

    for action in parser._actions:
        action.required = False
        if action.type is not None and not isinstance(action.type, _Conversion):
            action.type = _Conversion(action.type)
    values, unknown = parse_known(parser, tokens, _Given())
    for token in unknown:
        if token.startswith("--"):
            flag = token.split("=")[0]
            raise UsageError("unknown flag {flag}", flag=flag, remedy=_suggestion(flag, parser))
    if unknown:
        raise UsageError(
            "'{flag}' belongs to no flag",
            flag=unknown[0],
            remedy="check the command line around it",
        )
    return vars(values)


def parse_known(
    parser: argparse.ArgumentParser,
    tokens: Sequence[str],
    into: argparse.Namespace | None = None,
    *,
    remedy: str = "see --help",
) -> tuple[argparse.Namespace, list[str]]:
    """What `parser` makes of tokens, and those that it does not know; UsageError where argparse
    would print its usage and leave."""

    def refuse(message: str) -> None:
        raise UsageError(message, remedy=remedy)

    # Of the flag that a value does not fit it then raises an error that names it by itself.
    parser.exit_on_error = False
    parser.error = refuse  # type: ignore[assignment, method-assign]
    try:
        return parser.parse_known_args(list(tokens), into)
    except argparse.ArgumentError as error:
        raise UsageError.of_argument(error, remedy=remedy) from error


class _Given(argparse.Namespace):
    """Says that it has every flag's attribute, so that argparse fills in no default."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):  # argparse's own
            raise AttributeError(name)


@dataclass(frozen=True)
class _Conversion:
    """A flag's `type`, made to fail as argparse expects: some of Megatron's raise KeyError."""

    convert: Any

    def __call__(self, text: str) -> Any:
        try:
            return self.convert(text)
        except (argparse.ArgumentTypeError, TypeError, ValueError, AssertionError, LookupError):
            name = getattr(self.convert, "__name__", "<lambda>")
            kind = f"{name} value" if name in ("int", "float", "str") else "value"
            raise argparse.ArgumentTypeError(f"invalid {kind}: {text!r}") from None


def flag_names(parser: argparse.ArgumentParser) -> dict[str, str]:
    """dest -> the flag that sets it, to speak of values in the user's words."""
    names: dict[str, str] = {}
    for action in parser._actions:
        if action.option_strings:
            names.setdefault(action.dest, action.option_strings[-1])
    return names
