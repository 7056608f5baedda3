"""Tools in the model's own format: the template writes a call, and vLLM's parser reads it.

The templates of tests/data/tool_templates have the markers of published ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.data.options import DataOptions
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.environments.interface import (
    EnvironmentPrompt,
    EnvironmentSpec,
    Response,
    StepResult,
    ToolCall,
    Turn,
)
from mcore_rl.environments.tool_formats import ToolFormat, format_of
from mcore_rl.environments.tools import ToolEnvironment, schema_of
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling
from mcore_rl.rollout.conversations import Conversations, EpisodeEnd, NextTurn
from mcore_rl.rollout.segments import new_rollout
from mcore_rl.rollout.turn_reader import TurnReader

TEMPLATES = {
    path.stem: path.read_text().rstrip()
    for path in sorted((Path(__file__).parents[1] / "data" / "tool_templates").glob("*.jinja"))
}
# name -> reasoning parser, ends of a turn, first that of a turn with a call
FORMATS = {
    "deepseek_v3": (None, "</s>"),
    "deepseek_v31": ("deepseek_v3", "</s>"),
    "glm45": ("glm45", "<|observation|> <|user|> <|endoftext|>"),
    "hermes": ("qwen3", "<|im_end|>"),
    "kimi_k2": ("kimi_k2", "<|im_end|>"),
    "llama3_json": (None, "<|eot_id|>"),
    "openai": ("openai_gptoss", "<|call|> <|return|>"),
    "qwen3_coder": ("qwen3", "<|im_end|>"),
}
OF_LLAMA = "<|python_tag|>"  # its parser looks it up
OF_OSS = {
    "thought": "<|channel|>analysis<|message|>perhaps 4<|end|>",
    "said": "<|channel|>final<|message|>",
}
SPECIAL = re.compile(r"<[|｜][^<>]*?[|｜]>|\[gMASK\]|</?s>")
WORDS = re.compile(r"</?(?:tool_call|tool_response|think|arg_key|arg_value)>")
USER = {"role": "user", "content": "How much are two?"}
ARGUMENTS = {"item": "a pear", "count": 2}
LINK = {"name": "price", "tool_call_id": "functions.price:0"}


def price(item: str, count: int = 1) -> float:
    """The price of some pieces."""
    return {"a pear": 1.5}[item] * count


class Shop(ToolEnvironment):
    tools = (price,)

    def answered(self, text: str) -> float:
        return float(self.prompt.answer in text)


def of_gpt_oss() -> dict[str, int]:
    """ASCII and the special tokens of gpt-oss: its parser reads ids of its own vocabulary."""
    harmony = pytest.importorskip("openai_harmony")
    try:
        known = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except Exception as error:  # a download, unless TIKTOKEN_ENCODINGS_BASE names its folder
        pytest.skip(f"the vocabulary of gpt-oss is not here: {error}")
    names = "start message channel constrain call end return".split()
    special = {
        f"<|{name}|>": known.encode(f"<|{name}|>", allowed_special="all")[0] for name in names
    }
    written = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    ascii_ids = {written(chr(n))[0][0]: known.encode(chr(n))[0] for n in range(128)}
    return ascii_ids | special


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Bytes, and the markers of the template, of which some are special tokens."""
    alphabet = {c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    if name == "openai":
        alphabet = of_gpt_oss()
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    template, ends = TEMPLATES[name], FORMATS[name][1].split()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=ends[-1],
        additional_special_tokens=sorted({*SPECIAL.findall(template), *ends, OF_LLAMA}),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(sorted({*WORDS.findall(template), "<think>", "</think>"}))
    tokenizer.chat_template = template
    return tokenizer


class Model:
    """A tokenizer and its template, and what reads a turn."""

    def __init__(self, name: str) -> None:
        self.tokenizer, self.end = tokenizer_of(name), FORMATS[name][1].split()[0]
        ends = self.tokenizer.convert_tokens_to_ids(FORMATS[name][1].split())
        self.tokens = ConversationTokens(self.tokenizer, use_chat_template=True, ends=ends)
        form = self.tokens.tool_format("auto", "auto")
        assert form is not None
        self.form, self.reader = form, TurnReader(self.tokenizer, form, ends)
        self.tools = json.dumps([schema_of(price)])
        self.is_oss = name == "openai"

    def ids(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def render(self, *messages: dict[str, Any], opens_turn: bool) -> str:
        found = self.tokenizer.apply_chat_template(
            list(messages),
            tools=json.loads(self.tools),
            tokenize=False,
            add_generation_prompt=opens_turn,
        )
        return str(found)

    def calling(self, **more: Any) -> dict[str, Any]:
        """An assistant's message with the call."""
        function = {"name": "price", "arguments": ARGUMENTS}
        call = {"id": LINK["tool_call_id"], "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call], **more}

    def turn(self, **more: Any) -> str:
        """What the model writes for a call, as its template does, with the end of the turn."""
        before = self.render(USER, opens_turn=True)
        written = self.render(USER, self.calling(**more), opens_turn=False)
        assert written.startswith(before)
        return written.removeprefix(before).removesuffix("\n").removesuffix(self.end) + self.end

    def said(self, text: str) -> str:
        """What the model writes for an answer, with the end of the turn."""
        return OF_OSS["said"] + text + "<|return|>" if self.is_oss else text + self.end

    def read(self, text: str, **more: Any) -> Turn:
        before = self.ids(self.render(USER, opens_turn=True))
        return self.reader.read(before, self.ids(text), self.tools, **more)


@pytest.fixture(scope="module", params=sorted(FORMATS))
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


def begun() -> Shop:
    shop = Shop()
    shop.start(EnvironmentPrompt("How much?", "3", {}, 0, has_tool_format=True))
    return shop


def stepped(shop: Shop, turn: Turn) -> StepResult:
    return asyncio.run(shop.step(Response("", (), 1, "stop", turn)))


def test_formats_are_found_by_their_templates() -> None:
    assert sorted(TEMPLATES) == sorted(FORMATS)
    for name, (reasoning, _) in FORMATS.items():
        found = format_of(TEMPLATES[name], "auto", "auto")
        assert found is not None
        assert (found.tool_parser, found.reasoning_parser) == (name, reasoning)
        assert format_of(TEMPLATES[name], "none", "auto") is None
    assert format_of("{{ messages[0].content }}", "auto", "auto") is None
    assert format_of(None, "auto", "auto") is None
    named = format_of("{{ messages[0].content }}", "glm45", "none")
    assert named == ToolFormat("glm45", None, "<tool_call>")
    assert format_of(TEMPLATES["hermes"], "xlam", "auto") == ToolFormat("xlam", "qwen3")


def test_tools_are_described_by_the_template_or_in_our_own_words() -> None:
    shop, other = Shop(), Shop()
    prompt = EnvironmentPrompt("How much?", "3", {}, 0, has_tool_format=True)
    assert shop.start(prompt) == [{"role": "user", "content": "How much?"}]
    assert shop.tool_schemas == [schema_of(price)]
    roles = [each["role"] for each in other.start(EnvironmentPrompt("How much?", "3", {}, 0))]
    assert roles == ["system", "user"] and not other.tool_schemas


def test_calls_of_a_turn_in_parts_are_answered_and_unreadable_ones_observed() -> None:
    shop = begun()
    right = ToolCall("price", json.dumps(ARGUMENTS), LINK["tool_call_id"])
    answer = {"role": "tool", "content": "3.0", **LINK}
    assert stepped(shop, Turn("", calls=(right, right))).observation == [answer] * 2
    for turn, error in (
        (Turn("", is_malformed=True), "the call cannot be read"),
        (Turn("", calls=(ToolCall("price", "{"),)), "the call cannot be read"),
        (Turn("", calls=(ToolCall("price", "[]"),)), ""),
        (Turn("", calls=(ToolCall("price", "{}"),)), "missing a required argument: 'item'"),
        (Turn("", calls=(ToolCall("prize", "{}"),)), "there is no function 'prize', but price"),
    ):
        found = stepped(shop, turn)
        (message,) = found.observation
        assert message["content"].startswith(f"error: {error}") and not found.done
    assert stepped(shop, Turn("It is 3.", "thought of 4")) == StepResult(reward=1.0, done=True)
    assert stepped(shop, Turn("It is 4.", "thought of 3")) == StepResult(reward=0.0, done=True)


@pytest.mark.slow
def test_a_parser_reads_the_call_that_the_template_writes(model: Model) -> None:
    found = model.read(model.turn())
    (call,) = found.calls
    assert (call.name, json.loads(call.arguments)) == ("price", ARGUMENTS)
    assert not found.is_malformed and found.content.strip() == ""
    result = stepped(begun(), found).observation
    assert [message["content"] for message in result] == ["3.0"]


@pytest.mark.slow
def test_reasoning_is_no_part_of_the_answer(model: Model) -> None:
    if model.form.tool_parser == "openai":
        found = model.read(OF_OSS["thought"] + "<|start|>assistant" + model.said("It is 3."))
        assert (found.content, found.reasoning) == ("It is 3.", "perhaps 4")
        only = model.read(OF_OSS["thought"].removesuffix("<|end|>") + "<|return|>")
        assert (only.content, only.reasoning) == ("", "perhaps 4")
        called = model.read(model.turn(reasoning_content="two of them"))
        assert called.reasoning == "two of them" and len(called.calls) == 1
    if model.form.tool_parser in ("hermes", "qwen3_coder", "glm45"):
        found = model.read("<think>\nperhaps 4\n</think>\n\nIt is 3." + model.end)
        assert (found.content.strip(), found.reasoning.strip()) == ("It is 3.", "perhaps 4")
        called = model.read(model.turn(reasoning_content="two of them"))
        assert called.reasoning.strip() == "two of them" and len(called.calls) == 1
        cut = model.read("<think>\nperhaps 4", is_cut=True)
        assert "4" not in cut.content
    found = model.read(model.said("It is 3."))
    assert (found.content.strip(), found.calls, found.is_malformed) == ("It is 3.", (), False)


@pytest.mark.slow
def test_a_call_that_is_cut_anywhere_is_observed_or_answered(model: Model) -> None:
    turn, opening = model.turn(), model.form.opening
    assert opening is not None
    whole, begins = model.ids(turn), len(model.ids(turn[: turn.index(opening) + len(opening)]))
    for end in range(begins, len(whole) - 1, 3):
        found = model.read(model.tokenizer.decode(whole[:end]) + model.end)
        assert found.calls or found.is_malformed, model.tokenizer.decode(whole[:end])
        assert not stepped(begun(), found).done


@pytest.mark.slow
def test_unknown_parsers_are_refused_with_near_names() -> None:
    tokenizer = tokenizer_of("hermes")
    with pytest.raises(UsageError, match="--rl-tool-parser hermess .*did you mean hermes?"):
        TurnReader(tokenizer, ToolFormat("hermess"), [0])
    with pytest.raises(UsageError, match="--rl-reasoning-parser qwen33 is not .* qwen3, "):
        TurnReader(tokenizer, ToolFormat("hermes", "qwen33"), [0])


@pytest.mark.slow
def test_the_reader_of_a_checkpoint(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("hermes")
    tokenizer.save_pretrained(tmp_path)
    facts = {"eos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **facts}))
    tokens = ConversationTokens.of_model(tmp_path, DataOptions(), trust_remote_code=False)

    def reader(**names: str) -> TurnReader | None:
        spec = EnvironmentSpec("any", 1.0, **names)  # type: ignore[arg-type]
        return TurnReader.of_model(tmp_path, tokens, spec, trust_remote_code=False)

    model, found = Model("hermes"), reader()
    assert found is not None
    before = model.ids(model.render(USER, opens_turn=True))
    (call,) = found.read(before, model.ids(model.turn()), model.tools).calls
    assert json.loads(call.arguments) == ARGUMENTS
    assert reader(tool_parser="none") is None
    with pytest.raises(UsageError, match="--rl-tool-parser hermess"):
        reader(tool_parser="hermess")
    assert format_of(TEMPLATES["hermes"], "auto", "auto") == tokens.tool_format("auto", "auto")


@pytest.mark.slow
def test_a_conversation_is_the_templates_and_keeps_generated_tokens(model: Model) -> None:
    """With the environment in a process of its own, as in a run."""
    spec = EnvironmentSpec(f"{__file__}:Shop", timeout_seconds=60.0)
    limits = {"max_prompt_tokens": 4000, "max_tokens": 4000}
    talks = Conversations(spec, model.tokens, reader=model.reader, **limits)
    prompt = Prompt(0, USER["content"], "3", np.array([1], np.int32))
    try:
        talks.start(0, new_rollout(prompt, 0, 1), seed=5)
        first = _event(talks)
        assert isinstance(first, NextTurn), first
        asked = first.so_far.prompt.token_ids
        assert model.tokenizer.decode(asked) == model.render(USER, opens_turn=True)
        turn = model.ids(model.turn())
        second = _ask(talks, first, turn)
        assert isinstance(second, NextTurn), second
        # What the model wrote, and only what the template puts behind it.
        result = {"role": "tool", "content": "3.0", **LINK}
        whole = model.render(USER, model.calling(), result, opens_turn=True)
        assert model.tokenizer.decode([*asked, *turn, *second.observed]) == whole
        ended = _ask(talks, second, model.ids(model.said("It is 3.")))
        assert isinstance(ended, EpisodeEnd) and ended.outcome.kind is None
        assert ended.outcome.reward == 1.0
    finally:
        talks.close()


def _event(talks: Conversations) -> Any:
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        if events := talks.events():
            return events[0]
        time.sleep(0.01)
    raise TimeoutError


def _ask(talks: Conversations, before: NextTurn, turn: np.ndarray) -> Any:
    so_far = before.so_far
    ids = np.concatenate([so_far.response_token_ids, before.observed, turn]).astype(np.int32)
    generated = np.ones(len(ids), np.bool_)
    generated[len(so_far.response_token_ids) : len(ids) - len(turn)] = False
    rollout = dataclasses.replace(
        so_far,
        response_token_ids=ids,
        rollout_log_probs=np.zeros(len(ids), np.float32),
        is_generated=generated,
    )
    request = Request(0, so_far.prompt.token_ids, Sampling(), 100)
    completion = Completion(request, turn, np.zeros(len(turn), np.float32), "stop")
    talks.turn(completion, rollout, "")
    return _event(talks)
