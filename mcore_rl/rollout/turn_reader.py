"""Reads turns in the model's own format, by the parsers with which `vllm serve` reads them."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from mcore_rl.common.errors import UsageError
from mcore_rl.common.near_names import did_you_mean
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.environments.interface import EnvironmentSpec, ToolCall, Turn
from mcore_rl.environments.tool_formats import ToolFormat

logger = logging.getLogger(__name__)

_TAIL_TOKENS = 16  # of what precedes a turn: enough for the beginning of an assistant's message


class TurnReader:
    """Parsers with a model's tokenizer. Local.

    Example: `TurnReader(tokenizer, ToolFormat("hermes", "qwen3", "<tool_call>"), ends=[2])`.
    """

    def __init__(self, tokenizer: Any, form: ToolFormat, ends: Sequence[int]) -> None:
        """`tokenizer` is that of transformers, `ends` are the tokens that end a turn. Raises
        UsageError if vLLM has no such parser, or it cannot be used with the tokenizer."""
        self._tokenizer, self._form, self._ends = tokenizer, form, frozenset(ends)
        self._parser = _parser_class(tokenizer, form.tool_parser, form.reasoning_parser)
        self._parser_of_calls = (
            self._parser if form.marks_answers else _parser_class(tokenizer, form.tool_parser, None)
        )
        self._has_warned = False

    @classmethod
    def of_model(
        cls,
        folder: Path,
        tokens: ConversationTokens,
        spec: EnvironmentSpec,
        *,
        trust_remote_code: bool,
    ) -> Self | None:
        """Return the reader of the checkpoint's format; None if it has none, or, with a warning, if
        the parsers that are found for it do not fit. Raises UsageError for parsers that the user
        has named."""
        form = tokens.tool_format(spec.tool_parser, spec.reasoning_parser)
        if form is None:
            return None
        tokenizer = load_tokenizer(
            folder, trust_remote_code=trust_remote_code, needs_template=False
        )
        try:
            return cls(tokenizer, form, sorted(tokens.ends))
        except UsageError as error:
            if spec.names_parsers:
                raise
            logger.warning("tools are called in mcore_rl's own format, because %s", error.fault)
            return None

    def read(
        self, before: np.ndarray, turn: np.ndarray, tools: str, *, is_cut: bool = False
    ) -> Turn:
        """Return what a turn says. `before` and `turn` are int32 ids, of the conversation up to the
        turn and of the turn with its end; `tools` are the JSON of their schemas. `is_cut`: the turn
        ended by its length."""
        ids = turn.tolist()
        if ids and ids[-1] in self._ends:
            ids = ids[:-1]
        text = self._text(ids)
        # A template may have closed the reasoning, or left it out.
        thought_end = self._form.thought_end
        is_open = not self._text(before[-_TAIL_TOKENS:].tolist()).rstrip().endswith(thought_end)
        make = self._parser if is_open else self._parser_of_calls
        request = _request(tools)
        try:
            reasoning, content, calls = make(self._tokenizer, request.tools).parse(
                text, request, enable_auto_tools=True, model_output_token_ids=ids
            )
        except Exception as error:  # whatever a parser raises on a model's text
            self._warn(error)
            return Turn(content=text, is_malformed=True)
        tool_calls = tuple(
            ToolCall(each.name, each.arguments, each.id or "") for each in calls or ()
        )
        if not (tool_calls or content is not None or is_cut or self._form.marks_answers):
            if thought_end not in text:
                content, reasoning = reasoning, None  # an answer without reasoning
        is_thought = content is None and reasoning is not None
        is_malformed = not tool_calls and self._begins_call(text, is_thought=is_thought)
        return Turn(content or "", reasoning or "", tool_calls, is_malformed)

    def _begins_call(self, text: str, *, is_thought: bool) -> bool:
        """Return whether a turn begins a call behind its reasoning, which `is_thought` if nothing
        ends it."""
        opening, (_, ended, said) = self._form.opening, text.rpartition(self._form.thought_end)
        return opening is not None and opening in said and not (is_thought and not ended)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the parser %s failed on a turn (%s: %s), which becomes an observation",
                self._form.tool_parser,
                type(error).__name__,
                error,
            )


@functools.lru_cache(maxsize=64)
def _request(tools: str) -> Any:
    """Return the request with these tools that a parser reads."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    message = {"role": "user", "content": ""}
    choice = (
        {"tools": definitions, "tool_choice": "auto"} if (definitions := json.loads(tools)) else {}
    )
    return ChatCompletionRequest(model="", messages=[message], **choice)


def _parser_class(tokenizer: Any, tool_parser: str, reasoning_parser: str | None) -> Any:
    from vllm.parser.parser_manager import ParserManager
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for flag, name, manager in (
        ("--rl-tool-parser", tool_parser, ToolParserManager),
        ("--rl-reasoning-parser", reasoning_parser, ReasoningParserManager),
    ):
        known = sorted(manager.list_registered())
        if name is not None and name not in known:
            raise UsageError(
                f"is not a parser of this vLLM{did_you_mean(name, known)}",
                flag=f"{flag} {name}",
                remedy=f"choose one of {', '.join(known)}, or none",
            )
    # The two parsers of gpt-oss only stand for the one that vLLM returns with `is_harmony`.
    whole = {"is_harmony": True} if tool_parser == "openai" else {}
    try:
        parser: Any = ParserManager.get_parser(
            tool_parser_name=tool_parser,
            reasoning_parser_name=reasoning_parser,
            enable_auto_tools=True,
            model_name="",
            **whole,
        )
        # With a turn of no tokens: that of gpt-oss then loads its vocabulary, or downloads it.
        parser(tokenizer).parse("", _request("[]"), model_output_token_ids=[])
    except Exception as error:  # it lacks a token, or the parser is for a tokenizer of its own
        raise UsageError(
            f"cannot be used with this tokenizer ({type(error).__name__}: {error})",
            flag=f"--rl-tool-parser {tool_parser}",
            remedy="choose another parser, or none",
        ) from error
    return parser
