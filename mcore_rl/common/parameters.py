"""User parameters, declared once in a frozen dataclass: default, bounds and help.

    @dataclass(frozen=True)
    class Width(Parameters):
        spo_width: float = param(0.2, "how far ratios are pulled back", above=0)

declares the flag `--rl-spo-width`, its line in --help and in docs, its check, and the attribute
that the loss reads. A field's type (float, int, bool, str or a Literal, each optionally `| None`)
is the flag's type. The names of all parameters share one namespace.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mcore_rl.common.errors import UsageError

_KINDS = (bool, int, float, str)
ExtraArgs = Callable[[argparse.ArgumentParser], Any]  # Megatron's `extra_args_provider`


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a number, which must be finite unless `most` is infinite."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def __bool__(self) -> bool:
        return self != Bounds()

    def hold(self, value: float) -> bool:
        """Return whether `value` is within the bounds; nan is outside any bounds."""
        if not self:
            return True
        return (
            (abs(value) < math.inf or value == self.most)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def interval(self) -> str:
        """Return the bounds in mathematical notation; empty without bounds."""
        if not self:
            return ""
        low = f"({self.above:g}" if self.above is not None else "(-inf"
        low = f"[{self.least:g}" if self.least is not None else low
        high = f"{self.below:g})" if self.below is not None else "inf)"
        high = f"{self.most:g}]" if self.most is not None else high
        return f"{low}, {high}"

    def broken_by(self, value: float) -> str:
        """Return the constraint that `value`, which is out of bounds, breaks."""
        if self.most is not None and self.most < value < math.inf:
            return f"at most {self.most:.10g}"
        if self.below is not None and self.below <= value < math.inf:
            return f"less than {self.below:g}"
        return (
            f"greater than {self.above:g}"
            if self.above is not None
            else f"at least {self.least:.10g}"
        )


_OF_INTEGERS = Bounds(least=-(2**31) + 1, most=2**31 - 1)  # tensors hold them


@dataclass(frozen=True, slots=True)
class Parameter:
    """One field of a declaration. `name` is the field's with the declaration's `_flag_prefix`."""

    name: str
    field: str
    kind: type
    default: Any
    help: str
    bounds: Bounds = Bounds()
    choices: tuple[str, ...] | None = None
    advice: str | None = None  # ends the sentence that refuses a value: reason and remedy
    several: bool = False  # the flag may be repeated, each time with one or more values
    needs: tuple[str, ...] = ()  # names of parameters; without any of them it has no effect
    excludes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name -> why

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    def check(self, value: Any) -> None:
        """Raise UsageError for a value that is out of bounds or not one of the choices."""
        if value is None:
            return
        if self.choices is not None and value not in self.choices:
            raise UsageError(
                "is unknown",
                flag=f"{self.flag} {value}",
                remedy=f"choose one of {', '.join(self.choices)}",
            )
        for bounds in (self.bounds, _OF_INTEGERS if self.kind is int else Bounds()):
            if not bounds.hold(value):
                raise UsageError(
                    f"must be {bounds.broken_by(value)}",
                    flag=f"{self.flag} {value}",
                    remedy=self.advice or f"choose for example {self.default}",
                )

    def shown(self, value: Any) -> str:
        """Return the flag as it is given with a value."""
        return self.flag if self.kind is bool else f"{self.flag} {value}"


def flag_of(field_name: str) -> str:
    """Return a field's flag: num_steps -> --rl-num-steps; import_ (a keyword) -> --rl-import."""
    return "--rl-" + field_name.rstrip("_").replace("_", "-")


def field_of(flag: str) -> str:
    """Return a flag's field: --rl-policy-loss -> policy_loss."""
    return flag.removeprefix("--rl-").replace("-", "_")


def param(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    advice: str | None = None,
    needs: tuple[str, ...] = (),
    excludes: Mapping[str, str] | None = None,
) -> Any:
    """Declare a field of a `Parameters` class: its default, a line of help, and its valid values.

    `least` and `most` are inclusive, `above` and `below` exclusive; infinity is valid only with
    `most=math.inf`. `advice` replaces the remedy for an invalid value. Names of other parameters:
    `needs` has those of which at least one must be given, too, for this one to have an effect,
    `excludes` those that cannot be given with it, and why. See `check_combinations`.
    """
    bounds = Bounds(least, most, above, below)
    options = {"help": help, "bounds": bounds, "choices": choices, "advice": advice}
    options |= {"needs": needs, "excludes": excludes or {}}
    return dataclasses.field(default=default, metadata={"param": options})


def degree(size: str, model: str) -> Any:
    """Declare the parallel size of a model that follows the actor's by default."""
    help = f"{size} size of the {model}; default: the actor's"
    return param(None, help, least=1, advice="drop it for the actor's")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Base class of a declaration. A value out of bounds raises UsageError."""

    _flag_prefix = ""  # of the names of all its flags
    _needs = ""  # name of the parameter that all others of the class need

    def __post_init__(self) -> None:
        for parameter in parameters_of(type(self)):
            parameter.check(getattr(self, parameter.field))


P = TypeVar("P", bound=Parameters)


def parameters_of(declaration: type) -> tuple[Parameter, ...]:
    """Return the parameters that a class declares, in the order of its fields.

    Fields without `param` are skipped. Raises TypeError for a type that a flag cannot have.
    """
    return _parameters_of(declaration)


@functools.cache
def _parameters_of(declaration: Any) -> tuple[Parameter, ...]:
    hints = typing.get_type_hints(declaration)
    return tuple(
        _parameter(declaration, field, hints[field.name])
        for field in dataclasses.fields(declaration)
        if "param" in field.metadata
    )


def by_flag(parameters: Parameters) -> dict[str, Any]:
    """Return all values by the names of their flags, without --rl-."""
    return {p.name: getattr(parameters, p.field) for p in parameters_of(type(parameters))}


def check_combinations(values: Iterable[tuple[Parameter, Any]]) -> None:
    """Raise UsageError for a parameter that is given, with another value than its default, without
    what it needs, or with what it excludes."""
    given = {each.name: (each, value) for each, value in values if value != each.default}
    for parameter, value in given.values():
        if parameter.needs and not given.keys() & {*parameter.needs}:
            flags = [flag_of(name) for name in parameter.needs]
            listed = " or ".join(filter(None, (", ".join(flags[:-1]), flags[-1])))
            raise UsageError(
                f"has no effect without {listed}",
                flag=parameter.shown(value),
                remedy=f"add {'it' if len(flags) == 1 else 'one of them'}, or drop this flag",
            )
        for name, why in parameter.excludes.items():
            if name in given:
                other, its_value = given[name]
                raise UsageError(
                    f"cannot be combined with {other.shown(its_value)}: {why}",
                    flag=parameter.shown(value),
                    remedy="drop this flag",
                )


def with_values(parameters: P, values: Mapping[str, Any]) -> P:
    """Return `parameters` with the `values` that it declares, checked like any such object."""
    own = {p.name: p.field for p in parameters_of(type(parameters))}
    return dataclasses.replace(parameters, **{own[k]: v for k, v in values.items() if k in own})


def _parameter(declaration: Any, field: dataclasses.Field[Any], hint: Any) -> Parameter:
    options = dict(field.metadata["param"])
    name = declaration._flag_prefix + field.name
    if declaration._needs not in ("", name):
        options["needs"] = (declaration._needs,)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        options["choices"], hint = typing.get_args(hint), str
    if hint == tuple[str, ...]:
        options["several"], hint = True, str
    if hint not in _KINDS:
        raise TypeError(
            f"parameter {field.name} is of type {hint}; a flag is bool, int, float, str"
        )
    return Parameter(name, field.name, hint, field.default, **options)
