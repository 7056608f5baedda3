"""Python functions as tools, called in the format that the model has learned.

    class Shop(ToolEnvironment, name="shop"):
        def price(self, item: str, count: int = 1) -> float:
            \"\"\"The price of some pieces of an item.\"\"\"
            return count * PRICES[item]

        tools = (price,)

        def answered(self, text):
            return float(self.prompt.answer in text)

The chat template describes the tools to the model, which calls them in its own format. Without such
a template, or with --rl-tool-parser none, a system message describes them by JSON schemas. A turn
then calls one or more by `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Each result,
or the error of the call, becomes a message of role `tool`. A turn without a call is the answer.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from mcore_rl.environments.interface import (
    Environment,
    EnvironmentPrompt,
    Response,
    StepResult,
    ToolCall,
)
from mcore_rl.isolation.process import text_of

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_INSTRUCTIONS = """You may call functions. They are, as JSON schemas:
<tools>
{schemas}
</tools>
To call one, write its name and its arguments as a JSON object within these tags:
<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>"""
_UNREADABLE = "error: the call cannot be read"
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


class ToolEnvironment(Environment):
    """An environment that answers calls of `tools` until a turn calls none.

    Tools are methods or functions, sync or async. A subclass that overrides `state` can be
    continued; if it has attributes of its own, it also overrides `restore`.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    role: ClassVar[str] = "tool"  # of the results; "user" for a chat template without it

    def start(self, prompt: EnvironmentPrompt) -> list[dict[str, str]]:
        self._begin(prompt)
        if self.tool_schemas:
            return [{"role": "user", "content": prompt.text}]
        schemas = "\n".join(json.dumps(schema_of(tool)) for tool in self.tools)
        return [
            {"role": "system", "content": _INSTRUCTIONS.format(schemas=schemas)},
            {"role": "user", "content": prompt.text},
        ]

    def restore(self, prompt: EnvironmentPrompt, state: Any) -> object:
        self._begin(prompt)
        return None

    def _begin(self, prompt: EnvironmentPrompt) -> None:
        self.prompt = prompt
        if prompt.has_tool_format:
            self.tool_schemas = [schema_of(tool) for tool in self.tools]

    async def step(self, response: Response) -> StepResult:
        turn = response.in_parts
        text = response.text if turn is None else turn.content
        calls = _CALL.findall(text) if turn is None else turn.calls
        if turn is not None and turn.is_malformed:
            return StepResult([self._message(_UNREADABLE)])
        if not calls:
            value = self.answered(text)
            reward = await value if inspect.isawaitable(value) else value
            return StepResult(reward=reward, done=True)
        return StepResult([await self._answer(call) for call in calls])

    def _message(self, content: str, **more: str) -> dict[str, str]:
        return {"role": self.role, "content": content, **more}

    async def _answer(self, call: str | ToolCall) -> dict[str, str]:
        """Return the message with the result of a call, in the own format or read by a parser."""
        if isinstance(call, str):
            return self._message(await self._result(call))
        link = {"name": call.name, **({"tool_call_id": call.id} if call.id else {})}
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError:
            return self._message(_UNREADABLE, **link)
        written = json.dumps({"name": call.name, "arguments": arguments})
        return self._message(await self._result(written), **link)

    def answered(self, text: str) -> float | Awaitable[float]:
        """Return the reward of a turn that calls no tool; may be async."""
        return 0.0

    async def _result(self, call: str) -> str:
        try:
            fields = json.loads(call)
            name, arguments = fields["name"], fields.get("arguments", {})
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return 'error: a call is {"name": ..., "arguments": {...}}'
        named = {tool.__name__: tool for tool in self.tools}
        if not isinstance(name, str) or name not in named:
            return f"error: there is no function {name!r}, but {', '.join(named)}"
        tool = named[name]
        own = (self,) if _is_method(tool) else ()
        try:
            inspect.signature(tool).bind(*own, **arguments)
        except TypeError as error:
            return f"error: {error}"
        try:
            value = tool(*own, **arguments)
            value = await value if inspect.isawaitable(value) else value
        except Exception as error:  # the model's arguments may be at fault
            return f"error: {type(error).__name__}: {text_of(error)}"
        return value if isinstance(value, str) else json.dumps(value, default=str)


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """Describe a function in the format of OpenAI's API: name, docstring, parameters."""
    hints = typing.get_type_hints(tool)
    parameters = list(inspect.signature(tool).parameters.values())[_is_method(tool) :]
    function = {
        "name": tool.__name__,
        "description": inspect.getdoc(tool) or "",
        "parameters": {
            "type": "object",
            "properties": {each.name: _schema(hints.get(each.name, Any)) for each in parameters},
            "required": [each.name for each in parameters if each.default is each.empty],
        },
    }
    return {"type": "function", "function": function}


def _is_method(tool: Callable[..., Any]) -> bool:
    return next(iter(inspect.signature(tool).parameters), None) == "self"


def _schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type; unconstrained where JSON schema has no equivalent."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        kinds = [_schema(each) for each in inner if each is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return {"type": "object"}
    if isinstance(kind, type) and kind is not str and issubclass(kind, Sequence):
        return {"type": "array", **({"items": _schema(inner[0])} if inner else {})}
    return {"type": _TYPES[kind]} if kind in _TYPES else {}
