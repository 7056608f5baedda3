"""The flags that a command line gives, including those of YAML files."""

from __future__ import annotations

import argparse
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.near_names import nearest_name
from mcore_rl.common.readers import InvalidData, parse_yaml
from mcore_rl.common.user_code import import_user_file
from mcore_rl.flags.megatron_flags import WITHOUT_EFFECT_DESTS


def _raise(error: UsageError) -> None:
    raise error


def options_of(
    parser: argparse.ArgumentParser, group: str | None = None
) -> dict[str, argparse.Action]:
    """Return the actions of a parser by flag, of one group or of all; argparse has no public door
    to them. An action with several flags is there several times."""
    if group is None:
        return parser._option_string_actions
    of_group = [each._group_actions for each in parser._action_groups if each.title == group]
    return {flag: action for each in of_group for action in each for flag in action.option_strings}


def expand_config(
    tokens: Sequence[str],
    parser: argparse.ArgumentParser,
    *,
    refused: Callable[[UsageError], None] = _raise,
) -> list[str]:
    """Replace every `--rl-config FILE` by the flags in the files, put before all others.

    Keys are flag names, with or without the leading dashes, with `-` or `_`. `false` switches a
    switch off, even a derived one; a key with an empty value is ignored. If several files have a
    key, the last one counts. `refused` gets a UsageError for a file that cannot be read as a
    mapping of flags, and for an unknown key (naming the nearest known one). Unless it raises, the
    faulty parts are left out.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--rl-config", action="append", default=[])
    configs, rest = parse_known(finder, tokens)
    flags: dict[str, list[str]] = {}
    for path in configs.rl_config:
        for flag, tokens_of_flag in _read_config(Path(path), parser, refused).items():
            # At the end, as argparse would: some flags undo each other.
            flags.pop(flag, None)
            flags[flag] = tokens_of_flag
    return [token for tokens_of_flag in flags.values() for token in tokens_of_flag] + rest


def import_given_files(
    tokens: Sequence[str], *, refused: Callable[[UsageError], None] = _raise
) -> None:
    """Run the files of every `--rl-import`, including those named in files of `--rl-config`.

    They may register flags, so this precedes a parser. `refused` gets a UsageError for a file that
    cannot be used. Other errors are left to the readers of all flags.
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
            refused(error)


def _read_config(
    path: Path, parser: argparse.ArgumentParser, refused: Callable[[UsageError], None]
) -> dict[str, list[str]]:
    """Read one file of `--rl-config`: destination -> the tokens of its flag."""
    refusal = functools.partial(UsageError, flag=f"--rl-config {path}")
    try:
        values = _mapping_in(path, refusal)
    except UsageError as error:
        refused(error)
        return {}
    flags: dict[str, list[str]] = {}
    seen: list[argparse.Action] = []
    for key, value in values.items():
        try:
            action, tokens = _tokens_of(str(key), value, parser, refusal)
        except UsageError as error:
            refused(error)
            continue
        if action in seen:
            found = f": '{key}' sets a flag that another key of the file sets"
            refused(refusal(found, remedy="remove one of them"))
        seen.append(action)
        flags.pop(action.dest, None)
        flags[action.dest] = tokens
    return flags


def _mapping_in(path: Path, refusal: Callable[..., UsageError]) -> dict[Any, Any]:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            found = "is not a regular file, and it is read more than once"
            raise refusal(found, remedy="write what it gives to a file")
        values = parse_yaml(path.read_text(encoding="utf-8"), number_of=_number_as_written)
    except OSError as error:
        found = f"cannot be read: {error.strerror}"
        raise refusal(found, remedy="correct the path") from error
    except UnicodeDecodeError as error:
        found = "cannot be read: it is not UTF-8 text"
        raise refusal(found, remedy="save it as UTF-8") from error
    except InvalidData as error:
        raise refusal(f"is not valid YAML: {error}", remedy="correct it there") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        found = "must hold 'flag: value' lines, not a list or a text"
        raise refusal(found, remedy="write it so")
    return values


def _tokens_of(
    key: str, value: Any, parser: argparse.ArgumentParser, refusal: Callable[..., UsageError]
) -> tuple[argparse.Action, list[str]]:
    flags = options_of(parser)
    flag = "--" + key.lstrip("-")
    if flag not in flags:  # some of Megatron's contain "_"
        flag = flag.replace("_", "-")
    action = flags.get(flag)
    if action is None or isinstance(action, argparse._HelpAction):
        raise refusal(f": unknown key '{key}'", remedy=_suggestion(flag, parser))
    if action.dest == "rl_config":
        raise refusal("cannot name another file", remedy="give the flag twice")
    if value is None or value == []:
        return action, []
    if action.nargs == 0 and not isinstance(value, bool):
        raise refusal(f": '{key}' is a switch", remedy="its value is true or false")
    # Megatron has kept some switches without effect, besides the form that undoes them.
    inverse = flags.get(_inverse(flag))
    if inverse and action.dest in WITHOUT_EFFECT_DESTS and inverse.dest not in WITHOUT_EFFECT_DESTS:
        return inverse, [flag if value else _inverse(flag)]
    try:
        return action, _tokens_of_value(action, flag, value, parser)
    except InvalidData as error:
        raise refusal(f": '{key}' {error}", remedy="correct it there") from error


def _tokens_of_value(
    action: argparse.Action, flag: str, value: Any, parser: argparse.ArgumentParser
) -> list[str]:
    """Return the tokens of a value; raise InvalidData for a value that `action` cannot have."""
    if action.nargs == 0:
        assert isinstance(value, bool), "the caller has looked"
        off = flag if value else _option_of(parser, action.dest, flag)
        return [] if off is None else [off]
    if isinstance(value, list) and action.nargs:
        tokens = _written(action, flag, list(map(_text_of, value)))
        for text in tokens[1:]:
            if text.startswith("-") and not parser._negative_number_matcher.match(text):
                if not isinstance(action, argparse._ExtendAction):
                    raise InvalidData(f"has '{text}' among its values, which is read as a flag")
        return tokens
    if isinstance(value, bool):
        value = _word_of(value, action)
    text = _text_of(value) if not isinstance(value, list) else _pattern_of(value)
    return _written(action, flag, [text])


def _written(action: argparse.Action, flag: str, texts: list[str]) -> list[str]:
    """Return the tokens of a flag and its values, so that no value is taken for a flag."""
    each_alone = len(texts) == 1 or isinstance(action, argparse._ExtendAction)
    if each_alone and any(text.startswith("-") for text in texts):
        return [f"{flag}={text}" for text in texts]
    return [flag, *texts]


def _word_of(value: bool, action: argparse.Action) -> str:
    """Return `on` or `off`, which YAML reads as a bool, for a flag with this word as a value."""
    word = "on" if value else "off"
    if word not in (*(action.choices or ()), action.default):
        raise InvalidData(
            f"is not a switch and cannot be {str(value).lower()}: leave the key out for its "
            "default, or put a text in quotes"
        )
    return word


def _text_of(value: Any) -> str:
    """As it is written on a command line."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise InvalidData(f"has {kind} in place of a string or a number")
    try:
        text = str(value)
        text.encode()
    except ValueError:  # an integer of thousands of digits, half a character
        text = "\0"
    if "\0" in text:
        raise InvalidData("has a text or a number that no command line can hold")
    return text


def _pattern_of(value: list[Any]) -> str:
    """Return a list in the form of Megatron's pattern flags: "[0,1,1]"."""
    parts = []
    for entry in value:
        if isinstance(entry, list):
            parts.append(_pattern_of(entry))
        else:
            text = _text_of(entry)
            parts.append(repr(text) if isinstance(entry, str) else text)
    return f"[{','.join(parts)}]"


def _option_of(parser: argparse.ArgumentParser, dest: str, against: str) -> str | None:
    """Return the switch that undoes `against`, a switch of `dest`, or None."""
    undone = options_of(parser)[against]
    if isinstance(undone, argparse.BooleanOptionalAction):
        off = against.startswith("--no-")
        return next(o for o in undone.option_strings if o.startswith("--no-") != off)
    return next(
        (
            action.option_strings[0]
            for action in parser._actions
            if action.dest == dest and action.nargs == 0 and action.const != undone.const
        ),
        None,
    )


def as_config(tokens: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the flags of `tokens` as in a file of `--rl-config`: key -> value, in their order.

    Such a file, given instead of these tokens, has the same effect. `parser` must have read
    `tokens` before, with `--rl-config` expanded.
    """
    config: dict[str, Any] = {}
    for action, option, values in _occurrences(tokens, parser):
        key = option.lstrip("-")
        texts: Any = [_typed(text) for text in values]
        if isinstance(action, argparse.BooleanOptionalAction):
            on = action.option_strings[0]
            key, texts = on.lstrip("-"), option == on
        elif isinstance(action, Negation):
            key, texts = action.undone.lstrip("-"), False
        elif action.nargs == 0:
            texts = True
        elif isinstance(action, argparse._ExtendAction):
            texts = config.get(key, []) + texts
        elif not action.nargs:
            (texts,) = texts
        config.pop(key, None)  # the last one counts, and takes its own place
        config[key] = texts
    return config


def without_flags(
    tokens: Sequence[str], parser: argparse.ArgumentParser, dests: Collection[str]
) -> tuple[str, ...]:
    """Return `tokens`, which `parser` has read before, without the flags of `dests`."""
    kept: list[str] = []
    for action, option, values in _occurrences(tokens, parser):
        if action.dest not in dests:
            kept += _written(action, option, values)
    return tuple(kept)


def _occurrences(
    tokens: Sequence[str], parser: argparse.ArgumentParser
) -> list[tuple[argparse.Action, str, list[str]]]:
    """Return each flag of `tokens` in order: its action in `parser`, its spelling, its values."""
    recorder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    occurrences: list[tuple[argparse.Action, str, list[str]]] = []
    # To add all flags would take longer than all else here.
    named = {token.partition("=")[0] for token in tokens}
    for action in parser._actions:
        if named.intersection(action.option_strings):
            recorder.add_argument(
                *action.option_strings,
                dest="found",
                action=_Recorded,
                nargs=action.nargs,
                metavar="VALUE",
                flag=action,
            )
    recorder.parse_args(list(tokens), argparse.Namespace(found=occurrences))
    return occurrences


class _Recorded(argparse.Action):
    """An action that records a flag and the text of its value, before any conversion."""

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
        texts = [str(value) for value in values] if isinstance(values, list) else [values]
        namespace.found.append((self._flag, option, texts))


def _typed(text: str) -> int | float | str:
    """Return the number that `text` spells in Python's own form, else the text."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text and math.isfinite(number):
            return number
    return text


def _number_as_written(text: str) -> int | float | str:
    """A number of YAML as it would stand on a command line: `1.10` and `010` are themselves."""
    sign, _, name = text.lower().rpartition(".")
    return f"{sign}{name}" if name in ("inf", "nan") else _typed(text)


class Negation(argparse._StoreConstAction):
    """The form that undoes a switch of the parser."""

    def __init__(self, *, undone: str, **options: Any) -> None:
        super().__init__(default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)
        self.undone = undone


def add_negations(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> None:
    """Add `--no-X` for each switch `--X` that nothing undoes, and `--X` for `--no-X`.

    Defaults, Megatron's or ours, can then be switched off. They go to `group`, and are not listed
    by --help. A name that has another meaning stays as it is.
    """
    values: defaultdict[str, list[Any]] = defaultdict(list)  # of the switches of a destination
    for action in parser._actions:
        if action.nargs == 0:
            values[action.dest].append(action.const)
    for action in list(parser._actions):
        if not isinstance(action, argparse._StoreTrueAction | argparse._StoreFalseAction):
            continue
        flag = action.option_strings[0]
        negation, const = _inverse(flag), not action.const
        is_undone = any(value != action.const for value in values[action.dest])
        if negation in options_of(parser) or is_undone:
            continue
        group.add_argument(negation, action=Negation, dest=action.dest, const=const, undone=flag)
        values[action.dest].append(const)


def _inverse(flag: str) -> str:
    return f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"


def _suggestion(flag: str, parser: argparse.ArgumentParser) -> str:
    near = nearest_name(flag, options_of(parser))
    return f"did you mean '{near}'?" if near else "see --help for the known flags"


def given_values(tokens: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return dest -> value of the flags that `tokens` set, without any defaults.

    Changes `parser` for good: its errors become UsageErrors and none of its flags is required; it
    may be passed again. Raises UsageError for unknown flags (naming the nearest known one) and
    values that do not fit their flag.
    """

    for action in parser._actions:
        action.required = False
        if action.dest in WITHOUT_EFFECT_DESTS:  # its value is never read
            action.choices = None
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
) -> tuple[argparse.Namespace, list[str]]:
    """Return what `parser` parses, and the unknown tokens; raise UsageError instead of exiting."""

    def refuse(message: str) -> None:
        raise UsageError(message, remedy="see --help")

    for flag, is_given, value in (token.partition("=") for token in tokens):
        if is_given and value == "--" and flag in options_of(parser):
            raise UsageError("is --, which argparse drops", flag=flag, remedy="give another text")
    # argparse then raises an error that names the flag whose value does not fit.
    parser.exit_on_error = False
    parser.error = refuse  # type: ignore[assignment, method-assign]
    try:
        return parser.parse_known_args(list(tokens), into)
    except argparse.ArgumentError as error:
        raise UsageError.of_argument(error, remedy="see --help") from error


class _Given(argparse.Namespace):
    """A namespace that claims every flag's attribute, so that argparse fills in no defaults."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):  # argparse's own
            raise AttributeError(name)


@dataclass(frozen=True)
class _Conversion:
    """A flag's `type` whose errors argparse expects: some of Megatron's raise KeyError."""

    convert: Any

    def __call__(self, text: str) -> Any:
        try:
            return self.convert(text)
        except (argparse.ArgumentTypeError, TypeError, ValueError, AssertionError, LookupError):
            name = getattr(self.convert, "__name__", "<lambda>")
            kind = f"{name} value" if name in ("int", "float", "str") else "value"
            shown = text if len(text) <= 60 else f"{text[:60]}..."
            raise argparse.ArgumentTypeError(f"invalid {kind}: {shown!r}") from None


class FlagNames(dict[str, str]):
    """dest -> the flag that sets it, for messages in the user's terms."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self._switches: dict[tuple[str, Any], str] = {}
        for action in parser._actions:
            if action.option_strings:
                self.setdefault(action.dest, action.option_strings[-1])
            if action.nargs == 0:
                self._switches.setdefault((action.dest, action.const), action.option_strings[0])

    def shown(self, dest: str, value: Any) -> str:
        """Return the flag as on a command line; a switch is its name alone."""
        if isinstance(value, bool):
            return self._switches.get((dest, value), self[dest])
        return f"{self[dest]} {value}"
