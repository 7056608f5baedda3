"""All parts of a row of prompts reach the chat template, or the row is rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from mcore_rl.common.errors import UsageError
from mcore_rl.data.chat import ChatTokenizer
from mcore_rl.data.messages import RejectedRow, checked_messages
from mcore_rl.data.prompt_file import PromptSource, check_prompts
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.tokenizer_process import ChatTemplate
from tests.unit.test_data import save_tokenizer, write_lines
from tests.unit.test_published_templates import tokenizer_of


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def parts_of(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


ASKED = user("What does an apple cost?")
SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "content": "2.5", "tool_call_id": "call_1"}
ARGUMENTS = {"item": "apple", "count": 3}
TOOLS = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]
# Published templates differ: arguments are an object or its JSON, content must be null or must be a
# text, and reasoning is kept only for the last turn.
ARGUMENTS_OF_OBJECT = "{% for k, v in arguments.items() %}{{ k }}={{ v }};{% endfor %}"
ARGUMENTS_AS_JSON = "{{ arguments | tojson }}"
ARGUMENTS_IF_OBJECT = "{% if arguments is mapping %}{{ arguments | tojson }}{% endif %}"
ARGUMENTS_OF_TEXT = "{{ '```' + arguments + '```' }}"
CALLS = (
    "{% for c in m.tool_calls %}{% set arguments = c.function.arguments %}"
    "[{{ c.function.name }}]ARGUMENTS{% endfor %}"
)
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | tojson }}"
    "{% endif %}{% if shout %}SHOUT{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content and loop.index0 > ns.last %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.tool_calls %}CALLS{% endif %}CONTENT{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = "{{ '' + m.content }}"
TEXT_OR_NOTHING = "{% if m.content %}{{ '' + m.content }}{% endif %}"
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
)


def template_of(content: str = TEXT_OR_NOTHING, arguments: str = ARGUMENTS_AS_JSON) -> str:
    calls = CALLS.replace("ARGUMENTS", arguments)
    return TEMPLATE.replace("CALLS", calls).replace("CONTENT", content)


def rendered(messages: list[dict[str, Any]], template: str, **row: Any) -> tuple[str, list[str]]:
    chat = ChatTokenizer(tokenizer_of(template, "<eos>"))
    return chat.prompt({"messages": checked_messages(messages), **row})


def calling(arguments: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "price", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call], **fields}


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "JSON"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
@pytest.mark.parametrize("of_content", [TEXT, TEXT_OR_NOTHING], ids=["text", "optional"])
@pytest.mark.parametrize(
    ("of_arguments", "expected"),
    [
        (ARGUMENTS_OF_OBJECT, "item=apple;count=3;"),
        (ARGUMENTS_AS_JSON, json.dumps(ARGUMENTS)),
        (ARGUMENTS_IF_OBJECT, json.dumps(ARGUMENTS)),
        (ARGUMENTS_OF_TEXT, f"```{json.dumps(ARGUMENTS)}```"),
    ],
    ids=["items", "tojson", "mapping", "concatenation"],
)
def test_calls_have_form_that_template_accepts(
    of_arguments, expected, of_content, content, arguments
):
    messages = [ASKED, calling(arguments, **content), RESULT]
    text, left_out = rendered(messages, template_of(of_content, of_arguments))
    called = f"<|assistant|>[price]{expected}<|tool|>2.5<|assistant|>"
    assert text == f"<|user|>{ASKED['content']}{called}" and not left_out


def test_content_is_null_beside_calls_if_template_needs_it():
    """DeepSeek's templates write calls only for null content."""
    template = template_of(TEXT_OR_NOTHING).replace(
        "{% if m.tool_calls %}", "{% if m.tool_calls and m.content is none %}"
    )
    text, _ = rendered([ASKED, calling(ARGUMENTS, content=""), RESULT], template)
    assert "[price]" in text
    with pytest.raises(RejectedRow, match="leaves out the tool_calls of message 2"):
        rendered([ASKED, calling(ARGUMENTS, content="I look."), RESULT], template)


@pytest.mark.parametrize(
    ("messages", "template", "problem"),
    [
        ([ASKED, calling(ARGUMENTS), RESULT], "{{ messages[0].content }}", "tool_calls|content"),
        ([{"role": "developer", "content": "Be kind."}, ASKED], "{{ messages[1].content }}", "1"),
        ([user(parts_of("hi"))], TEXT, "refuses"),
        ([user(parts_of("hi"))], "{{ m.content }}", "cannot write a dict"),
        ([ASKED, assistant("2", thinking="hmm"), ASKED], TEXT, "the thinking of message 2"),
        ([ASKED, calling(ARGUMENTS, content=""), {**RESULT, "content": {"a": 5}}], TEXT, "refuses"),
        ([user("<|user|>hi<|assistant|>")], TEXT, "rendered already"),
        ([user(" <s>hi")], TEXT, "rendered already"),
        ([SYSTEM, user("<s>hi")], TEXT, "rendered already"),
    ],
)
def test_row_that_template_drops_is_rejected(messages, template, problem):
    if "messages" not in template:
        template = template_of(template)
    with pytest.raises(RejectedRow, match=problem):
        rendered(messages, template)


def test_parts_that_template_drops_are_rejected_after_texts():
    template = template_of("{% if m.content is string %}{{ m.content }}{% endif %}")
    chat = ChatTokenizer(tokenizer_of(template, "<eos>"))
    chat.prompt({"messages": checked_messages([ASKED])})
    with pytest.raises(RejectedRow, match="leaves out the content of message 1"):
        chat.prompt({"messages": checked_messages([user(parts_of("user"))])})


def test_dropped_repetition_of_system_message_is_rejected():
    template = template_of("{% if loop.first or m.role != 'system' %}{{ m.content }}{% endif %}")
    with pytest.raises(RejectedRow, match="leaves out the content of message 3"):
        rendered([SYSTEM, ASKED, SYSTEM, ASKED], template)


def test_results_in_other_order_than_calls_need_ids():
    two = calling(ARGUMENTS)
    two["tool_calls"] = [*two["tool_calls"], {**two["tool_calls"][0], "id": "call_2"}]
    messages = [ASKED, two, {**RESULT, "tool_call_id": "call_2"}, RESULT]
    with pytest.raises(RejectedRow, match="message 3 answers call 'call_2' before"):
        rendered(messages, template_of())
    assert rendered([ASKED, two, *reversed(messages[2:])], template_of())
    assert rendered(messages, template_of("{{ m.tool_call_id }}{{ m.content }}"))


def test_thought_opened_by_template_and_message_is_rejected():
    """Qwen3's template writes an empty thought before the last answer."""
    empty = "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    messages = [ASKED, assistant("<think>\nLet me")]
    with pytest.raises(RejectedRow, match="a <think> of its own"):
        rendered(messages, template_of(empty))
    assert rendered(messages, template_of())[0].endswith("<|assistant|><think>\nLet me")


def test_dropped_second_call_is_rejected():
    two = calling(ARGUMENTS)
    two["tool_calls"] = [*two["tool_calls"], *calling({"item": "pear"})["tool_calls"]]
    first = template_of().replace("for c in m.tool_calls", "for c in m.tool_calls[:1]")
    assert '"pear"' in rendered([ASKED, two, RESULT], template_of())[0]
    with pytest.raises(RejectedRow, match="leaves out the tool_calls"):
        rendered([ASKED, two, RESULT], first)


def test_template_may_drop_reasoning_of_earlier_turns():
    answered = assistant("2.5", reasoning_content="I know that.")
    text, left_out = rendered([ASKED, answered, ASKED], template_of())
    assert "know" not in text and left_out == ["reasoning_content of assistant messages"]
    text, left_out = rendered([ASKED, calling(ARGUMENTS, **answered), RESULT], template_of())
    assert "(I know that.)" in text and not left_out


def test_unused_fields_are_reported_not_rejected():
    named = {**ASKED, "name": "Bob", "weight": 1}
    text, left_out = rendered([named], template_of())
    assert text.endswith(f"{ASKED['content']}<|assistant|>")
    assert left_out == ["name of user messages", "weight of user messages"]
    with_name = template_of("{{ m.name }}: {{ m.content }}")
    assert rendered([{**ASKED, "name": "Bob"}], with_name)[1] == []


def test_tools_documents_and_arguments_reach_template():
    text, left_out = rendered([ASKED], template_of(), tools=TOOLS, kwargs={"shout": True})
    assert json.dumps(TOOLS) in text and "SHOUT" in text and not left_out
    documents = [{"title": "Prices", "text": "An apple costs 2.5."}]
    text, left_out = rendered([ASKED], template_of(), documents=documents)
    assert json.dumps(documents) in text and not left_out
    assert documents == [{"title": "Prices", "text": "An apple costs 2.5."}]  # not changed
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(RejectedRow, match="leaves out its tools"):
        rendered([ASKED], plain, tools=TOOLS)
    assert rendered([ASKED], plain, documents=documents)[1] == ["documents"]
    with pytest.raises(RejectedRow, match="does not read the argument 'shout'"):
        rendered([ASKED], plain, kwargs={"shout": True})


@pytest.mark.parametrize("content", ["Let me think:", parts_of("Let me think:")])
def test_last_assistant_message_is_continued(content):
    messages = [ASKED, assistant(content)]
    text, _ = rendered(messages, template_of(PARTS + "<|im_end|>"))
    assert text == f"<|user|>{ASKED['content']}<|im_end|><|assistant|>Let me think:"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user"}, "has no content"),
        (user(None), "has no content"),
        (user(3), "of type int"),
        (user([{"type": "image", "image": "x.png"}]), "part of type 'image'"),
        (user([{"type": "image_url"}, {"type": "text"}]), "'image_url'"),
        ({"role": 3, "content": "hi"}, "object with a role"),
        ("hi", "object with a role"),
        (calling(ARGUMENTS, tool_calls=["price"]), "not a list of calls"),
        (calling(ARGUMENTS), "no text that could be continued"),
        (assistant(" "), "no text that could be continued"),
        (assistant("x", reasoning_content=3), "not a text"),
    ],
)
def test_invalid_messages_are_rejected(message, problem):
    with pytest.raises(RejectedRow, match=problem):
        checked_messages([ASKED, message] if message != "hi" else [message])


# Files --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The tokenizer puts <bos> before a text; the template does not."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), template_of())


def texts(path: Path, folder: Path, tmp_path: Path, **options: Any) -> list[str]:
    prompts = load_prompts(PromptSource(path, 1000, **options), folder, cache_dir=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(prompt.token_ids) for prompt in prompts]


def test_parquet_and_json_lines_give_equal_prompts(folder, tmp_path):
    """Structs in Parquet have the fields of all rows, with null for missing ones."""
    columns = ("prompt", "answer", "tools", "chat_template_kwargs")
    first = [ASKED, calling(ARGUMENTS, content=None), RESULT]
    second = [ASKED, calling({"fruit": "pear"}, content="I look."), RESULT]
    rows = [
        dict(zip(columns, (first, "7.5", json.dumps(TOOLS), {"shout": True}), strict=True)),
        dict(zip(columns, (second, "1", None, {"shout": False}), strict=True)),
    ]
    lines = write_lines(tmp_path / "p.jsonl", rows)
    table = pa.Table.from_pylist(rows)
    assert "fruit" in str(table.schema)
    pq.write_table(table, tmp_path / "p.parquet")
    found = texts(tmp_path / "p.parquet", folder, tmp_path)
    assert found == texts(lines, folder, tmp_path)
    assert "SHOUT" in found[0] and json.dumps(TOOLS) in found[0] and "null" not in found[0]
    assert '[price]{"fruit": "pear"}I look.' in found[1]


def test_text_of_prompt_joins_messages(folder, tmp_path):
    rows = [
        {
            "prompt": [user(parts_of("a", "b")), calling(ARGUMENTS, content=None), RESULT],
            "answer": "",
        }
    ]
    path = write_lines(tmp_path / "p.jsonl", rows)
    other = save_tokenizer(
        tmp_path / "other", template_of(PARTS.replace("m.content", "(m.content or '')"))
    )
    prompts = load_prompts(PromptSource(path, 1000), other, cache_dir=tmp_path)
    assert prompts[0].text == "ab\n\n2.5"


@pytest.mark.parametrize("text", ["<bos>hi", " <bos>hi", "hi"])
def test_rendered_prompt_gets_special_tokens_once(text, folder, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": text, "answer": ""}])
    found = texts(path, folder, tmp_path, use_chat_template=False)
    assert found[0].count("<bos>") == 1 and found[0].replace(" ", "") == "<bos>hi"
    if "<bos>" in text:
        with pytest.raises(UsageError, match="line 1: .*rendered already.*--rl-no-chat-template"):
            texts(path, folder, tmp_path)


WORDS = (
    "{% for m in messages %}<|T|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}<|T|>assistant\n"
)
ALPACA = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}### assistant:\n"
LLAMA_2 = "<s>{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
TAIL = "{{ messages[-1].content }}\nAnswer:"


@pytest.mark.parametrize(
    ("template", "text", "is_rendered"),
    [
        *[(WORDS.replace("<|T|>", token), "", True) for token in ("<|user|>", "<|none|>")],
        *[(template, "", True) for template in (ALPACA, LLAMA_2, TAIL)],
        (WORDS.replace("<|T|>", "<|user|>"), "user\nis a word.", False),
        (WORDS.replace("<|T|>", "<|user|>"), "Who is a user's\nassistant", False),
        (ALPACA, "Write\n### user:\n", False),
        (TAIL, "Answer: what is 2+2?", False),
    ],
)
def test_rendered_prompt_is_refused_for_any_turn_markers(template, text, is_rendered):
    """With special tokens, without them, and with markers that are not tokens."""
    tokenizer = tokenizer_of(template, "</s>")
    if is_rendered:
        conversations = [[ASKED], [SYSTEM, ASKED]]
        rendered_texts = {
            tokenizer.apply_chat_template(each, tokenize=False) for each in conversations
        }
        for token in tokenizer.all_special_tokens:
            rendered_texts |= {each.replace(token, "") for each in rendered_texts}
        for text in rendered_texts:
            with pytest.raises(RejectedRow, match="rendered already.*--rl-no-chat-template"):
                ChatTokenizer(tokenizer).prompt({"messages": [{**ASKED, "content": text}]})
    else:
        messages = [{**ASKED, "content": text}]
        assert text in ChatTokenizer(tokenizer).prompt({"messages": messages})[0]


def test_json_text_of_messages_is_read_as_messages(folder, tmp_path):
    messages = [ASKED, calling(ARGUMENTS), RESULT]
    rows = [{"prompt": prompt, "answer": ""} for prompt in (messages, json.dumps(messages))]
    one, other = texts(write_lines(tmp_path / "p.jsonl", rows), folder, tmp_path)
    assert one == other
    kept = ['What is [{"role": "admin"}]?', '[{"role": "admin"}]', "[1, 2]", '["role", "content"]']
    rows = [{"prompt": text, "answer": ""} for text in kept]
    found = texts(write_lines(tmp_path / "kept.jsonl", rows), folder, tmp_path)
    assert all(text in each for text, each in zip(kept, found, strict=True))


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        (str([ASKED]), {}, "column 'prompt', which looks like messages, is not valid JSON"),
        ('[{"role": "user", "content": 1}]', {}, "message 1 has a content of type int"),
        (json.dumps([ASKED]), {"use_chat_template": False}, "--rl-no-chat-template"),
    ],
)
def test_invalid_text_of_messages_is_refused_with_row(text, options, problem, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": text, "answer": ""}])
    with pytest.raises(UsageError, match=f"line 1: .*{problem}"):
        check_prompts(PromptSource(path, 100, **options))


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"tools": TOOLS}, "has tools, which need the chat template"),
        ({"chat_template_kwargs": {"shout": True}}, "which need the chat template"),
        ({"tools": "price"}, "not valid JSON"),
        ({"tools": ["price"]}, "not a list of objects"),
        ({"chat_template_kwargs": {"messages": []}}, "sets 'messages'"),
    ],
)
def test_unusable_columns_are_refused_with_row(columns, problem, tmp_path):
    rows = [{"prompt": "hi", "answer": ""}, {"prompt": "hi", "answer": "", **columns}]
    path = write_lines(tmp_path / "p.jsonl", rows)
    with pytest.raises(UsageError, match=f"line 2: .*{problem}"):
        check_prompts(PromptSource(path, 100, use_chat_template=False))


IMAGES: dict[str, list[Any]] = {
    "p.jsonl": [[], None, ["a.png"]],
    "paths.parquet": [[], None, ["a.png"]],
    "bytes.parquet": [[], None, [b"\xff"]],
    "structs.parquet": [None, None, {"bytes": b"\xff", "path": None}],
}


@pytest.mark.parametrize("name", IMAGES)
def test_row_with_images_is_refused_by_its_number(name, folder, tmp_path):
    """A row whose list of images is empty is a row of text."""
    rows = [{"prompt": f"hi {n}", "answer": "", "images": i} for n, i in enumerate(IMAGES[name])]
    path, place = tmp_path / name, "row 3"
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_lines(path, rows)
        place = "line 3"
    with pytest.raises(UsageError, match=f"{place}: it has images, .*; .*--rl-bad-rows skip"):
        check_prompts(PromptSource(path, 100))
    skipping = PromptSource(path, 100, skips_bad_rows=True)
    found = load_prompts(skipping, folder, cache_dir=tmp_path)
    assert [prompt.text for prompt in found] == ["hi 0", "hi 1"]


@pytest.mark.parametrize("digits", [5, 400, 4000])
def test_integer_answer_may_have_any_number_of_digits(digits, folder, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "hi", "answer": -{"9" * digits}}}\n')
    prompts = load_prompts(PromptSource(path, 100), folder, cache_dir=tmp_path)
    assert prompts[0].answer == "-" + "9" * digits


def test_deep_nesting_is_refused_with_place(tmp_path):
    deep = "[" * 900 + "]" * 900
    path = tmp_path / "p.jsonl"
    for column in ("answer", "prompt", "more"):
        row = {"prompt": '"hi"', "answer": '"1"', "more": "0", column: deep}
        path.write_text("{" + ", ".join(f'"{k}": {v}' for k, v in row.items()) + "}\n")
        with pytest.raises(UsageError, match="line 1[,:] .*deeper than"):
            check_prompts(PromptSource(path, 100))
    kind = pa.int64()
    for _ in range(200):
        kind = pa.list_(kind)
    more = pa.array([None], kind)
    table = pa.Table.from_pylist([{"prompt": "hi", "answer": "1"}]).append_column("more", more)
    pq.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(UsageError, match=r"p.parquet.*'more'.*deeper than|cannot be read"):
        check_prompts(PromptSource(tmp_path / "p.parquet", 100))


# Which template -----------------------------------------------------------------------------------


def test_template_is_chosen_by_name_or_file(folder, tmp_path):
    several = save_tokenizer(tmp_path / "several", "D {{ messages[0].content }}")
    (several / "additional_chat_templates").mkdir()
    named = several / "additional_chat_templates" / "loud.jinja"
    named.write_text("L {{ messages[0].content }}{{ mark }}")
    own = tmp_path / "own.jinja"
    own.write_text("O {{ messages[0].content }}")
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "hi", "answer": ""}])

    def found(chosen: str | None, **kwargs: Any) -> list[str]:
        return texts(path, several, tmp_path, template=ChatTemplate(chosen, kwargs))

    assert (found(None), found("loud"), found(str(own))) == (["D hi"], ["L hi"], ["O hi"])
    assert found("loud", mark="!") == ["L hi!"]
    named.write_text("M {{ messages[0].content }}")
    assert found("loud") == ["M hi"]
    with pytest.raises(UsageError, match="--rl-chat-template quiet .*; give one of default, loud"):
        found("quiet")
    with pytest.raises(UsageError, match="--rl-chat-template .*missing.jinja cannot be read"):
        found(str(tmp_path / "missing.jinja"))
    with pytest.raises(UsageError, match="--rl-chat-template-kwargs .*'mrak'.*does not read"):
        found("loud", mrak="!")


def test_date_is_input_of_dated_template(tmp_path):
    dated = save_tokenizer(
        tmp_path / "dated", "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
    )
    plain = save_tokenizer(tmp_path / "plain", "{{ messages[0].content }}")
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "hi", "answer": ""}])

    def load(folder: Path, day: str | None) -> tuple[str, str]:
        source = PromptSource(path, 100, template=ChatTemplate(date=day))
        prompts = load_prompts(source, folder, cache_dir=tmp_path / "cache")
        text = AutoTokenizer.from_pretrained(folder).decode(prompts[0].token_ids)
        return text, prompts.fingerprint

    one, other = load(dated, "2026-01-02"), load(dated, "2026-01-03")
    assert one[0] == "02 Jan 2026 hi" and other[0] == "03 Jan 2026 hi" and one[1] != other[1]
    assert load(dated, "2026-01-02") == one
    assert load(plain, "2026-01-02") == load(plain, "2026-01-03")
    assert len(list((tmp_path / "cache" / "prompts").glob("*.arrow"))) == 3
