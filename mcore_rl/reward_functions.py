"""Reward functions: the built-in ones, how a user's own is found, and what a worker process runs.

A reward function is called as `fn(prompt=str, response=str, answer=str)` and returns a finite
number. `prompt` and `answer` are the columns of the prompts file; `response` is the text that the
policy wrote.

Worker processes import this module and what the user's own function imports, nothing else: it must
stay free of torch, Megatron, vLLM and numpy, and so must whatever it imports.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import importlib
import inspect
import math
import multiprocessing
import operator
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from importlib.machinery import ModuleSpec
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import NamedTuple, SupportsFloat

from mcore_rl.errors import UsageError

RewardFunction = Callable[..., float]

_BY_NAME: dict[str, RewardFunction] = {}
_MAX_DETAIL_CHARACTERS = 500
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# A sign counts only where it cannot be a minus between two operands ("7-3" ends in 3, not -3).
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])-)?\\?\$?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def reward(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator that makes a function known to `resolve_reward` by `name`."""

    def register(function: RewardFunction) -> RewardFunction:
        if name in _BY_NAME:
            raise ValueError(f"two reward functions are called {name!r}; rename one")
        _BY_NAME[name] = function
        return function

    return register


@reward("exact_match")
def exact_match(*, prompt: str, response: str, answer: str) -> float:
    """1 if response and answer are equal but for leading and trailing white space, else 0."""
    return float(response.strip() == answer.strip())


@reward("arithmetic")
def arithmetic(*, prompt: str, response: str, answer: str) -> float:
    """1 if the response ends in the number that the answer is, else 0.

    The last integer or decimal number of the response counts, compared by value: 7, 7.0 and 007
    are equal, 1,000 is 1000. Nothing but white space and punctuation may follow it, so a policy
    that goes on after its result is not paid. An answer that is not a number raises ValueError.
    """
    expected = _as_number(answer)
    matches = list(_NUMBER.finditer(_ascii_minus(response)))
    if not matches or any(character.isalnum() for character in response[matches[-1].end() :]):
        return 0.0
    return float(_value(matches[-1]) == expected)


@reward("gsm8k")
def gsm8k(*, prompt: str, response: str, answer: str) -> float:
    """1 if the response's result is the number after `####` in the answer, else 0.

    The response's result is the first number after its last `####`; without that mark it is the
    last number of the text. A mark that no number follows scores 0. Thousands separators, `$` and
    `%` do not matter. An answer without a number raises ValueError. (Cobbe et al. 2021,
    arXiv 2110.14168)
    """
    expected = _as_number(answer.rpartition("####")[2])
    _, mark, result = _ascii_minus(response).rpartition("####")
    matches = list(_NUMBER.finditer(result))
    if not matches:
        return 0.0
    return float(_value(matches[0 if mark else -1]) == expected)


def _as_number(answer: str) -> Decimal:
    match = _NUMBER.fullmatch(_ascii_minus(answer).strip().rstrip("%."))
    if match is None:
        raise ValueError(f"the answer {answer[-40:]!r} is not a number")
    return _value(match)


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["sign"] else value


def _ascii_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def resolve_reward(spec: str, flag: str = "--rl-reward") -> RewardFunction:
    """The function that `spec` names: a built-in name, or `package.module:function`.

    Modules are looked for on `sys.path` and then in the working directory, which is added to it.
    Raises UsageError for an unknown name, a module that is missing or raises on import, a missing
    attribute, and anything that cannot be called with `prompt`, `response` and `answer`.
    """
    module_name, colon, attribute = spec.partition(":")
    if not colon:
        if spec not in _BY_NAME:
            raise UsageError(
                f"{flag} {spec} is no built-in reward{_nearest(spec, list(_BY_NAME))}; the "
                f"built-in ones are {', '.join(sorted(_BY_NAME))}, and your own is given as "
                "package.module:function"
            )
        return _BY_NAME[spec]
    module = _import_module(module_name, spec, flag)
    try:
        function = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise UsageError(
            f"{flag} {spec} cannot be used, because module {module_name} has no attribute "
            f"{attribute!r}{_nearest(attribute, list(vars(module)))}; name one that exists"
        ) from error
    _check_callable(function, spec, flag)
    return function


def _import_module(module_name: str, spec: str, flag: str):
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{flag} {spec} cannot be imported, because there is no module {error.name!r} on "
                "sys.path or in the working directory; check the name or set PYTHONPATH"
            ) from error
        raise _import_error(module_name, spec, flag, error) from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises is theirs to see
        raise _import_error(module_name, spec, flag, error) from error


def _import_error(module_name: str, spec: str, flag: str, error: BaseException) -> UsageError:
    return UsageError(
        f"{flag} {spec} cannot be used, because importing {module_name!r} raised "
        f"{type(error).__name__}: {_shortened(str(error))}; make "
        f"`python -c 'import {module_name}'` work"
    )


def _check_callable(function: object, spec: str, flag: str) -> None:
    if not callable(function):
        raise UsageError(
            f"{flag} {spec} is of type {type(function).__name__}, which cannot be called; name a "
            "function fn(prompt=, response=, answer=) that returns a number"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some C functions have none; the first call will tell
        return
    try:
        signature.bind(prompt="", response="", answer="")
    except TypeError as error:
        raise UsageError(
            f"{flag} {spec} has the parameters {signature}, but is called as "
            f"fn(prompt=, response=, answer=) ({error}); give it these three keywords"
        ) from error


def _nearest(name: str, names: list[str]) -> str:
    nearest = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _shortened(text: str) -> str:
    if len(text) <= _MAX_DETAIL_CHARACTERS:
        return text
    return text[:_MAX_DETAIL_CHARACTERS] + " ..."


# What a worker process runs -----------------------------------------------------------------------


class Outcome(NamedTuple):
    """What became of one sample; `kind` groups the failures that are counted and logged once."""

    reward: float
    kind: str | None = None
    detail: str = ""

    @property
    def failure(self) -> str | None:
        """What went wrong, for people to read; None if nothing did."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


class WorkerProcess(SpawnProcess):
    """A spawned process that does not run the parent's main script again.

    `multiprocessing` imports the parent's `__main__` in every spawned child, here a trainer with
    torch, Megatron and vLLM: seconds and gigabytes for a function that compares two strings. It
    leaves out a main module whose spec says that it is called `__main__`, as that of a package's
    `__main__.py` may be, so this process is started while the spec says so.
    """

    def start(self) -> None:
        """Start the process, as a child to which the main script is unknown."""
        with _nameless_main():
            super().start()


class WorkerContext(SpawnContext):
    """Fork is not an option: the trainer has threads (gloo, vLLM, pebble) and maybe CUDA."""

    Process = WorkerProcess


_main_spec_lock = threading.Lock()


@contextmanager
def _nameless_main() -> Iterator[None]:
    main_module = sys.modules["__main__"]
    with _main_spec_lock:
        main_spec = main_module.__spec__
        main_module.__spec__ = ModuleSpec("__main__", loader=None)
        try:
            yield
        finally:
            main_module.__spec__ = main_spec


def start_worker(spec: str) -> None:
    """First thing that runs in a worker; limits and the cleaning of its environment belong here.

    Imports the user's module now, so that the import does not count against the first sample.
    """
    # A worker that the pool stops must go at once: pebble holds the lock of all workers meanwhile,
    # and a handler in Python would wait for the C code that the reward may be hanging in.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent()
    try:
        _resolve_once(spec)
    except UsageError:
        return  # raised again by the first sample, which can carry it to the trainer


def score_sample(
    spec: str, prompt: str, response: str, answer: str, timeout_seconds: float
) -> Outcome:
    """Scores one sample in a worker. The process ends by SIGALRM when the time is over.

    The kernel's timer starts with the sample, ends Python and C code alike, and can only hit the
    sample that is running. Raises UsageError if `spec` cannot be resolved; whatever the reward
    function itself does wrong is part of the outcome.
    """
    function = _resolve_once(spec)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the last sample may have left a handler
    signal.setitimer(signal.ITIMER_REAL, timeout_seconds)
    try:
        return _checked(function(prompt=prompt, response=response, answer=answer))
    except BaseException as error:  # SystemExit too costs only this sample
        return Outcome(0.0, f"raised {type(error).__name__}", _text_of(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _checked(value: object) -> Outcome:
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        return Outcome(0.0, f"returned {type(value).__name__}", "a reward is a finite number")
    number = float(value)
    if not math.isfinite(number):
        return Outcome(0.0, f"returned {number}", "a reward is a finite number")
    return Outcome(number)


def _text_of(error: BaseException) -> str:
    try:
        return _shortened(str(error))
    except Exception:  # an exception of the user's whose __str__ raises
        return "(its text cannot be shown)"


@functools.lru_cache(maxsize=1)
def _resolve_once(spec: str) -> RewardFunction:
    return resolve_reward(spec)


def _die_with_parent() -> None:
    """A trainer that is killed closes nothing, and a worker that hangs would never notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it died before the call above
        os._exit(1)
