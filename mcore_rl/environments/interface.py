"""The interface of a user's environment, and the lookup of `--rl-environment`.

    from mcore_rl.api.environment import Environment, StepResult

    class Guess(Environment):
        def start(self, prompt):
            self.number = random.Random(prompt.seed).randrange(100)

        async def step(self, response):
            guess = int(response.text)
            if guess == self.number:
                return StepResult(reward=1.0, done=True)
            more = "lower" if guess > self.number else "higher"
            return StepResult([{"role": "user", "content": more}])

Name it as `package.module:Class`, or, with `class Guess(Environment, name="guess")` in a file of
`--rl-import`, by that name. A class that is not a subclass works if it has `start` and `step`.

Environment processes import this module: it, and whatever it imports, must stay free of torch,
Megatron, vLLM and numpy.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.near_names import did_you_mean
from mcore_rl.common.user_code import find_in_module, import_user_file, meant_own
from mcore_rl.data.sources import NO_ENVIRONMENT
from mcore_rl.environments.tool_formats import AUTO, NONE

Message = Mapping[str, str]  # "role", "content", and other keys that the chat template reads
Text = str | Sequence[Message] | Sequence[int]  # a text used unchanged, messages, or token ids

FLAG = "--rl-environment"

BY_NAME: dict[str, type] = {}
_REGISTERED_AT: dict[str, tuple[str, int]] = {}  # name -> file and line of its class
SHIPPED = {
    "calculator": "mcore_rl.environments.calculator",
    "python_sandbox": "mcore_rl.environments.python_sandbox",
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has written in its own format.

    Example: `ToolCall("price", '{"item": "apple"}')`.
    """

    name: str
    arguments: str  # a JSON object, unless the model wrote something else
    id: str = ""  # if the format has one


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn in the model's own format, taken apart.

    Example: `Turn("I look it up.", "Which price?", (ToolCall("price", "{}"),))`.
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    is_malformed: bool = False  # it begins a call that cannot be read


@dataclass(frozen=True, slots=True)
class EnvironmentPrompt:
    """The prompt as its environment receives it."""

    text: str
    answer: Any  # a text, a list or an object
    row: Mapping[str, Any]  # all columns of the prompts file
    seed: int  # unique to the sample; the same when a run is repeated
    has_tool_format: bool = False  # the model has one, which --rl-tool-parser reads


@dataclass(frozen=True, slots=True)
class Response:
    """The model's text in one turn."""

    text: str  # without the end of sequence
    token_ids: tuple[int, ...]  # with it
    turn: int  # 1, 2, ...
    finish_reason: str  # "stop" or "length"
    in_parts: Turn | None = None  # if the environment has `tool_schemas`


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's answer to a turn.

    `observation` is the model's next input: a text, used unchanged; messages, which the chat
    template renders; or token ids. It is ignored once `done`.
    """

    observation: Text | None = None
    reward: float = 0.0  # of this turn; a finite number
    done: bool = False


class Environment:
    """One sample's environment, created without arguments in its own process, called turn by turn.

    Each call may take `--rl-environment-timeout` seconds. A failure fails only its sample.

    A class that overrides `state` and `restore` can continue a conversation in another process: in
    a later step (--rl-partial-rollouts), or after a run that samples ahead has resumed.

    `tool_schemas`, set by `start` and `restore`, are functions in the format of OpenAI's API, which
    the chat template describes to the model. Turns then come taken apart, as `Response.in_parts`.
    Only for a prompt that `has_tool_format`.
    """

    tool_schemas: Sequence[Mapping[str, Any]] = ()

    def __init_subclass__(cls, *, name: str | None = None, **more: Any) -> None:
        """`name` registers the class for `--rl-environment`. ValueError: another class has the
        name, or the flag cannot hold it."""
        super().__init_subclass__(**more)
        if name is None:
            return
        if not name.isidentifier() or name == NO_ENVIRONMENT:
            raise ValueError(f"an environment cannot be called {name!r}; give letters, digits, _")
        caller = sys._getframe(1)
        place = (os.path.realpath(caller.f_code.co_filename), caller.f_lineno)
        shipped = name in SHIPPED and cls.__module__ != SHIPPED[name]
        if shipped or (name in BY_NAME and _REGISTERED_AT[name] != place):
            raise ValueError(f"two environments are called {name!r}; rename one")
        BY_NAME[name], _REGISTERED_AT[name] = cls, place

    def start(self, prompt: EnvironmentPrompt) -> Text | None | Awaitable[Text | None]:
        """Return the model's first input; None keeps the prompt unchanged. May be async."""
        return None

    def step(self, response: Response) -> StepResult | tuple[Any, ...] | Awaitable[Any]:
        """Return the answer to a turn, as a `StepResult` or a tuple of its fields. May be async."""
        raise NotImplementedError

    def state(self) -> Any:
        """Return what `restore` needs besides the prompt, as JSON values, at most 256 KiB. Called
        after `start` and after each step that is not done. May be async."""
        raise NotImplementedError

    def restore(self, prompt: EnvironmentPrompt, state: Any) -> object:
        """Continue as an environment whose `state` returned this value; called instead of `start`.
        The next call may be `step` with a turn that the other did not answer. May be async."""
        raise NotImplementedError

    def close(self) -> object:
        """Clean up when no step will follow; not called if the process was killed. May be async."""
        return None


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """The values of the `--rl-environment*` flags."""

    name: str
    timeout_seconds: float  # of each call
    memory_gib: float = 4.0  # of each process; 0: unlimited
    imports: tuple[str, ...] = ()  # files to run before the name is resolved
    environment_names: tuple[str, ...] = ()  # variables that it gets besides the usual ones
    sandbox_accept: tuple[str, ...] = ()  # protections that python_sandbox may lack
    max_open: int = 256  # concurrent processes
    max_turns: int = 8
    max_turn_tokens: int | None = None  # None: the rest of the response
    # `SourceSpec.key` -> name, of sources with an environment of their own, or NO_ENVIRONMENT
    of_sources: Mapping[str, str] = field(default_factory=dict)
    needs_state: bool = False  # conversations continue in later steps
    tool_parser: str = AUTO  # see `tool_formats.format_of`
    reasoning_parser: str = AUTO
    has_tool_format: bool = False  # the model has a format that they read

    @property
    def names_parsers(self) -> bool:
        """Whether the user has named a parser of vLLM."""
        return not {self.tool_parser, self.reasoning_parser} <= {AUTO, NONE}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all environments."""
        names = dict.fromkeys((self.name, *self.of_sources.values()))
        return tuple(name for name in names if name != NO_ENVIRONMENT)

    def name_for(self, source: str) -> str:
        """Return the environment of a source's samples, by `SourceSpec.key`."""
        return self.of_sources.get(source, self.name)

    def class_for(self, source: str) -> str:
        """Return `name_for` without the module or file of a class, which may move."""
        return self.name_for(source).rpartition(":")[2]


class SingleTurn(Environment):
    """The environment of samples that have none: it ends after the first turn."""

    def step(self, response: Response) -> StepResult:
        return StepResult(done=True)

    def state(self) -> None:
        return None

    def restore(self, prompt: EnvironmentPrompt, state: Any) -> None:
        return None


def resolve_environment(
    spec: str, imports: Sequence[str] = (), *, needs_state: bool = False
) -> type:
    """Return the class that `spec` names: a shipped one, one of `imports`, `package.module:Class`
    or `path/file.py:Class`.

    Runs the files `imports`. Raises UsageError for an unknown name, a module that is missing or
    raises on import, and a class that cannot be created or lacks `start` and `step`, or, with
    `needs_state`, `state` and `restore`.
    """
    for path in imports:
        import_user_file(path)
    if ":" in spec:
        environment = find_in_module(spec, f"{FLAG} {spec}")
    else:
        if spec in SHIPPED:
            importlib.import_module(SHIPPED[spec])
        environment = BY_NAME.get(spec)
        if environment is None:
            known = sorted({*SHIPPED, *BY_NAME})
            raise UsageError(
                f"is not an environment{did_you_mean(spec, known) or meant_own(spec)}",
                flag=f"{FLAG} {spec}",
                remedy=f"there are {', '.join(known)}, and your own is given as "
                "package.module:Class or ./file.py:Class",
            )
    _check_class(environment, spec)
    assert isinstance(environment, type)
    if needs_state and not keeps_state(environment):
        raise UsageError(
            f"cannot be combined with {FLAG} {spec}: the class has no state and restore, so a "
            "conversation cannot continue in a later step",
            flag="--rl-partial-rollouts",
            remedy="give the class state(self) and restore(self, prompt, state), or drop one of "
            "the two; --rl-oversample alone may stay",
        )
    return environment


def keeps_state(environment: type) -> bool:
    """Return whether a class has both `state` and `restore`."""
    return all(
        callable(method := getattr(environment, name, None))
        and method is not getattr(Environment, name)
        for name in ("state", "restore")
    )


def _check_class(candidate: object, spec: str) -> None:
    flag = f"{FLAG} {spec}"
    if not isinstance(candidate, type):
        raise UsageError(
            f"is of type {type(candidate).__name__}, not a class", flag=flag, remedy="name a class"
        )
    step = getattr(candidate, "step", None)
    missing = [name for name in ("start", "step") if not callable(getattr(candidate, name, None))]
    if missing or step is Environment.step:
        raise UsageError(
            f"has no method {missing[0] if missing else 'step'}",
            flag=flag,
            remedy="give it start(self, prompt) and step(self, response)",
        )
    for name, arguments in (("__init__", 1), ("start", 2), ("step", 2)):
        try:
            signature = inspect.signature(getattr(candidate, name))
            signature.bind(*[None] * arguments)
        except ValueError:  # some in C have none; the first call will show
            continue
        except TypeError as error:
            raise UsageError(
                f"has {name}({', '.join(signature.parameters)}), which is called with "
                f"{'no argument' if arguments == 1 else 'one argument'} ({error})",
                flag=flag,
                remedy="give it start(self, prompt), step(self, response) and no more",
            ) from error
