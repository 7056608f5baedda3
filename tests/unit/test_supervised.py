"""Rows of supervised training: which tokens are learned, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.aggregation import AggregationMode
from mcore_rl.algorithms.total_loss import PolicyLossSums
from mcore_rl.batching.table import SampleTable
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig, config_from
from mcore_rl.data.assistant_turns import demonstrated
from mcore_rl.data.chat import ChatTokenizer
from mcore_rl.data.demonstration_rows import Responses, demonstration_of
from mcore_rl.data.demonstrations import Demonstrations, load_demonstrations, load_pairs
from mcore_rl.data.messages import RejectedRow
from mcore_rl.data.options import DataOptions, SupervisedOptions
from mcore_rl.data.prompt_file import PromptSource
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.tokenizer import TooLong
from mcore_rl.job.supervised import check_supervised
from mcore_rl.megatron.optimizer import UpdateResult
from mcore_rl.planner.activations import train_activation_bytes
from mcore_rl.planner.phases import BUILD, EXPORT, LOG_PROBS, TRAIN
from mcore_rl.planner.plan import as_json, plan_case
from mcore_rl.tools.plan.command_line import read_command_line
from mcore_rl.trainer.actor import UpdateStats
from mcore_rl.trainer.supervised import supervised_metrics
from tests.unit.test_data import write_lines
from tests.unit.test_published_templates import tokenizer_of

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Turns before the last message lose their reasoning.
THOUGHT = "('<think></think>' if loop.last and m.role == 'assistant' else '')"
THINKS_LAST = CHATML.replace("m.content", f"{THOUGHT} + m.content")
# The start of a turn is not what generation begins with.
OTHER_START = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant: ")
# A sum of the turns comes first.
COUNTS = "{{ messages | length }}" + CHATML


def said(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


TURNS = [
    said("system", "Be brief."),
    said("user", "1+1"),
    said("assistant", "2"),
    said("user", "2+2"),
    said("assistant", "4"),
]


def learned(
    messages: list[dict[str, Any]], template: str, eos: str = "<|im_end|>", loss_on: str = "all"
) -> list[str]:
    """The texts of the turns to learn."""
    tokenizer = tokenizer_of(template, eos)
    chat = ChatTokenizer(tokenizer)
    row = demonstration_of(
        {"prompt": messages},
        "prompt",
        Responses("response", loss_on),
        is_parquet=False,
        use_chat_template=True,
    )
    given = {"messages": row.prompt, "learned": row.learned}
    found = demonstrated(chat, given, TooLong(tokenizer, 500))
    assert (found.least, found.left_out) == (0, [])
    assert (
        found.token_ids == chat.encode([chat.render(messages, opens_turn=False)], special=False)[0]
    )
    bounds = np.array(found.spans).reshape(-1, 2).tolist()
    return [tokenizer.decode(found.token_ids[begin:end]) for begin, end in bounds]


@pytest.mark.parametrize(
    ("loss_on", "expected"), [("all", ["2<|im_end|>", "4<|im_end|>"]), ("last", ["4<|im_end|>"])]
)
def test_turns_of_assistant_end_with_their_last_special_token(
    loss_on: str, expected: list[str]
) -> None:
    """The line end after it is never generated."""
    assert learned(TURNS, CHATML, loss_on=loss_on) == expected
    assert learned([*TURNS, said("user", "and?")], CHATML, loss_on=loss_on) == expected


def test_template_that_changes_earlier_turns_teaches_the_last_alone() -> None:
    found = learned(TURNS, THINKS_LAST, loss_on="last")
    assert found == ["<think></think>4<|im_end|>"]


@pytest.mark.parametrize("template", [OTHER_START, COUNTS, THINKS_LAST])
def test_template_whose_prefixes_are_none_is_refused(template: str) -> None:
    with pytest.raises(RejectedRow, match="message 3, differently.*--rl-sft-loss-on last"):
        learned(TURNS, template)


def test_tokens_that_join_across_the_start_of_a_turn_are_refused() -> None:
    tokenizer = tokenizer_of(CHATML, "<|im_end|>")

    class Joining(ChatTokenizer):
        def encode(self, texts: Any, *, special: bool) -> list[list[int]]:
            """One token for a line end with the digit behind it."""
            return [
                super(Joining, self).encode([text.replace("\n2", "~")], special=special)[0]
                for text in texts
            ]

    with pytest.raises(RejectedRow, match="message 3.*not those of generation"):
        demonstrated(
            Joining(tokenizer), {"messages": TURNS, "learned": [2, 4]}, TooLong(tokenizer, 500)
        )


# Files --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory("qwen3")


def rows_in(path: Path, folder: Path, **options: Any) -> Demonstrations:
    data = DataOptions(max_prompt_tokens=20, cache_dir=str(path.parent / "cache"), **options)
    return load_demonstrations(
        *(str(path), "--rl-prompts", folder, data, SupervisedOptions()), max_response_tokens=20
    )


def test_row_is_a_conversation_or_a_prompt_with_a_response(folder: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1", "response": "2"},
        {"prompt": [said("user", "1+1")], "response": [said("assistant", "2")]},
        {"prompt": [said("user", "1+1"), said("assistant", "2")]},
        {"prompt": "1+1", "response": "2" * 60},
    ]
    found = rows_in(write_lines(tmp_path / "rows.jsonl", rows), folder)
    assert found.rows.tolist() == [0, 1, 2] and found.num_too_long == 1
    first = found.tokens(0)
    assert first.token_ids.dtype == np.int32 and found.lengths(0) == [(6, 2)]
    assert first.is_generated.tolist() == [False] * 6 + [True] * 2
    for other in (1, 2):
        assert np.array_equal(found.tokens(other).token_ids, first.token_ids)
        assert np.array_equal(found.tokens(other).is_generated, first.is_generated)


def test_parquet_rows_are_those_of_json(folder: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": TURNS}, {"prompt": TURNS[:3]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = rows_in(tmp_path / "rows.parquet", folder)
    expected = rows_in(write_lines(tmp_path / "rows.jsonl", rows), folder)
    for position in range(2):
        assert found.lengths(position) == expected.lengths(position)
        mine, theirs = found.tokens(position), expected.tokens(position)
        assert np.array_equal(mine.token_ids, theirs.token_ids)
        assert np.array_equal(mine.is_generated, theirs.is_generated)


def test_without_template_the_response_ends_the_sequence(folder: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "1+1", "response": "2"}])
    found = rows_in(path, folder, no_chat_template=True)
    with_answer = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "1+1", "answer": "2"}])
    source = PromptSource(with_answer, 20, use_chat_template=False)
    prompt = load_prompts(source, folder, cache_dir=tmp_path / "cache")[0].token_ids
    tokens = found.tokens(0)
    assert np.array_equal(tokens.token_ids[: len(prompt)], prompt)
    assert tokens.is_generated.tolist() == [False] * len(prompt) + [True, True]
    assert tokens.token_ids[-1] == 2  # <eos>


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "1+1", "answer": "2"}, "has no column 'response'.*write what"),
        ({"prompt": TURNS, "response": "5"}, "ends with the assistant's turn.*remove"),
        ({"prompt": "1", "response": ["2"]}, "'response' is of type list.*list of messages"),
        ({"prompt": "1", "response": [said("user", "2")]}, "does not have the prompt"),
        ({"response": "2"}, "has no column 'prompt'.*--rl-prompt-column"),
    ],
)
def test_row_without_a_demonstration_is_refused(
    row: Mapping[str, Any], problem: str, folder: Path, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UsageError, match=f"--rl-prompts {path}, line 1: .*{problem}"):
        rows_in(path, folder)


def test_longest_conversation_may_have_both_limits(folder: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "1+1", "response": "2" * 60}])
    with pytest.raises(UsageError, match="--rl-max-prompt-tokens plus .*, 40, drops every"):
        rows_in(path, folder)


def test_pairs_are_rows_of_which_both_responses_fit(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def pair(number: int, rejected: str) -> dict[str, str]:
        return {"prompt": f"{number}+1", "chosen": str(number + 1), "rejected": rejected}

    path = write_lines(tmp_path / "rows.jsonl", [pair(1, "3"), pair(2, "4" * 60), pair(3, "9")])
    data = DataOptions(max_prompt_tokens=20, cache_dir=str(tmp_path / "cache"))
    where = (str(path), "--rl-prompts", folder, data, SupervisedOptions())
    pairs = load_pairs(*where, max_response_tokens=20)
    assert pairs.rows.tolist() == [0, 2] and pairs.samples_per_row == 2
    assert "1 of 3 pairs are left out" in caplog.text
    chosen, rejected = (pairs.tokens(1, sample) for sample in (0, 1))
    begin = pairs.lengths(1)[0][0]
    assert np.array_equal(chosen.token_ids[:begin], rejected.token_ids[:begin])
    assert chosen.token_ids[begin] != rejected.token_ids[begin]
    again = load_pairs(*where, max_response_tokens=20)
    assert again.fingerprint == pairs.fingerprint and pairs.are_those_of(again.fingerprint)


@pytest.mark.parametrize(
    ("aggregation", "loss"), [("token_mean", (6.0 + 4.0) / (3 + 1)), ("constant", (0.5 + 0.7) / 2)]
)
def test_loss_of_demonstrations_follows_the_aggregation(
    aggregation: AggregationMode, loss: float
) -> None:
    """Two updates of three tokens and of one."""

    def update(num_tokens: float, total: float, aggregated: float) -> UpdateStats:
        sums = dict.fromkeys((field.name for field in fields(PolicyLossSums)), torch.zeros(()))
        given = {"num_tokens": num_tokens, "policy_loss": total, "aggregated": aggregated}
        sums |= {name: torch.tensor(value, dtype=torch.float64) for name, value in given.items()}
        return UpdateStats(PolicyLossSums(**sums), UpdateResult(grad_norm=1.0, skipped=False))

    table = SampleTable.of_lengths(np.ones(2, np.int64), np.array([3, 1]))
    updates = [update(3, 6.0, 0.5), update(1, 4.0, 0.7)]
    found = supervised_metrics(table, updates, aggregation)
    assert found["loss/sft"] == pytest.approx(loss, rel=1e-12)


def test_prompts_follow_demonstrations(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1", "response": "2", "answer": "2"}]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    taught = rows_in(path, folder)
    prompts = load_prompts(PromptSource(path, 20), folder, cache_dir=tmp_path / "cache")
    assert prompts.follow(taught.fingerprint) and taught.follow(prompts.fingerprint)
    assert not prompts.follow(prompts.fingerprint) and not taught.follow(taught.fingerprint)
    assert not prompts.follow("of an earlier version")
    assert taught.are_those_of(taught.fingerprint) and not prompts.are_those_of(taught.fingerprint)


# Flags --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"algorithm": "sft", "reward": "gsm8k"}, "--rl-reward gsm8k"),
        ({"algorithm": "sft", "environment": "calculator"}, "--rl-environment calculator"),
        ({"algorithm": "sft", "rollout_tp_size": 2}, "--rl-rollout-tp-size 2"),
        ({"algorithm": "sft", "temperature": 0.5}, "--rl-temperature 0.5"),
        ({"algorithm": "sft", "offload": "none"}, "--rl-offload none"),
        ({"algorithm": "sft", "num_samples_per_prompt": 4}, "--rl-num-samples-per-prompt 4"),
        ({"algorithm": "sft", "kl_coef": 0.1}, "--rl-kl-coef 0.1"),
        ({"algorithm": "sft", "routing_replay": "r2"}, "--rl-routing-replay r2"),
        ({"algorithm": "sft", "alarm_kl": 2.0}, "--rl-alarm-kl 2.0"),
        ({"algorithm": "sft", "curriculum": "drop"}, "--rl-curriculum drop"),
        ({"algorithm": "dpo", "curriculum": "less"}, "--rl-curriculum less"),
        ({"algorithm": "dpo", "loss_aggregation": "token_mean"}, "--rl-loss-aggregation"),
        ({"algorithm": "dpo", "eval_prompts": "held.jsonl"}, "--rl-eval-prompts held.jsonl"),
        ({"algorithm": "dpo", "num_mini_batches": 2}, "--rl-num-mini-batches 2"),
        ({"algorithm": "dpo", "num_epochs": 2}, "--rl-num-epochs 2"),
        ({"advantage": "demonstrations"}, "--rl-advantage demonstrations"),
        ({"advantage": "dpo"}, "--rl-advantage dpo"),
        ({"sft_loss_on": "last"}, "--rl-sft-loss-on last"),
        ({"sft_coef": 0.1}, "--rl-sft-coef 0.1"),
        ({"sft_demonstrations": "d.jsonl"}, "--rl-sft-demonstrations d.jsonl"),
        ({"algorithm": "sft", "sft_coef": 0.1}, "--rl-sft-coef 0.1"),
        ({"sft_append_end": True}, "--rl-sft-append-end"),
    ],
)
def test_flag_without_effect_is_refused_by_name(given: Mapping[str, Any], flag: str) -> None:
    by_dest = {f"rl_{name}": value for name, value in given.items()}
    with pytest.raises(UsageError) as refused:
        check_supervised(config_from(by_dest), by_dest)
    assert flag in str(refused.value) and refused.value.remedy


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm": "sft", "sft_loss_on": "last", "eval_prompts": "held.jsonl", "num_steps": 7},
        {"algorithm": "sft", "loss_aggregation": "seq_mean_token_mean", "entropy_coef": 0.1},
        {"algorithm": "sft", "num_mini_batches": 2, "num_epochs": 2, "temperature": 1.0},
        {"algorithm": "dpo", "dpo_beta": 0.5, "max_response_tokens": 9, "on_alarm": "stop"},
        {"algorithm": "sft", "lora_rank": 8, "lora_alpha": 4.0, "lora_targets": "q_proj"},
        {"algorithm": "dpo", "dpo_label_smoothing": 0.1, "dpo_length_normalized": True},
        {"algorithm": "sft", "sft_append_end": True, "bad_rows": "skip"},
        {"algorithm": "dpo", "sft_append_end": True},
        {"algorithm": "dpo", "lora_rank": 8, "lora_adapter": "there", "lora_export": "here"},
        {"algorithm": "grpo", "sft_loss_on": "all"},
        {"sft_loss_on": "last", "sft_coef": 0.1, "sft_demonstrations": "d.jsonl"},
    ],
)
def test_flags_with_effect_are_accepted(given: Mapping[str, Any]) -> None:
    by_dest = {f"rl_{name}": value for name, value in given.items()}
    check_supervised(config_from(by_dest), by_dest)


def given_files(algorithm: str, path: Path) -> dict[str, Any]:
    if algorithm == "grpo":
        return {"rl_sft_demonstrations": str(path), "rl_sft_coef": 0.1}
    flag = "rl_eval_prompts" if algorithm == "held out" else "rl_prompts"
    return {"rl_algorithm": "sft" if algorithm == "held out" else algorithm, flag: str(path)}


OPTIONS = (
    "answer_column: x",
    "system_prompt: Be brief.",
    "reward: gsm8k",
    "environment: calculator",
    "max_response_tokens: 4",
)
OPTIONS_OF_TRAINING = ("teacher: there", "samples_per_prompt: 4", "weight: 1")


@pytest.mark.parametrize(
    ("algorithm", "option"),
    [
        *itertools.product(("sft", "dpo", "grpo"), OPTIONS + OPTIONS_OF_TRAINING),
        *(("held out", option) for option in OPTIONS),
    ],
)
def test_option_of_a_source_without_effect_is_refused_by_name(
    algorithm: str, option: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.yaml"
    name = option.partition(":")[0]
    path.write_text(f"demo: {{path: d.jsonl, {option}}}")
    given = given_files(algorithm, path)
    with pytest.raises(UsageError, match=f"{path}: {name} of source 'demo' .*; drop it"):
        check_supervised(config_from(given), given)


@pytest.mark.parametrize("algorithm", ["sft", "held out", "dpo", "grpo"])
def test_source_of_rows_is_one_file_with_the_options_that_it_reads(
    algorithm: str, tmp_path: Path
) -> None:
    flags = {"grpo": "--rl-sft-demonstrations", "held out": "--rl-eval-prompts"}
    flag = flags.get(algorithm, "--rl-prompts")
    path = tmp_path / "rows.yaml"
    given = given_files(algorithm, path)
    path.write_text("demo: {path: d.jsonl, prompt_column: question, max_prompt_tokens: 9}")
    check_supervised(config_from(given), given)
    path.write_text("a: {path: a.jsonl}\nb: {path: b.jsonl}")
    with pytest.raises(UsageError, match=f"{flag} {path} names 2 sources.*one file"):
        check_supervised(config_from(given), given)


def test_longest_rows_of_a_source_are_within_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text("demo: {path: d.jsonl, max_prompt_tokens: 600}")
    given = given_files("grpo", path)
    with pytest.raises(UsageError, match="max_prompt_tokens 600 .* --rl-max-prompt-tokens 512"):
        check_supervised(config_from(given), given)


def test_verify_refuses_supervised_training() -> None:
    given = {"rl_algorithm": "sft"}
    with pytest.raises(UsageError, match="--rl-algorithm sft starts no engine.*drop it"):
        check_supervised(config_from(given), given, scores_only=True)
    check_supervised(config_from({}), {}, scores_only=True)


def test_only_supervised_training_has_no_engines() -> None:
    assert RLConfig.of(algorithm="gspo").has_engines
    assert not RLConfig.of(algorithm="sft").has_engines
    assert RLConfig.of(algorithm="dpo").recipe.needs_reference


# The planner --------------------------------------------------------------------------------------


def test_plan_has_the_phases_of_training_alone(folder: Path) -> None:
    tokens = ["--world-size", "4", "--hf-config", str(folder), "--rl-max-prompt-tokens", "64"]
    tokens += ["--rl-max-response-tokens", "64", "--tensor-model-parallel-size", "2"]
    taught = plan_case(
        read_command_line([*tokens, "--rl-algorithm", "sft", "--rl-export-hf", "out"]).case
    )
    sampled = plan_case(
        read_command_line(
            [*tokens, "--rl-num-samples-per-prompt", "1", "--rl-algorithm", "ppo"]
        ).case
    )
    assert [phase.name for phase in taught.memory.phases] == [BUILD, LOG_PROBS, TRAIN, EXPORT]
    assert taught.memory.phase(TRAIN).parts["weights"] > 0
    for phase in taught.memory.phases:
        assert not {"rollout weights", "KV cache", "CUDA graphs"} & phase.parts.keys()
    assert not any("offloaded" in part for part in taught.memory.host_bytes)
    assert any("offloaded" in part for part in sampled.memory.host_bytes)
    written = json.loads(json.dumps(as_json(taught), default=sorted))
    assert written["fits"] and written["rollout"] is None and written["hand_over_seconds"] == 0


def test_plan_counts_the_micro_batches_of_demonstrations(folder: Path) -> None:
    """They only add to what a pipeline stage keeps at once if there are few others."""
    tokens = ["--world-size", "2", "--hf-config", str(folder), "--rl-max-prompt-tokens", "64"]
    tokens += ["--rl-max-response-tokens", "64", "--pipeline-model-parallel-size", "2"]
    tokens += ["--micro-batch-size", "1", "--rl-num-mini-batches", "2"]
    demonstrations = ["--rl-sft-demonstrations", "d.jsonl", "--rl-sft-coef", "0.1"]
    demonstrations += ["--rl-sft-rows-per-step", "6"]
    for samples, is_more in ((1, True), (64, False)):
        step = ["--rl-num-prompts-per-step", "1", "--rl-num-samples-per-prompt", str(2 * samples)]
        alone = read_command_line([*tokens, *step]).case
        mixed = read_command_line([*tokens, *step, *demonstrations]).case
        assert mixed.training.num_micro_batches == alone.training.num_micro_batches == samples
        assert mixed.training.num_demonstration_micro_batches == 3
        # The first stage holds up to two micro-batches, the last one.
        (fewer, last), (more, last_too) = (
            train_activation_bytes(case.actor) for case in (alone, mixed)
        )
        assert (more > fewer) == is_more and last == last_too
