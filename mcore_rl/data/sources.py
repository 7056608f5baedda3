"""The sources of prompts that `--rl-prompts` and `--rl-eval-prompts` name.

    a.jsonl                         one source
    a.jsonl=0.7,b.parquet=0.3       several, with the share of each; without shares by their sizes
    math=a.jsonl,code=b.parquet     held-out sets with names
    sources.yaml                    the same with options of each source

A YAML file maps the name of each source to its options, which are the fields of `SourceSpec`:

    math:
      path: math.parquet            # relative to the YAML file
      weight: 0.7
      reward: gsm8k

This module is pure, and only a YAML file is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

from mcore_rl.common.errors import UsageError
from mcore_rl.common.near_names import did_you_mean
from mcore_rl.common.readers import InvalidData, parse_yaml

PROMPTS, EVAL_PROMPTS = "--rl-prompts", "--rl-eval-prompts"
_YAML = (".yaml", ".yml")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_LONGEST_NAME = 100  # is in the names of metrics
_NUMBER = re.compile(r"\+?(\d{1,9}\.?\d{0,300}|\.\d{1,300})(e[+-]?\d{1,2})?", re.IGNORECASE)
_FRACTION = re.compile(r"\d{1,9}/0*[1-9]\d{0,8}")
_TOLERANCE = Fraction(1, 10**6)  # of the sum of weights
MOST_SOURCES = 255
NO_ENVIRONMENT = "none"  # of a source whose samples have one turn, in a run with environments
NO_TEACHER = "none"  # of a source without a teacher, in a run with --rl-teacher
_OF_ROWS = ("path", "prompt_column", "max_prompt_tokens")  # of files from which nothing is sampled
_OF_TRAINING = ("weight", "teacher", "samples_per_prompt")  # not of held-out sets


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A source of prompts and its own options; None: those of the run.

    Example: the first source of `--rl-prompts a.jsonl=0.7,b.parquet=0.3` is
    `SourceSpec("a", "a.jsonl", weight=Fraction(7, 10))`.
    """

    name: str  # "": the only one of a flag without names
    path: str  # a file, or a source of --rl-import
    weight: Fraction | None = None  # share of the draws, in (0, 1]; None: by the number of prompts
    prompt_column: str | None = None
    answer_column: str | None = None
    system_prompt: str | None = None  # for rows that do not begin with a system message
    reward: str | None = None  # as --rl-reward
    reward_weights: str | None = None  # as --rl-reward-weights
    environment: str | None = None  # as --rl-environment, or NO_ENVIRONMENT
    teacher: str | None = None  # as --rl-teacher, or NO_TEACHER
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    samples_per_prompt: int | None = None  # as --rl-num-samples-per-prompt
    is_eval: bool = False

    @property
    def key(self) -> str:
        """The name by which prompts refer to their source; differs between both flags."""
        return f"eval/{self.name}" if self.is_eval else self.name


_OPTIONS: Mapping[str, type] = {
    "path": str,
    "weight": Fraction,
    "prompt_column": str,
    "answer_column": str,
    "system_prompt": str,
    "reward": str,
    "reward_weights": str,
    "environment": str,
    "teacher": str,
    "max_prompt_tokens": int,
    "max_response_tokens": int,
    "samples_per_prompt": int,
}


def is_yaml(value: str) -> bool:
    """Return whether the value of a flag is a YAML file, whose sources may have options."""
    return Path(value).suffix in _YAML


def parse_sources(value: str, flag: str = PROMPTS) -> tuple[SourceSpec, ...]:
    """Return the sources that the value of `flag` names.

    Raises UsageError for a YAML file that cannot be read or has an unknown key, two sources of one
    name, weights of some sources only, and weights whose sum differs from 1 by more than 1e-6.
    """
    refuse = _refusal(flag, value)
    if is_yaml(value):
        sources = _of_yaml(value, flag, refuse)
    elif os.path.isfile(value) or not {",", "="} & set(value):  # pathlib raises for long names
        return (SourceSpec("", value, is_eval=flag == EVAL_PROMPTS),)
    else:
        sources = [_of_part(part.strip(), flag, refuse) for part in value.split(",")]
    _check_names(sources, refuse)
    _check_weights(sources, refuse)
    return tuple(sources)


def source_of_rows(value: str, flag: str) -> SourceSpec:
    """Return the only source that the value of `flag` names, a file of demonstrations or pairs.

    Raises UsageError for several sources, and for an option that only prompts have.
    """
    refuse = _refusal(flag, value)
    specs = parse_sources(value, flag)
    if len(specs) > 1:
        refuse(
            f"names {len(specs)} sources, which are for prompts that are sampled",
            "give one file of demonstrations or pairs",
        )
    (source,) = specs
    for key in _OPTIONS:
        if key not in _OF_ROWS and getattr(source, key) is not None:
            refuse(
                f": {key} of source '{source.name}' has no effect on demonstrations or pairs",
                f"drop it; {_list(_OF_ROWS).replace(' or ', ' and ')} have one",
            )
    return source


def _refusal(flag: str, value: str) -> Callable[..., NoReturn]:
    def refuse(found: str, remedy: str) -> NoReturn:
        raise UsageError(found, flag=f"{flag} {value}", remedy=remedy)

    return refuse


def _of_part(part: str, flag: str, refuse: Callable[..., NoReturn]) -> SourceSpec:
    """Return the source of `PATH`, `PATH=WEIGHT` or, held out, `NAME=PATH`."""
    if not part:
        refuse("has an empty part", "give files with one comma between two")
    is_eval = flag == EVAL_PROMPTS
    if is_eval:
        name, has_name, path = part.partition("=")
        path = path if has_name else part
        spec = SourceSpec(name if has_name else Path(path).stem, path, is_eval=True)
    else:
        path, has_weight, text = part.rpartition("=")
        path = path if has_weight else part
        weight = _weight(text, path, refuse) if has_weight else None
        spec = SourceSpec(Path(path).stem, path, weight)
    if not spec.path:
        refuse(f": '{part}' names no file", "write NAME=PATH" if is_eval else "write PATH=WEIGHT")
    return spec


def _weight(value: Any, name: str, refuse: Callable[..., NoReturn]) -> Fraction:
    text = _text(value).strip()
    weight = Fraction(0)
    if _FRACTION.fullmatch(text):
        weight = Fraction(text)
    elif _NUMBER.fullmatch(text) and not isinstance(value, bool):
        weight = Fraction(Decimal(text))
    if not 0 < weight <= 1:
        refuse(
            f": the weight of '{_beginning(name)}' is '{_beginning(text)}', not a number above 0 "
            "and at most 1",
            "give the share of the draws, for example 0.5 or 1/3, or leave the source out",
        )
    return weight


def _text(value: Any) -> str:
    try:
        return str(value)
    except ValueError:  # an integer of thousands of digits
        return "a very long number"


def _beginning(text: str) -> str:
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."


def _of_yaml(value: str, flag: str, refuse: Callable[..., NoReturn]) -> list[SourceSpec]:
    try:
        content = parse_yaml(Path(value).read_text(encoding="utf-8"))
    except OSError as error:
        refuse(f"cannot be read ({error.strerror})", "give a file of prompts, or one of sources")
    except UnicodeDecodeError:
        refuse("is not UTF-8 text", "save it as UTF-8")
    except InvalidData as error:
        refuse(f"is not valid YAML: {error}", "correct it there")
    if not isinstance(content, dict) or not content:
        refuse("names no source", "write 'NAME: {path: FILE}' for each source")
    return [_of_entry(str(name), entry, value, flag, refuse) for name, entry in content.items()]


def _of_entry(
    name: str, entry: Any, value: str, flag: str, refuse: Callable[..., NoReturn]
) -> SourceSpec:
    if not isinstance(entry, dict) or "path" not in entry:
        refuse(f": source '{name}' has no path", f"write '{name}: {{path: FILE}}'")
    is_eval = flag == EVAL_PROMPTS
    known = [each for each in _OPTIONS if each not in _OF_TRAINING or not is_eval]
    options: dict[str, Any] = {}
    for key, given in entry.items():
        if key not in known:
            meant = did_you_mean(str(key), known)
            refuse(f": source '{name}' has the unknown key '{key}'{meant}", f"use {_list(known)}")
        options[key] = _option(name, key, given, refuse)
    path = Path(value).parent / options["path"]
    # What is not a file there may be a source of --rl-import.
    options["path"] = options["path"] if options["path"].isidentifier() else str(path)
    teacher = options.get("teacher", NO_TEACHER)
    if teacher != NO_TEACHER and not teacher.startswith(("http://", "https://")):
        options["teacher"] = str(Path(value).parent / teacher)
    if "reward_weights" in options and "reward" not in options:
        refuse(f": source '{name}' has reward_weights without a reward", "add its reward")
    return SourceSpec(name, is_eval=is_eval, **options)


def _option(name: str, key: str, given: Any, refuse: Callable[..., NoReturn]) -> Any:
    kind = _OPTIONS[key]
    if kind is Fraction:
        return _weight(given, name, refuse)
    if kind is int:
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            refuse(f": {key} of source '{name}' is {given!r}", "give a whole number above 0")
        return given
    if key == "reward_weights" and isinstance(given, int | float) and not isinstance(given, bool):
        return str(given)
    if not isinstance(given, str) or not given.strip():
        refuse(f": {key} of source '{name}' is {given!r}", "give a text")
    return given


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _check_names(sources: Sequence[SourceSpec], refuse: Callable[..., NoReturn]) -> None:
    paths: dict[str, str] = {}
    for source in sources:
        if len(source.name) > _LONGEST_NAME or not _NAME.fullmatch(source.name):
            refuse(
                f": a source cannot be called '{_beginning(source.name)}'",
                f"give a name of at most {_LONGEST_NAME} letters, digits, '_', '-' and '.', in a "
                "YAML file or as NAME=PATH of a held-out set",
            )
        if source.name in paths:
            refuse(
                f": {paths[source.name]} and {source.path} are both called '{source.name}'",
                "name the sources in a YAML file, or held-out sets as NAME=PATH",
            )
        paths[source.name] = source.path
    if len(sources) > MOST_SOURCES:
        refuse(f": {len(sources)} sources are too many", f"give at most {MOST_SOURCES}")


def _check_weights(sources: Sequence[SourceSpec], refuse: Callable[..., NoReturn]) -> None:
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and len(weights) < len(sources):
        without = next(source.name for source in sources if source.weight is None)
        refuse(f": '{without}' has no weight", "give all sources a weight, or none of them")
    total = sum(weights, Fraction(0))
    if weights and abs(total - 1) > _TOLERANCE:
        refuse(f": the weights add up to {float(total):g}, not to 1", "correct the weights")


def check_lengths(
    sources: Sequence[SourceSpec], *, max_prompt_tokens: int, max_response_tokens: int, given: str
) -> None:
    """Raise UsageError for a source with longer prompts or responses than the run has."""
    limits = {"max_prompt_tokens": max_prompt_tokens, "max_response_tokens": max_response_tokens}
    for source in sources:
        for name, limit in limits.items():
            own = getattr(source, name)
            if own is not None and own > limit:
                flag = f"--rl-{name.replace('_', '-')}"
                raise UsageError(
                    f": {name} {own} of source '{source.name}' is more than {flag} {limit}",
                    flag=given,
                    remedy="lower it, or raise the flag",
                )
