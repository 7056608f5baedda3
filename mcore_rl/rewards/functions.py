"""The built-in reward functions, and the lookup of a user's own.

A reward function is called as `fn(prompt=, response=, answer=)` and returns a finite number; an
async function is awaited. `prompt` and `answer` are columns of the prompts file; `response` is the
text of the policy. `answer` is a text unless the file has a list or an object there. A function
that also takes `row` gets all columns of the row, in its own dict.

A user's function is named as `package.module:function` or `path/file.py:function`, or by the name
under which a file of `--rl-import` registers it:

    from mcore_rl.api import reward

    @reward("brevity")
    def brevity(*, prompt: str, response: str, answer: str) -> float:
        return 1 / (1 + len(response))

Worker processes import this module: it, and whatever it imports, must stay free of torch, Megatron,
vLLM and numpy.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.near_names import did_you_mean
from mcore_rl.common.numbers_in_text import (
    ends_in_number,
    last_number,
    number_of,
    numbers_in,
)
from mcore_rl.common.user_code import find_in_module, meant_own
from mcore_rl.sandbox import PYTHON_SANDBOX

RewardFunction = Callable[..., float]

# Names of `--rl-reward` that mean a server, a model that Megatron runs or an environment's rewards,
# not a function.
SERVED_REWARDS = ("http", "pooling")
REWARD_MODEL = "model"
ENVIRONMENT = "environment"
NO_REWARD = "none"
NO_FUNCTIONS = (*SERVED_REWARDS, REWARD_MODEL, ENVIRONMENT)

BY_NAME: dict[str, RewardFunction] = {}
_REGISTERED_AT: dict[str, tuple[str, int]] = {}  # name -> file and line of its `@reward(...)`


def reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Register a function for `resolve_reward` as `name`; a decorator.

    A file may run twice, for `--rl-import` and as a module; its functions then replace their
    earlier versions. Raises ValueError for a name of another function, or one that `--rl-reward`
    cannot hold.
    """
    if not name or any(character in ",:" or character.isspace() for character in name):
        raise ValueError(
            f"a reward function cannot be called {name!r}; leave out commas, colons and white space"
        )
    if name in NO_FUNCTIONS:
        raise ValueError(
            f"{name!r} is the reward of a server, a model or an environment; give the reward "
            "function another name"
        )
    caller = sys._getframe(1)
    place = (os.path.realpath(caller.f_code.co_filename), caller.f_lineno)

    def register(function: RewardFunction) -> RewardFunction:
        if name in BY_NAME and _REGISTERED_AT[name] != place:
            raise ValueError(f"two reward functions are called {name!r}; rename one")
        BY_NAME[name] = function
        _REGISTERED_AT[name] = place
        return function

    return register


@reward(NO_REWARD)
def no_reward(*, prompt: str, response: str, answer: Any) -> float:
    """Return 0: for runs that learn from a teacher alone."""
    return 0.0


@reward("exact_match")
def exact_match(*, prompt: str, response: str, answer: Any) -> float:
    """Return 1 if the response equals the answer, or one of a list, else 0. Leading and trailing
    white space is ignored."""
    answers = answer if isinstance(answer, list) else [answer]
    return float(response.strip() in [str(each).strip() for each in answers])


@reward("arithmetic")
def arithmetic(*, prompt: str, response: str, answer: Any) -> float:
    """Return 1 if the response ends in the number of the answer, else 0; see `ends_in_number`."""
    return float(ends_in_number(response, answer))


@reward("gsm8k")
def gsm8k(*, prompt: str, response: str, answer: Any) -> float:
    """Return 1 if the response's result is the number after `####` in the answer, else 0.

    The response's result is the first number after its last `####`; without that mark it is the
    last number of the text. A mark without a following number scores 0. Thousands separators, `$`
    and `%` are ignored. An answer without a number raises ValueError. (Cobbe et al. 2021, arXiv
    2110.14168)
    """
    expected = number_of(str(answer).rpartition("####")[2])
    return float(_gsm8k_result(response) == expected)


def _gsm8k_result(response: str) -> Decimal | None:
    _, mark, result = response.rpartition("####")
    numbers = numbers_in(result)
    return numbers[0 if mark else -1] if numbers else None


def _as_text(number: Decimal | None) -> str | None:
    """Return the same text for equal numbers."""
    return None if number is None else str(Fraction(number))


# For rewards that compare one answer of the response: how they find it, as a text; None: it has
# none. Texts of equal answers are equal.
NAMED_ANSWERS: Mapping[str, Callable[[str], str | None]] = {
    "exact_match": str.strip,
    "arithmetic": lambda response: _as_text(last_number(response)),
    "gsm8k": lambda response: _as_text(_gsm8k_result(response)),
}


@reward(PYTHON_SANDBOX)
def python_sandbox(
    *, prompt: str, response: str, answer: Any, row: Mapping[str, Any] | None = None
) -> float:
    """Return 1 if the response's last block of Python passes the answer's tests, else 0.

    `sandbox.code_tests` lists the forms of tests; `row` completes them. Raises ValueError for an
    answer without tests and for tests that no code could fail. Code and tests together have five
    seconds, or what `--rl-reward-timeout-seconds` leaves of them, in a process without network
    (`sandbox.runner`).
    """
    from mcore_rl.sandbox import code_tests, runner  # starts processes; few rewards do
    from mcore_rl.sandbox.code_blocks import code_in

    suite = code_tests.suite_of(answer, prompt=prompt, row=row)
    code = code_in(response)
    if code is None:
        return 0.0
    seconds = runner.seconds_left()
    ran = runner.run_python(code, suite, timeout_seconds=seconds, stops_early=True)
    return float(ran.all_passed)


def resolve_reward(spec: str, flag: str = "--rl-reward") -> RewardFunction:
    """Return the function that `spec` names: a built-in name, `package.module:function` or
    `path/file.py:function`.

    A name with a colon is resolved by `find_in_module`. Raises UsageError for an unknown name, a
    module that is missing or raises on import, a missing attribute, and anything that cannot be
    called with `prompt`, `response` and `answer`.
    """
    if ":" in spec:
        function: RewardFunction = find_in_module(spec, f"{flag} {spec}")
    elif spec in BY_NAME:
        function = BY_NAME[spec]
    else:
        built_in = [*_names(built_in=True), *NO_FUNCTIONS]
        meant = did_you_mean(spec, [*BY_NAME, *NO_FUNCTIONS]) or meant_own(spec)
        raise UsageError(
            f"is not a built-in reward{meant}",
            flag=f"{flag} {spec}",
            remedy=f"the built-in ones are {', '.join(built_in)}, "
            f"{_imported_names()}and your own is given as package.module:function or "
            "./file.py:function",
        )
    _check_callable(function, spec, flag)
    return function


def _check_callable(function: object, spec: str, flag: str) -> None:
    if not callable(function):
        raise UsageError(
            f"is of type {type(function).__name__}, which cannot be called",
            flag=f"{flag} {spec}",
            remedy="name a function fn(prompt=, response=, answer=) that returns a number",
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some C functions have none; the first call will show
        return
    more: dict[str, object] = {"row": {}} if takes_row(function) else {}
    try:
        signature.bind(prompt="", response="", answer="", **more)
    except TypeError as error:
        raise UsageError(
            f"has the parameters {signature}, but is called as fn(prompt=, response=, answer=) "
            f"({error})",
            flag=f"{flag} {spec}",
            remedy="give it these three keywords",
        ) from error


def takes_row(function: Callable[..., object]) -> bool:
    """Return whether a reward function takes `row`, by name or as any keyword."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return False
    return "row" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _names(*, built_in: bool) -> list[str]:
    here = os.path.realpath(__file__)
    return sorted(name for name in BY_NAME if (_REGISTERED_AT[name][0] == here) == built_in)


def _imported_names() -> str:
    names = _names(built_in=False)
    return f"those of --rl-import are {', '.join(names)}, " if names else ""
