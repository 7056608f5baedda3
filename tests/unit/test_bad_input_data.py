"""Bad prompts, tokenizers and rewards are refused in one sentence; see bad_input_cases.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bad_input_cases import Case, assert_refused, parse_cases, table
from tests.bad_input_folder import write

PROMPTS_TEXT = """
flag_missing: without --rl-prompts
    --rl-prompts is missing ... give a JSONL or Parquet file
file_missing: --rl-prompts {here}/nowhere.jsonl
    --rl-prompts {here}/nowhere.jsonl does not exist ... give a .jsonl or .parquet file
file_missing_of_eval: --rl-eval-prompts {here}/nowhere.jsonl
    --rl-eval-prompts {here}/nowhere.jsonl does not exist ... give
broken_line_of_eval:
    --rl-eval-prompts {here}/eval.jsonl, line 1: is not valid JSON ... one JSON object
    => again
column_missing_of_eval:
    --rl-prompt-column 'prompt' ... --rl-eval-prompts {here}/eval.jsonl lacks in line 1
    => again
all_too_long_of_eval:
    --rl-max-prompt-tokens 64 drops every prompt ... --rl-eval-prompts ... raise it
    => --rl-max-prompt-tokens 100
no_tokenizer:
    {here}/checkpoint holds no tokenizer ... add its tokenizer files
    => again
"""
CHANGES_PROMPTS = {
    "broken_line_of_eval": write("eval.jsonl", "1+1=2\n"),
    "column_missing_of_eval": write("eval.jsonl", '{"answer": "2"}\n'),
    "all_too_long_of_eval": write(
        "eval.jsonl", json.dumps({"prompt": "1+" * 40 + "1=", "answer": "41"})
    ),
    "no_tokenizer": lambda here: [
        (here / "checkpoint" / name).unlink()
        for name in ("tokenizer.json", "tokenizer_config.json")
    ],
}
PROMPTS = [
    *parse_cases(PROMPTS_TEXT, CHANGES_PROMPTS),
    Case(
        "flag_missing_of_verify",
        ["--rl-prompts is missing", "give a JSONL or Parquet file"],
        flags={"--rl-prompts": None},
        entry="mcore_rl.verify",
    ),
]

REWARD_TEXT = """
unknown: --rl-reward arithmetics
    --rl-reward arithmetics is not a built-in reward ... did you mean arithmetic? ... given as
    => --rl-reward exact_match
module_missing: --rl-reward no_such_module:score
    --rl-reward no_such_module:score cannot be imported ... 'no_such_module' ... PYTHONPATH
    => --rl-reward mcore_rl.rewards.functions:arithmetic
module_broken: --rl-reward broken:score
    --rl-reward broken:score cannot be used ... ZeroDivisionError ... make
    => --rl-reward broken:score
"""
REWARD = parse_cases(
    REWARD_TEXT,
    {"module_broken": write("broken.py", "1 / 0")},
    {"module_broken": write("broken.py", "def score(prompt, response, answer):\n    return 0.0\n")},
)


@pytest.mark.parametrize("case", table(prompts=PROMPTS, reward=REWARD))
def test_bad_data_is_refused_in_one_sentence(
    case: Case, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, here, monkeypatch, capfd)
