"""Bad prompts, tokenizers and rewards are refused in one sentence; see bad_input_cases.py."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.bad_input_cases import Case, assert_refused, table
from tests.bad_input_folder import remove, write


def parquet_without_answers(here: Path) -> None:
    pq.write_table(pa.table({"prompt": ["1+1="]}), here / "prompts.parquet")


PROMPTS = [
    Case(
        "flag_missing",
        ["--rl-prompts is missing", "give a JSONL or Parquet file"],
        flags={"--rl-prompts": None},
    ),
    Case(
        "flag_missing_of_verify",
        ["--rl-prompts is missing", "give a JSONL or Parquet file"],
        flags={"--rl-prompts": None},
        entry="mcore_rl.verify",
    ),
    Case(
        "file_missing",
        ["--rl-prompts {here}/nowhere.jsonl does not exist", "give a .jsonl or .parquet file"],
        flags={"--rl-prompts": "{here}/nowhere.jsonl"},
    ),
    Case(
        "file_missing_of_eval",
        ["--rl-eval-prompts {here}/nowhere.jsonl does not exist", "give"],
        flags={"--rl-eval-prompts": "{here}/nowhere.jsonl"},
    ),
    Case(
        "suffix",
        ["--rl-prompts {here}/prompts.csv has the suffix '.csv'", "convert or rename"],
        flags={"--rl-prompts": "{here}/prompts.csv"},
    ),
    Case(
        "empty",
        ["--rl-prompts {here}/prompts.jsonl is empty", "write one prompt a line"],
        change=write("prompts.jsonl", ""),
    ),
    Case(
        "blank_lines_only",
        ["--rl-prompts {here}/prompts.jsonl holds no rows", "write one prompt a line"],
        change=write("prompts.jsonl", "\n \n"),
    ),
    Case(
        "broken_line",
        ["--rl-prompts {here}/prompts.jsonl, line 2, is not valid JSON", "one JSON object"],
        change=write("prompts.jsonl", '{"prompt": "1+1=", "answer": 2}\n{"prompt": \n'),
    ),
    Case(
        "broken_line_of_eval",
        ["--rl-eval-prompts {here}/eval.jsonl, line 1, is not valid JSON", "one JSON object"],
        change=write("eval.jsonl", "1+1=2\n"),
    ),
    Case(
        "column_missing",
        [
            "--rl-answer-column 'answer'",
            "{here}/prompts.jsonl lacks in line 1",
            "'question'",
            "name",
        ],
        change=write("prompts.jsonl", '{"prompt": "1+1=", "question": 2}\n'),
    ),
    Case(
        "column_missing_of_eval",
        ["--rl-prompt-column 'prompt'", "--rl-eval-prompts {here}/eval.jsonl lacks in line 1"],
        change=write("eval.jsonl", '{"answer": "2"}\n'),
    ),
    Case(
        "column_missing_in_parquet",
        ["--rl-answer-column 'answer'", "{here}/prompts.parquet lacks in its schema", "name one"],
        flags={"--rl-prompts": "{here}/prompts.parquet"},
        change=parquet_without_answers,
    ),
    Case(
        "not_parquet",
        ["--rl-prompts {here}/prompts.parquet cannot be read as Parquet", "write it again"],
        flags={"--rl-prompts": "{here}/prompts.parquet"},
        change=write("prompts.parquet", "1+1=2"),
    ),
    Case(
        "value_of_another_type",
        ["{here}/prompts.jsonl, line 1: column 'answer' is of type bool", "write a string"],
        change=write("prompts.jsonl", '{"prompt": "1+1=", "answer": true}\n'),
    ),
    Case(
        "all_too_long",
        ["--rl-max-prompt-tokens 3 drops every prompt", "{here}/prompts.jsonl", "raise it"],
        flags={"--rl-max-prompt-tokens": "3"},
    ),
    Case(
        "all_too_long_of_eval",
        ["--rl-max-prompt-tokens 64 drops every prompt", "--rl-eval-prompts", "raise it"],
        change=write("eval.jsonl", json.dumps({"prompt": "1+" * 40 + "1=", "answer": "41"})),
    ),
    Case(
        "no_chat_template",
        ["{here}/checkpoint has a tokenizer without a chat template", "--rl-no-chat-template"],
        change=remove("checkpoint/chat_template.jinja"),
    ),
    Case(
        "no_tokenizer",
        ["{here}/checkpoint holds no tokenizer", "add its tokenizer files"],
        change=lambda here: [
            (here / "checkpoint" / name).unlink()
            for name in ("tokenizer.json", "tokenizer_config.json")
        ],
    ),
]

REWARD = [
    Case(
        "unknown",
        [
            "--rl-reward arithmetics is not a built-in reward",
            "did you mean arithmetic?",
            "given as",
        ],
        flags={"--rl-reward": "arithmetics"},
    ),
    Case(
        "module_missing",
        ["--rl-reward no_such_module:score cannot be imported", "'no_such_module'", "PYTHONPATH"],
        flags={"--rl-reward": "no_such_module:score"},
    ),
    Case(
        "module_broken",
        ["--rl-reward broken:score cannot be used", "ZeroDivisionError", "make"],
        flags={"--rl-reward": "broken:score"},
        change=write("broken.py", "1 / 0"),
    ),
    Case(
        "attribute_missing",
        ["--rl-reward math:cube cannot be used", "no attribute 'cube'", "name one that exists"],
        flags={"--rl-reward": "math:cube"},
    ),
    Case(
        "parameters",
        ["--rl-reward math:gcd", "is called as fn(prompt=, response=, answer=)", "give it"],
        flags={"--rl-reward": "math:gcd"},
    ),
]


@pytest.mark.parametrize("case", table(prompts=PROMPTS, reward=REWARD))
def test_bad_data_is_one_sentence(
    case: Case, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, here, monkeypatch, capfd)
