"""Rows of supervised training: what is the prompt, which turns are learned, and which rows are left
out."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from mcore_rl.common.errors import UsageError
from mcore_rl.data.assistant_turns import NO_END, Demonstrated, demonstrated
from mcore_rl.data.chat import ADDED_END, ChatTokenizer
from mcore_rl.data.demonstration_rows import MARKS, Demonstration, Responses, demonstration_of
from mcore_rl.data.demonstrations import load_demonstrations, load_pairs
from mcore_rl.data.messages import RejectedRow
from mcore_rl.data.options import DataOptions, SupervisedOptions
from mcore_rl.data.prompt_file import PromptSource
from mcore_rl.data.prompts import example_lines, load_prompt_files, load_prompts
from mcore_rl.data.row_notes import as_learned, bad_rows_of
from mcore_rl.data.tokenizer import TooLong
from tests.unit.test_data import write_lines
from tests.unit.test_published_templates import tokenizer_of
from tests.unit.test_supervised import CHATML, said

ASKED, TWO, TEN = said("user", "1+1"), said("assistant", "2"), said("assistant", "10")
BRIEF = said("system", "Be brief.")
AGAIN, FOUR = said("user", "2+2"), said("assistant", "4")


def read(
    fields: Mapping[str, Any],
    *,
    other: str | None = None,
    column: str = "response",
    loss_on: str = "all",
    use_chat_template: bool = True,
) -> Demonstration:
    return demonstration_of(
        fields,
        "prompt",
        Responses(column, loss_on, other),
        is_parquet=False,
        use_chat_template=use_chat_template,
    )


def sides(fields: Mapping[str, Any]) -> tuple[Demonstration, Demonstration]:
    chosen = read(fields, column="chosen", other="rejected")
    return chosen, read(fields, column="rejected", other="chosen")


# What a response may be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response",
    [
        "2",
        TWO,
        [TWO],
        json.dumps(TWO),
        json.dumps([TWO]),
        f"\n {json.dumps([TWO], indent=1)} ",
        [ASKED, TWO],
        json.dumps([ASKED, TWO]),
    ],
)
def test_response_is_a_text_messages_or_their_json(response: Any) -> None:
    for prompt in ("1+1", [ASKED], json.dumps([ASKED])):
        assert read({"prompt": prompt, "response": response}) == ([ASKED, TWO], (1,), None)


def test_response_may_be_a_field_of_a_column() -> None:
    fields = {"prompt": "1+1", "data": {"answer": [TWO]}}
    assert read(fields, column="data.answer").prompt == [ASKED, TWO]


@pytest.mark.parametrize(
    "response",
    [
        str([TWO]),  # as Python writes it
        json.dumps([{"from": "gpt", "value": "2"}]),
        json.dumps({"from": "gpt", "value": "2"}),
        [{"from": "gpt", "value": "2"}],
    ],
)
def test_messages_of_another_form_are_never_learned_as_a_text(response: Any) -> None:
    with pytest.raises(RejectedRow, match="JSON|role"):
        read({"prompt": "1+1", "response": response})


@pytest.mark.parametrize(
    "response", ['{"role": "engineer", "content": "x"}', '[{"from": "EUR", "value": 3}]', "[{"]
)
def test_json_that_is_no_message_is_a_text(response: str) -> None:
    assert read({"prompt": "1+1", "response": response}).prompt[-1] == said("assistant", response)


def test_all_turns_of_a_response_are_learned() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    result = {"role": "tool", "content": "2"}
    fields = {"prompt": "1+1", "response": [call, result, TWO]}
    assert read(fields).learned == (1, 3) and read(fields, loss_on="last").learned == (3,)
    asked = {"prompt": [ASKED, call], "response": [result, TWO]}
    assert read(asked).prompt == [ASKED, call, result, TWO]


# Marks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("no", [0, False, 0.0])
@pytest.mark.parametrize("name", MARKS)
def test_marked_turn_is_not_learned(name: str, no: Any) -> None:
    marked = [ASKED, {**TWO, name: no}, AGAIN, {**FOUR, name: 1}]
    assert read({"prompt": marked}) == ([ASKED, TWO, AGAIN, FOUR], (3,), None)
    pair = {"prompt": "1+1", "chosen": marked[1:], "rejected": "3"}
    assert sides(pair)[0].learned == (3,)


def test_marks_of_other_roles_ask_for_nothing() -> None:
    row = {"prompt": [{**ASKED, "weight": 0}, {**TWO, "weight": True}]}
    assert read(row) == ([ASKED, TWO], (1,), None)
    # The warning of fields that the template omits names it.
    assert read({"prompt": [{**ASKED, "train": True}, TWO]}).prompt[0]["train"]


@pytest.mark.parametrize(
    ("turn", "loss_on", "problem"),
    [
        ({"weight": 0.5}, "all", "message 4 has the weight 0.5"),
        ({"loss_mask": [0, 1]}, "all", r"message 4 has the loss_mask \[0, 1\]"),
        ({"train": "false"}, "all", "message 4 has the train 'false'"),
        ({"train": 0}, "last", "none of these turns"),
    ],
)
def test_marks_that_cannot_be_obeyed_are_refused(
    turn: Mapping[str, Any], loss_on: str, problem: str
) -> None:
    with pytest.raises(RejectedRow, match=problem):
        read({"prompt": [ASKED, TWO, AGAIN, {**FOUR, **turn}]}, loss_on=loss_on)


# Pairs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [None, "1+1", [ASKED], json.dumps([ASKED])])
def test_common_beginning_of_two_conversations_is_the_prompt(prompt: Any) -> None:
    for before in ([], [BRIEF]):
        whole = {"chosen": [*before, ASKED, TWO], "rejected": [*before, ASKED, TEN]}
        given = whole if prompt is None else whole | {"prompt": prompt}
        turn = len(before) + 1
        expected = ([*before, ASKED, TWO], (turn,), None), ([*before, ASKED, TEN], (turn,), None)
        assert sides(given) == expected


def test_turns_before_the_first_difference_are_not_learned() -> None:
    both = [ASKED, TWO, AGAIN]
    chosen, rejected = sides({"chosen": [*both, FOUR], "rejected": [*both, TEN]})
    assert chosen.learned == rejected.learned == (3,)
    chosen, rejected = sides(
        {"chosen": [ASKED, TWO, AGAIN, FOUR], "rejected": [ASKED, TEN, AGAIN, FOUR]}
    )
    assert chosen.learned == rejected.learned == (1, 3)


def test_equal_sides_differ_in_their_last_message() -> None:
    assert sides({"chosen": [ASKED, TWO], "rejected": [ASKED, TWO]})[1].learned == (1,)


def test_one_side_may_repeat_the_prompt() -> None:
    expected = ([ASKED, TWO], (1,), None), ([ASKED, TEN], (1,), None)
    assert sides({"prompt": "1+1", "chosen": [ASKED, TWO], "rejected": "10"}) == expected
    assert sides({"prompt": [ASKED], "chosen": "2", "rejected": [ASKED, TEN]}) == expected
    instructed = {"prompt": [BRIEF, ASKED], "chosen": [ASKED, TWO], "rejected": [ASKED, TEN]}
    assert sides(instructed)[0] == ([BRIEF, ASKED, TWO], (2,), None)


def test_prompt_may_be_a_later_question_of_both_conversations() -> None:
    both = [ASKED, TWO, AGAIN]
    pair = {"prompt": "2+2", "chosen": [*both, FOUR], "rejected": [*both, TEN]}
    assert sides(pair)[0] == ([*both, FOUR], (3,), None)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": "2", "rejected": "10"}, "no column 'prompt'"),
        ({"chosen": [TWO], "rejected": [TEN]}, "no column 'prompt'"),
        ({"chosen": [ASKED, TWO], "rejected": "10"}, "no column 'prompt'"),
        ({"prompt": "1+1", "chosen": "2"}, "no column 'rejected'"),
        ({"prompt": "1+1", "rejected": "2"}, "no column 'chosen'"),
        ({"chosen": [ASKED, TWO], "rejected": [AGAIN, FOUR]}, "no common beginning"),
        (
            {"chosen": [ASKED, TWO, AGAIN, FOUR], "rejected": [ASKED, TWO, ASKED, TWO]},
            "continues after the prompt with .* 'user'",
        ),
        ({"prompt": "7", "chosen": [ASKED, TWO], "rejected": [ASKED, TEN]}, "not have the prompt"),
        ({"prompt": [AGAIN], "chosen": [ASKED, TWO], "rejected": "10"}, "not have the prompt"),
        ({"prompt": [ASKED, TWO], "chosen": "2", "rejected": "10"}, "ends with the assistant"),
    ],
)
def test_sides_that_are_no_pair_are_refused_for_both(row: Mapping[str, Any], problem: str) -> None:
    for column, other in (("chosen", "rejected"), ("rejected", "chosen")):
        with pytest.raises(RejectedRow, match=problem):
            read(row, column=column, other=other)


def test_texts_go_without_a_template_only_as_prompt_and_answer() -> None:
    texts = {"prompt": "1+1", "chosen": "2", "rejected": [TEN]}
    chosen = read(texts, column="chosen", other="rejected", use_chat_template=False)
    assert chosen == ("1+1", (), "2")
    assert not read({"prompt": [BRIEF, ASKED, TWO]}, use_chat_template=False).response


# Turns and their ends ----------------------------------------------------------------------------

NO_ENDS = (
    "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)


def learned_texts(
    messages: list[dict[str, Any]], template: str, *, eos: str = "<eos>", append_end: bool = False
) -> tuple[list[str], Demonstrated]:
    """The texts of a conversation, learned ones at odd places."""
    tokenizer = tokenizer_of(template, eos)
    row = read({"prompt": messages})
    found = demonstrated(
        ChatTokenizer(tokenizer),
        {"messages": row.prompt, "learned": row.learned},
        TooLong(tokenizer, 500),
        append_end=append_end,
    )
    bounds = [0, *found.spans, len(found.token_ids)]
    pairs = zip(bounds, bounds[1:], strict=False)
    return [tokenizer.decode(found.token_ids[a:b]) for a, b in pairs], found


def test_turn_without_an_end_token_is_reported_or_gets_one() -> None:
    turns = [ASKED, TWO, AGAIN, FOUR]
    _, found = learned_texts(turns, NO_ENDS)
    assert found.left_out == [NO_END]
    texts, found = learned_texts(turns, NO_ENDS, append_end=True)
    assert texts[1::2] == ["2<eos>", "4<eos>"] and found.left_out == []
    assert texts[2] == "\n\n### user:\n2+2\n\n### assistant:\n" and texts[-1] == "\n\n"


def test_turn_that_ends_in_a_token_that_ends_no_response_is_reported_or_gets_one() -> None:
    _, found = learned_texts([ASKED, TWO], CHATML, eos="<eos>")
    assert found.left_out == [NO_END]
    texts, _ = learned_texts([ASKED, TWO], CHATML, eos="<eos>", append_end=True)
    assert texts[1] == "2<|im_end|><eos>"
    for append_end in (False, True):
        texts, found = learned_texts([ASKED, TWO], CHATML, eos="<|im_end|>", append_end=append_end)
        assert texts[1] == "2<|im_end|>" and found.left_out == []


NEEDS_MESSAGES = "{% if messages[0].role == 'system' %}{{ '!' }}{% endif %}" + CHATML


@pytest.mark.parametrize("template", [CHATML, NEEDS_MESSAGES, NO_ENDS])
def test_conversation_that_the_assistant_begins_is_learned(template: str) -> None:
    texts, _ = learned_texts([TWO, ASKED, TEN], template, eos="<|im_end|>", append_end=True)
    assert texts[1::2] == ["2<|im_end|>", "10<|im_end|>"]
    assert texts[0] in ("<|im_start|>assistant\n", "### assistant:\n")


# Files -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory("qwen3")


BAD = [
    "{broken",
    json.dumps({"prompt": "1+1"}),
    json.dumps({"prompt": "1+1", "response": 3}),
    json.dumps({"prompt": "1+1", "response": 45}),
    json.dumps({"prompt": [{**ASKED, "role": "judge"}, TWO]}),
]
GOOD = json.dumps({"prompt": "1+1", "response": "2", "chosen": "2", "rejected": "3"})


def test_bad_rows_are_skipped_and_counted_by_reason(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*BAD, GOOD]))
    data = DataOptions(max_prompt_tokens=20, cache_dir=str(tmp_path / "cache"), bad_rows="skip")
    where = (str(path), "--rl-prompts", folder, data, SupervisedOptions())
    with caplog.at_level(logging.WARNING):
        found = load_demonstrations(*where, max_response_tokens=20)
    assert 5 in found.rows.tolist() and found.num_rows == 6
    counts = [each.num_rows for each in found.bad_rows]
    assert counts[0] == 2 and "of type int" in found.bad_rows[0].problem
    assert sum(counts) == len(found.problems) == 6 - len(found)
    assert f"{sum(counts)} of 6 rows" in caplog.text and "2 rows, the first is row 3" in caplog.text
    caplog.clear()
    pairs = load_pairs(*where, max_response_tokens=20)
    assert caplog.text.count("5 of 6 rows") == 1  # not for each column
    assert pairs.rows.tolist() == [5] and set(pairs.problems) == {0, 1, 2, 3, 4}
    stops = DataOptions(max_prompt_tokens=20, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="line 1: is not valid JSON"):
        load_demonstrations(*where[:3], stops, SupervisedOptions(), max_response_tokens=20)
    path.write_text("\n".join(BAD[:3]))
    with pytest.raises(UsageError, match="has no row that can be used: row 1: is not valid"):
        load_demonstrations(*where, max_response_tokens=20)


def test_bad_prompts_are_skipped_as_well(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1", "answer": None}, {"prompt": "1+1", "answer": "2"}, {"answer": "2"}]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    source = PromptSource(path, 20, skips_bad_rows=True)
    found = load_prompts(source, folder, cache_dir=tmp_path / "cache")
    assert found.rows.tolist() == [1] and found.problems.keys() == {0, 2}


def test_reasons_do_not_depend_on_numbers_and_values() -> None:
    problems = ["message 3 has 'a'", "it is blank", "message 12 has 'b'"]
    first, second = bad_rows_of(problems, [4, 7, 9])
    assert (first.num_rows, first.first, second.num_rows) == (2, 4, 1)
    assert str(first).startswith("2 rows, the first is row 5: message 3")


def test_first_row_is_shown_as_it_is_learned(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(GOOD)
    data = DataOptions(max_prompt_tokens=20, cache_dir=str(tmp_path / "cache"))
    where = (str(path), "--rl-prompts", folder, data, SupervisedOptions())
    (line,) = example_lines(load_demonstrations(*where, max_response_tokens=20))
    assert "row 1" in line and line.endswith("«2<eos>»") and "1+1" in line
    chosen, rejected = example_lines(load_pairs(*where, max_response_tokens=20))
    assert chosen.startswith("row 1, chosen, ") and chosen.endswith("«2<eos>»")
    assert rejected.startswith("row 1, rejected, ") and rejected.endswith("«3<eos>»")
    prompts = load_prompts(
        PromptSource(path, 20, answer_column="response"), folder, cache_dir=tmp_path / "cache"
    )
    (line,) = example_lines(prompts)
    assert "1+1" in line and "«" not in line.partition(": ")[2]


def test_shown_texts_are_one_line_of_limited_length() -> None:
    shown = as_learned(["a\n\x1b[31m", "b" * 5000, ""])
    assert shown.startswith("a\\n\\x1b[31m«bb") and shown.endswith("bb»") and len(shown) < 500
    assert "4,600 more characters" in shown


def test_prompt_without_tokens_is_refused_in_every_mode(folder: Path, tmp_path: Path) -> None:
    """The tokenizer drops every character."""
    silent, template = tmp_path / "silent", tmp_path / "text.jinja"
    shutil.copytree(folder, silent, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((silent / "tokenizer.json").read_text())
    settings["normalizer"] = {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}
    settings["post_processor"] = None
    (silent / "tokenizer.json").write_text(json.dumps(settings))
    template.write_text("{{ messages[0].content }}")
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "1+1", "answer": "2", "response": "2"}])
    common = {"max_prompt_tokens": 20, "cache_dir": str(tmp_path / "cache"), "prompts": str(path)}
    for how in ({"no_chat_template": True}, {"chat_template": str(template)}):
        with pytest.raises(UsageError, match="line 1: its prompt has no tokens"):
            load_prompt_files(DataOptions(**common, **how), silent)
    with pytest.raises(UsageError, match="line 1: its prompt has no tokens"):
        load_demonstrations(
            *(str(path), "--rl-prompts", silent, DataOptions(**common, no_chat_template=True)),
            SupervisedOptions(),
            max_response_tokens=20,
        )


def test_end_token_that_a_tokenizer_adds_to_texts_is_not_put_behind_prompts() -> None:
    tokenizer = tokenizer_of(CHATML, "<eos>")
    plain = ChatTokenizer(tokenizer).encode(["1+1"], special=True)
    begin, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<s>", "<eos>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <eos>", special_tokens=[("<s>", begin), ("<eos>", end)]
    )
    chat = ChatTokenizer(tokenizer)
    assert chat.encode(["1+1"], special=True) == [[begin, *plain[0]]]
    assert chat.left_out_of_texts == [ADDED_END]
    row = {"text": "1+1", "response": "2"}
    found = demonstrated(chat, row, TooLong(tokenizer, 500))
    assert found.token_ids.count(end) == 1 and found.token_ids[-1] == end
    assert found.left_out == [ADDED_END]
    ended = demonstrated(chat, {**row, "response": "2<eos>"}, TooLong(tokenizer, 500))
    assert np.array_equal(ended.token_ids, found.token_ids)
