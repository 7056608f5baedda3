"""Sources of prompts: what flags and YAML files name, shares, draws, fingerprints, rewards."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.data.options import DataOptions
from mcore_rl.data.prompt_file import PromptRow
from mcore_rl.data.prompts import PromptSources, load_prompt_files, prompt_indices
from mcore_rl.data.sources import EVAL_PROMPTS, SourceSpec, parse_sources
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.environments.options import EnvironmentOptions
from mcore_rl.hybrid_engine.vllm.generation import Sampling
from mcore_rl.job.preflight import check_ranges
from mcore_rl.rewards.options import RewardOptions
from mcore_rl.rewards.specs import parse_rewards
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.segments import new_rollout
from mcore_rl.trainer.step_metrics import source_metrics
from tests.prompt_tables import one_source, sources
from tests.unit.test_data import TEMPLATE, save_tokenizer, write_lines

SEED = 7

# What the flags name ------------------------------------------------------------------------------


def test_a_file_is_one_source_without_a_name(tmp_path, monkeypatch):
    assert parse_sources("p.jsonl") == (SourceSpec("", "p.jsonl"),)
    assert parse_sources("p.jsonl", EVAL_PROMPTS) == (SourceSpec("", "p.jsonl", is_eval=True),)
    monkeypatch.chdir(tmp_path)
    Path("a,b=0.5.jsonl").touch()  # a file may be called so
    assert parse_sources("a,b=0.5.jsonl") == (SourceSpec("", "a,b=0.5.jsonl"),)


def test_several_files_have_shares_or_go_by_their_sizes():
    assert parse_sources("x/a.jsonl=0.7, b.parquet=.3") == (
        SourceSpec("a", "x/a.jsonl", Fraction(7, 10)),
        SourceSpec("b", "b.parquet", Fraction(3, 10)),
    )
    assert [each.weight for each in parse_sources("a.jsonl,b.jsonl")] == [None, None]


def test_held_out_sets_have_names():
    found = parse_sources("math=a.jsonl,b.jsonl", EVAL_PROMPTS)
    assert [(each.name, each.path) for each in found] == [("math", "a.jsonl"), ("b", "b.jsonl")]
    assert [each.key for each in found] == ["eval/math", "eval/b"]


YAML = """
math: {path: a.jsonl, weight: 0.25, reward: "gsm8k,exact_match", reward_weights: "1,0.5"}
code:
  path: /data/b.parquet
  weight: 0.75
  prompt_column: question
  answer_column: tests
  system_prompt: Write code.
  max_prompt_tokens: 100
  max_response_tokens: 200
"""


def test_a_yaml_file_has_the_options_of_sources(tmp_path):
    (tmp_path / "sources.yaml").write_text(YAML)
    math, code = parse_sources(str(tmp_path / "sources.yaml"))
    assert math.path == str(tmp_path / "a.jsonl") and math.weight == Fraction(1, 4)
    assert (math.reward, math.reward_weights) == ("gsm8k,exact_match", "1,0.5")
    assert code == SourceSpec(
        *("code", "/data/b.parquet", Fraction(3, 4), "question", "tests", "Write code."),
        max_prompt_tokens=100,
        max_response_tokens=200,
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a.jsonl=0.7,b.jsonl=0.2", ("add up to 0.9", "correct the weights")),
        ("a.jsonl=0.7,b.jsonl=0.299998", ("add up to", "correct the weights")),
        ("a.jsonl=0.7,b.jsonl", ("'b' has no weight", "all sources")),
        ("a.jsonl=1,b.jsonl=0", ("weight of 'b.jsonl' is '0'", "leave the source out")),
        ("a.jsonl=nan,b.jsonl=1", ("'nan'", "give the share")),
        ("a.jsonl=1e999999999,b.jsonl=1", ("'1e999999999'", "give the share")),
        ("a.jsonl=1e999,b.jsonl=1", ("'1e999', not a number above 0 and at most 1",)),
        ("a.jsonl=1e-999,b.jsonl=1", ("'1e-999'", "give the share")),
        (f"a.jsonl={'9' * 200_000},b.jsonl=1", (f"'{'9' * 100}...'", "give the share")),
        (f"{'a' * 300}.jsonl=1", (f"cannot be called '{'a' * 100}...'", "at most 100 letters")),
        ("x/a.jsonl=0.5,y/a.parquet=0.5", ("both called 'a'", "YAML")),
        ("a.jsonl=0.5,,b.jsonl=0.5", ("empty part", "one comma")),
        ("=0.5,b.jsonl=0.5", ("names no file", "PATH=WEIGHT")),
        ("a b.jsonl=0.5,c.jsonl=0.5", ("cannot be called 'a b'", "YAML")),
    ],
)
def test_wrong_lists_are_refused_in_one_sentence(value, words):
    with pytest.raises(UsageError) as error:
        parse_sources(value)
    assert str(error.value).startswith(f"--rl-prompts {value}")
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("names no source",)),
        ("- a.jsonl", ("names no source",)),
        ("a: b.jsonl", ("'a' has no path",)),
        ("a: {path: b.jsonl, wieght: 1}", ("unknown key 'wieght'", "weight")),
        ("a: {path: b.jsonl, samples_per_prompt: 0}", ("samples_per_prompt of source 'a' is 0",)),
        ("a: {path: b.jsonl, teacher: 7}", ("teacher of source 'a' is 7",)),
        ("a: {path: b.jsonl, weight: 1/0}", ("weight of 'a' is '1/0'",)),
        ("a: {path: b.jsonl}\na: {path: c.jsonl}", ("key 'a' twice",)),
        ("a/b: {path: b.jsonl}", ("cannot be called 'a/b'",)),
        (f"{'a' * 300}: {{path: b.jsonl}}", (f"cannot be called '{'a' * 100}...'",)),
        ("a: {path: b.jsonl, weight: 1e999}", ("weight of 'a' is '1e999'",)),
        (f"a: {{path: b.jsonl, weight: {'9' * 4000}}}", (f"weight of 'a' is '{'9' * 100}...'",)),
        (f"a: {{path: b.jsonl, weight: {'9' * 5000}}}", ("is not valid YAML",)),
        ("".join(f"a{n}: {{path: b.jsonl}}\n" for n in range(300)), ("300 sources are too",)),
        ("".join(f"a{n}: {{path: b.jsonl}}\n" for n in range(30_000)), ("10,000 values",)),
        (f"a: {{path: b.jsonl, system_prompt: {'x' * (1 << 20)}}}", ("characters",)),
        ("a: {path: b.jsonl, max_prompt_tokens: 0}", ("max_prompt_tokens of source 'a' is 0",)),
        ("a: {path: b.jsonl, weight: true}", ("weight of 'a' is 'True'",)),
        ("a: {path: 3}", ("path of source 'a' is 3",)),
        ("a: {path: b.jsonl, reward_weights: '1'}", ("reward_weights without a reward",)),
        ("a: [", ("not valid YAML",)),
    ],
)
def test_wrong_yaml_files_are_refused_in_one_sentence(text, words, tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        parse_sources(str(path))
    assert all(word in str(error.value) for word in words) and "; " in str(error.value)


def test_held_out_sets_have_no_weight_and_missing_files_are_named(tmp_path):
    (tmp_path / "s.yaml").write_text("a: {path: b.jsonl, weight: 1}")
    with pytest.raises(UsageError, match="unknown key 'weight'"):
        parse_sources(str(tmp_path / "s.yaml"), EVAL_PROMPTS)
    for key in ("teacher: http://host", "samples_per_prompt: 2"):
        (tmp_path / "s.yaml").write_text(f"a: {{path: b.jsonl, {key}}}")
        with pytest.raises(UsageError, match=f"unknown key '{key.split(':')[0]}'"):
            parse_sources(str(tmp_path / "s.yaml"), EVAL_PROMPTS)
    with pytest.raises(UsageError, match="cannot be read"):
        parse_sources(str(tmp_path / "none.yaml"))


def yaml_of(tmp_path: Path, text: str) -> str:
    (tmp_path / "s.yaml").write_text(text)
    return str(tmp_path / "s.yaml")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_prompt_tokens": 50}, "max_prompt_tokens 60 of source 'a' .* --rl-max-prompt-tokens"),
        ({"max_response_tokens": 30}, "max_response_tokens 40 of source 'a'"),
        ({"algorithm": "dapo"}, "overlong.*--rl-overlong-buffer-tokens 0"),
        ({"curriculum": "drop", "partial_rollouts": True}, "--rl-curriculum drop .*partial"),
        ({"curriculum": "less", "rollout_ranks": "1"}, "--rl-curriculum less .*--rl-rollout-ranks"),
    ],
)
def test_sources_and_curricula_fit_the_run(options, words, tmp_path):
    text = "a: {path: b.jsonl, max_prompt_tokens: 60, max_response_tokens: 40}"
    prompts = yaml_of(tmp_path, text)
    check_ranges(RLConfig.of(prompts=prompts, curriculum="drop"))
    with pytest.raises(UsageError, match=words):
        check_ranges(RLConfig.of(prompts=prompts, **options))
    if "rollout_ranks" in options:  # the engines' ranks then have the state of the sampling
        check_ranges(RLConfig.of(**options, max_staleness=0))


# Draws --------------------------------------------------------------------------------------------


def test_one_source_draws_as_before():
    prompts = one_source(10)
    assert prompts.indices(3, 25, seed=SEED).tolist() == (
        prompt_indices(10, start=3, count=25, seed=SEED).tolist()
    )
    assert prompts.fingerprint == prompts.parts[0].fingerprint and prompts.names == ()
    assert prompts.of_draw(4, seed=SEED).index == prompts.indices(4, 1, seed=SEED)[0]


@settings(deadline=None, max_examples=40)
@given(start=st.integers(0, 300), count=st.integers(1, 60))
def test_draws_are_a_pure_function_of_their_number(start, count):
    def fresh() -> PromptSources:
        return sources({"a": 7, "b": 12, "c": 3}, {"a": "0.5", "b": "0.3", "c": "0.2"})

    whole = fresh().indices(start, count, seed=SEED).tolist()
    one_by_one = fresh()
    assert whole == [int(one_by_one.indices(start + n, 1, seed=SEED)[0]) for n in range(count)]


def test_each_source_visits_its_prompts_once_per_epoch():
    prompts = sources({"a": 6, "b": 9}, {"a": "0.25", "b": "0.75"})
    drawn = prompts.indices(0, 24, seed=SEED)  # 6 of a, 18 of b
    assert sorted(drawn[drawn < 6].tolist()) == list(range(6))
    of_b = drawn[drawn >= 6].tolist()
    assert sorted(of_b[:9]) == sorted(of_b[9:]) == list(range(6, 15)) and of_b[:9] != of_b[9:]


def test_without_weights_sources_are_drawn_in_proportion_to_their_prompts():
    drawn = sources({"a": 30, "b": 10}).indices(0, 40, seed=SEED)
    assert sorted(drawn.tolist()) == list(range(40))


def test_prompts_know_their_source_and_rows_are_counted_over_all():
    prompts = sources({"a": 2, "b": 3}, max_response_tokens=5)
    found = [prompts[position] for position in range(len(prompts))]
    assert [each.index for each in found] == prompts.rows.tolist() == [0, 1, 2, 3, 4]
    assert [each.text for each in found] == ["a 0", "a 1", "b 0", "b 1", "b 2"]
    assert [each.source for each in found] == ["a", "a", "b", "b", "b"]
    assert prompts.sources_of(np.array([0, 4, 1, 2])).tolist() == [0, 1, 0, 1]
    assert prompts.first_of_each(2).tolist() == [0, 1, 2, 3]
    plan = GroupPlan(1, Sampling(1.0), 9, seed=1)
    assert plan.request(0, new_rollout(found[0], 0, 0)).max_tokens == 5


def test_a_system_prompt_precedes_messages_without_one():
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "1+1"}]
    for prompt, expected in (
        ("1+1", ["Add.", "1+1"]),
        (own[1:], ["Add.", "1+1"]),
        (own, ["Mine.", "1+1"]),
    ):
        row = PromptRow("line 1", prompt, "2", {})
        messages = row.request(use_chat_template=True, system_prompt="Add.")["messages"]
        assert [each["content"] for each in messages] == expected
        assert "Add." not in row.text


def test_environments_of_sources_need_one_of_the_run():
    own = [
        SourceSpec("a", "a", environment="calculator"),
        SourceSpec("b", "b", environment="none", is_eval=True, reward="gsm8k"),
        SourceSpec("c", "c"),
    ]
    options = EnvironmentOptions(environment="python_sandbox")
    spec = options.spec((), None, own)
    assert spec is not None and spec.names == ("python_sandbox", "calculator")
    found = [spec.name_for(each.key) for each in own]
    assert found == ["calculator", "none", "python_sandbox"]
    assert EnvironmentSpec("./mine.py:Guess", 1.0).class_for("") == "Guess"
    with pytest.raises(UsageError, match="--rl-environment is missing.*a, eval/b"):
        EnvironmentOptions().spec((), None, own)
    rewards = parse_rewards("environment", RewardOptions(), (), own)
    assert rewards.weights_of("eval/b") == {"gsm8k": 1.0}
    assert rewards.weight("environment") == 1.0
    with pytest.raises(UsageError, match="'b' has no environment"):
        parse_rewards(
            "environment", RewardOptions(), (), [SourceSpec("b", "b", environment="none")]
        )


# Rewards and metrics ------------------------------------------------------------------------------

OF_SOURCES = (
    SourceSpec("a", "a.jsonl", reward="arithmetic"),
    SourceSpec("b", "b.jsonl", reward="exact_match,arithmetic", reward_weights="1,0.5"),
)


def rollout(source: str, text: str, answer: str = "5", row: int = 0) -> Rollout:
    prompt = Prompt(row, "2+3=", answer, np.zeros(1, np.int32), source=source)
    return dataclasses.replace(new_rollout(prompt, 0, 0), text=text, finish_reason="stop")


def test_rewards_of_sources_replace_those_of_the_run():
    spec = parse_rewards("gsm8k", RewardOptions(), (), OF_SOURCES)
    assert spec.names == ("arithmetic", "exact_match")  # no source uses gsm8k
    mixed = parse_rewards("gsm8k", RewardOptions(), (), (*OF_SOURCES, SourceSpec("c", "c.jsonl")))
    assert mixed.names == ("gsm8k", "arithmetic", "exact_match")
    assert mixed.weights_of("c") == {"gsm8k": 1.0}
    assert mixed.of_source("b").names == ("exact_match", "arithmetic")
    assert parse_rewards("gsm8k", RewardOptions(), (), [SourceSpec("c", "c")]).of_sources == {}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (SourceSpec("a", "a", reward="gsm8k,,b"), "source 'a'.*empty name"),
        (SourceSpec("a", "a", reward="gsm8k", reward_weights="1,2"), "source 'a'.*2 weight"),
        (SourceSpec("a", "a", reward="environment"), "weighs the reward environment"),
    ],
)
def test_wrong_rewards_of_a_source_name_it(source, words):
    with pytest.raises(UsageError, match=words):
        parse_rewards("gsm8k", RewardOptions(), (), [source])


def test_each_sample_is_scored_by_the_rewards_of_its_source():
    spec = parse_rewards("gsm8k", RewardOptions(reward_workers=1), (), OF_SOURCES)
    samples = [rollout("a", "so 5"), rollout("b", "so 5"), rollout("b", "5"), rollout("a", "6")]
    with RewardStack(spec) as stack:
        scored = stack.score(samples)
    assert [each.reward for each in scored] == [1.0, 0.5, 1.5, 0.0]
    assert scored[0].parts == {"arithmetic": 1.0}
    assert scored[1].parts == {"exact_match": 0.0, "arithmetic": 1.0}


def test_metrics_of_sources_count_their_own_samples():
    prompts = sources({"a": 2, "b": 2})
    spec = parse_rewards("gsm8k", RewardOptions(), (), OF_SOURCES)

    def scored(source: str, row: int, reward: float, **parts: float) -> ScoredRollout:
        return ScoredRollout(rollout(source, "", row=row), reward, parts=parts)

    failed = ScoredRollout(rollout("b", "", row=3), 0.0, "timed out", {"exact_match": 0.0})
    table = SampleTable.of(
        [
            scored("a", 0, 1.0, arithmetic=1.0),
            scored("a", 1, 0.0, arithmetic=0.0),
            scored("b", 2, 1.5, arithmetic=1.0, exact_match=1.0),
            failed,
        ],
        draws=[0, 1, 2, 3],
    )
    assert source_metrics(table, prompts, spec) == {
        "reward/arithmetic/mean": pytest.approx(2 / 3),
        "reward/arithmetic/failures": 1.0,
        "reward/exact_match/mean": 0.5,
        "reward/exact_match/failures": 0.0,
        "source/a/prompts": 2.0,
        "source/a/response_tokens_mean": 0.0,
        "source/a/reward_mean": 0.5,
        "source/a/accuracy": 0.5,
        "source/b/prompts": 2.0,
        "source/b/response_tokens_mean": 0.0,
        "source/b/reward_mean": 1.5,
        "source/b/accuracy": 1.0,
    }
    assert source_metrics(table, one_source(4), parse_rewards("gsm8k", RewardOptions())) == {}


@pytest.mark.parametrize("flag", ["--rl-prompts", "--rl-eval-prompts"])
@pytest.mark.parametrize("in_yaml", [False, True])
@pytest.mark.parametrize(
    ("content", "words"),
    [("", "is empty; write one prompt per line"), (" \n\n", "holds no rows; write one")],
)
def test_empty_file_among_several_sources_is_named(content, words, in_yaml, flag, tmp_path):
    full = write_lines(tmp_path / "full.jsonl", [{"prompt": "1+1", "answer": "2"}])
    empty = tmp_path / "empty.jsonl"
    empty.write_text(content)
    value = f"{full},{empty}"
    if in_yaml:
        (tmp_path / "s.yaml").write_text("a: {path: full.jsonl}\nb: {path: empty.jsonl}")
        value = str(tmp_path / "s.yaml")
    files = {"prompts": str(full), flag.removeprefix("--rl-").replace("-", "_"): value}
    options = DataOptions(**files, cache_dir=str(tmp_path / "cache"))
    tokenizer = save_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    with pytest.raises(UsageError, match=f"^{flag} {empty} {words}") as refused:
        load_prompt_files(options, tokenizer)
    assert "\n" not in str(refused.value)
