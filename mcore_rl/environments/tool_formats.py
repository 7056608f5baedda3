"""The formats in which models call tools, by names of vLLM's parsers.

A chat template that describes tools writes calls in one format, which its markers tell. For models
whose template describes none, `ToolEnvironment` has a format of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls and reasoning.

    Example: of Qwen3: `ToolFormat("hermes", "qwen3", "<tool_call>")`.
    """

    tool_parser: str  # vLLM's name, as in --tool-call-parser
    reasoning_parser: str | None = None  # likewise; None: the model does not reason, or as text
    opening: str | None = None  # begins a call; None: unknown
    thought_end: str = "</think>"  # ends reasoning
    marks_answers: bool = False  # an answer is never written as reasoning is


# Markers that a template has, all of them -> its format; the first that fits. DeepSeek-V3 and R1
# write arguments as Markdown. Their own template describes no tools, those of vLLM's examples do.
_FORMATS: Mapping[tuple[str, ...], ToolFormat] = {
    ("<|channel|>", "functions."): ToolFormat(
        "openai", "openai_gptoss", "to=functions.", "<|end|>", marks_answers=True
    ),
    ("<｜tool▁sep｜>", "```json", "</think>"): ToolFormat(
        "deepseek_v3", "deepseek_r1", "<｜tool▁calls▁begin｜>"
    ),
    ("<｜tool▁sep｜>", "```json"): ToolFormat("deepseek_v3", None, "<｜tool▁calls▁begin｜>"),
    ("<｜tool▁sep｜>",): ToolFormat("deepseek_v31", "deepseek_v3", "<｜tool▁calls▁begin｜>"),
    ("<|tool_calls_section_begin|>",): ToolFormat(
        "kimi_k2", "kimi_k2", "<|tool_calls_section_begin|>"
    ),
    ("<arg_key>",): ToolFormat("glm45", "glm45", "<tool_call>"),
    ("<function=", "<parameter="): ToolFormat("qwen3_coder", "qwen3", "<tool_call>"),
    ("<tool_call>", '"arguments"', "<think>"): ToolFormat("hermes", "qwen3", "<tool_call>"),
    ("<tool_call>", '"arguments"'): ToolFormat("hermes", None, "<tool_call>"),
    ("<|start_header_id|>", '"parameters"'): ToolFormat("llama3_json", None, '{"name"'),
}


def format_of(template: str | None, tool_parser: str, reasoning_parser: str) -> ToolFormat | None:
    """Return the format of a chat template's text; None: it has none that is known. The names are
    those of the flags: AUTO finds a parser, NONE does without; another name is that of vLLM."""
    text = template or ""
    known = next(
        (each for markers, each in _FORMATS.items() if all(marker in text for marker in markers)),
        None,
    )
    if tool_parser == NONE or (tool_parser == AUTO and (known is None or "tools" not in text)):
        return None
    if tool_parser == AUTO:
        assert known is not None, "checked above"
        tool_format = known
    else:
        same = (each for each in _FORMATS.values() if each.tool_parser == tool_parser)
        tool_format = next(same, ToolFormat(tool_parser, known.reasoning_parser if known else None))
    if reasoning_parser == AUTO:
        return tool_format
    chosen = None if reasoning_parser == NONE else reasoning_parser
    return replace(tool_format, reasoning_parser=chosen)
