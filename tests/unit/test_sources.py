"""Sources of prompts: what flags and YAML files name, shares, draws, fingerprints, rewards."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.data.apportionment import Apportionment
from mcore_rl.data.drawn import Begin, changes_between, continued
from mcore_rl.data.prompt_file import PromptRow
from mcore_rl.data.prompts import PromptSources, prompt_indices
from mcore_rl.data.sources import EVAL_PROMPTS, SourceSpec, parse_sources
from mcore_rl.environments.options import EnvironmentOptions
from mcore_rl.hybrid_engine.vllm.generation import Sampling
from mcore_rl.job.preflight import check_ranges
from mcore_rl.job.teachers import check_teacher_flags
from mcore_rl.model.teacher import TeacherPlace
from mcore_rl.rewards.options import RewardOptions
from mcore_rl.rewards.specs import parse_rewards
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.segments import new_rollout
from mcore_rl.trainer.models import teachers_by_source
from mcore_rl.trainer.step_metrics import source_metrics
from tests.prompt_tables import dataset, one_source, sources

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


TWO_SIZES = "a: {path: a.jsonl, weight: WEIGHT_A}\nb: {path: b.jsonl, weight: WEIGHT_B, N}"


def of_two_sizes(tmp_path: Path, a: str, b: str, own: str = "samples_per_prompt: 6") -> str:
    text = TWO_SIZES.replace("WEIGHT_A", a).replace("WEIGHT_B", b).replace("N}", f"{own}}}")
    return yaml_of(tmp_path, text)


@pytest.mark.parametrize(
    ("weights", "num_prompts", "words"),
    [
        (("0.3", "0.7"), 8, "'a' 2.4 of --rl-num-prompts-per-step 8 .*1/4 for 'a', 3/4 for 'b'"),
        (("0.001", "0.999"), 4, "weights 1/4 for 'a', 3/4 for 'b'"),
        (("0.333333", "0.666667"), 3, "weights 1/3 for 'a', 2/3 for 'b'"),
        (("0.5", "0.5"), 1, "raise that to 2"),
    ],
)
def test_sources_of_different_group_sizes_need_whole_quotas(weights, num_prompts, words, tmp_path):
    prompts = of_two_sizes(tmp_path, *weights)
    config = RLConfig.of(prompts=prompts, num_prompts_per_step=num_prompts)
    with pytest.raises(UsageError, match=words):
        check_ranges(config)
    if "1/3" in words:  # the remedy works
        fits = RLConfig.of(prompts=of_two_sizes(tmp_path, "1/3", "2/3"), num_prompts_per_step=3)
        check_ranges(fits)
        assert fits.samples_per_step == 8 + 2 * 6 and fits.samples_per_prompt == 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "dapo", "overlong_buffer_tokens": 0}, "--rl-dynamic-sampling .*; drop"),
        ({"partial_rollouts": True}, "--rl-partial-rollouts"),
        ({"oversample": 1.5}, "--rl-oversample 1.5"),
        ({"rollout_ranks": "1"}, "--rl-rollout-ranks 1 .*--rl-max-staleness 0"),
    ],
)
def test_steps_of_any_prompts_need_groups_of_one_size(options, words, tmp_path):
    prompts = of_two_sizes(tmp_path, "0.25", "0.75")
    with pytest.raises(UsageError, match=f"different samples_per_prompt, and {words}"):
        check_ranges(RLConfig.of(prompts=prompts, num_prompts_per_step=4, **options))
    check_ranges(RLConfig.of(prompts=prompts, num_prompts_per_step=4))
    same = of_two_sizes(tmp_path, "0.25", "0.75", own="samples_per_prompt: 16")
    given = {"num_prompts_per_step": 4, "num_samples_per_prompt": 16, **options}
    check_ranges(RLConfig.of(prompts=same, **given))


def test_group_sizes_that_say_nothing_new_or_compare_nothing_are_refused(tmp_path):
    own = of_two_sizes(tmp_path, "0.5", "0.5", own="samples_per_prompt: 1")
    with pytest.raises(UsageError, match="samples_per_prompt 1 of source 'b' leaves nothing"):
        check_ranges(RLConfig.of(prompts=own, num_prompts_per_step=2))
    check_ranges(RLConfig.of(prompts=own, num_prompts_per_step=2, advantage="remax"))
    only = yaml_of(tmp_path, "a: {path: a.jsonl, samples_per_prompt: 4}")
    with pytest.raises(UsageError, match="give --rl-num-samples-per-prompt 4"):
        check_ranges(RLConfig.of(prompts=only))
    check_ranges(RLConfig.of(prompts=only, num_samples_per_prompt=4))
    sizes = yaml_of(tmp_path, "a: {path: a.jsonl, samples_per_prompt: 4}\nb: {path: b.jsonl}")
    with pytest.raises(UsageError, match="no weights.*; give the weights 1/2 for 'a', 1/2 for 'b'"):
        check_ranges(RLConfig.of(prompts=sizes))


def test_every_step_has_the_samples_of_its_sources(tmp_path):
    path = of_two_sizes(tmp_path, "0.25", "0.75")
    config = RLConfig.of(prompts=path, num_prompts_per_step=4, num_samples_per_prompt=2)
    parts = [(spec, dataset(9, spec.name)) for spec in config.data.train_sources()]
    prompts = PromptSources(parts, per_step=4)
    assert prompts.apportionment.is_constant and prompts.most_samples == 6
    sizes = [prompts.of_draw(draw, seed=SEED).num_samples or 2 for draw in range(40)]
    assert [sum(sizes[at : at + 4]) for at in range(0, 40, 4)] == [config.samples_per_step] * 10


# Teachers ---------------------------------------------------------------------------------------


def test_sources_name_teachers_and_the_run_names_the_default(tmp_path):
    text = (
        "a: {path: a.jsonl, teacher: big}\nb: {path: b.jsonl}\nc: {path: c.jsonl, teacher: none}\n"
        "d: {path: d.jsonl, teacher: 'http://host:8000'}\ne: {path: e.jsonl, teacher: big}"
    )
    path = yaml_of(tmp_path, text)
    config = RLConfig.of(prompts=path, teacher="base", num_prompts_per_step=5)
    big = TeacherPlace(f"{tmp_path}/big", f"--rl-prompts {path}: teacher of source 'a'")
    base, host = (
        TeacherPlace("base", "--rl-teacher"),
        TeacherPlace("http://host:8000", f"--rl-prompts {path}: teacher of source 'd'"),
    )
    assert config.teachers == (big, base, host)
    places = [None if each is None else each.place for each in config.teachers_of_sources]
    assert places == [big.place, "base", None, host.place, big.place]
    check_teacher_flags(config)
    without = RLConfig.of(prompts=path)
    assert [each.place for each in without.teachers] == [big.place, host.place]
    prompts = PromptSources([(s, dataset(2, s.name)) for s in config.data.train_sources()])
    table = SampleTable.of_lengths(np.ones(5, np.int64), np.ones(5, np.int64))
    table = dataclasses.replace(table, prompts=np.array([9, 0, 2, 5, 6]))
    assert teachers_by_source(prompts, [0, 1, -1, 2, 0])(table).tolist() == [0, 0, 1, -1, 2]


OWN = "a: {path: a.jsonl, teacher: X}\nb: {path: b.jsonl, teacher: Y}"


@pytest.mark.parametrize(
    ("x", "y", "options", "words"),
    [
        ("p", "q", {"teacher": "r"}, "--rl-teacher r has no effect"),
        ("none", "none", {"teacher": "r"}, "--rl-teacher r has no effect"),
        ("p", "q", {"teacher_ranks": "2-3"}, "--rl-teacher-ranks 2-3 .*2 are given .*p.*q"),
        ("p", "q", {"teacher_form": "full"}, "--rl-teacher-form full .*set it to topk or token"),
        ("p", "http://h", {"teacher_form": "topk"}, "form topk .*'b' http://h is a server"),
        ("p", "http://h", {"temperature": 0.5}, "teacher of source 'b' http://h .*temperature"),
        ("p", "q", {"teacher_header_env": "A"}, "--rl-teacher-header-env A has no effect"),
        ("http://g", "http://h", {"teacher_tp_size": 2}, "--rl-teacher-tp-size 2 has no effect"),
        ("none", "q", {"reward": "none"}, "--rl-reward none leaves nothing .*add --rl-teacher"),
        ("none", "none", {"teacher_coef": 2.0}, "--rl-teacher-coef 2.0 has no effect without"),
    ],
)
def test_teachers_that_cannot_be_combined_are_refused(x, y, options, words, tmp_path):
    path = yaml_of(tmp_path, OWN.replace("X", x).replace("Y", y))
    with pytest.raises(UsageError, match=words):
        check_teacher_flags(RLConfig.of(prompts=path, **options))
    if "reward" in options:
        text = (tmp_path / "s.yaml").read_text().replace("teacher: none", "reward: exact_match")
        check_teacher_flags(RLConfig.of(prompts=yaml_of(tmp_path, text), **options))


# Shares -------------------------------------------------------------------------------------------

SHARES = st.lists(st.integers(1, 1000), min_size=2, max_size=7)


@settings(deadline=None, max_examples=80)
@given(shares=SHARES, block=st.integers(1, 40), num_blocks=st.integers(1, 60))
def test_steps_and_counts_are_within_a_prompt_of_their_share(shares, block, num_blocks):
    found, ranks = Apportionment(shares, block).of_draws(0, block * num_blocks)
    for source, share in enumerate(shares):
        is_of = found == source
        quotas = is_of.reshape(num_blocks, block).sum(axis=1)
        exact = Fraction(block * share, sum(shares))
        assert {*quotas.tolist()} <= {math.floor(exact), math.ceil(exact)}
        for number, count in enumerate(np.cumsum(quotas).tolist(), start=1):
            assert math.floor(number * exact) <= count <= math.ceil(number * exact)
        assert ranks[is_of].tolist() == list(range(is_of.sum()))  # each once, in order


@settings(deadline=None, max_examples=40)
@given(
    shares=SHARES,
    block=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 400), min_size=2, max_size=5),
    position=st.integers(0, 99),
)
def test_draws_do_not_depend_on_the_order_of_questions(shares, block, cuts, position):
    before = list(range(len(shares)))

    def fresh() -> Apportionment:
        return Apportionment(shares, block, position=position, counts=before)

    found, ranks = fresh().of_draws(position, 500)
    asked = fresh()
    for cut in cuts:
        for count in (0, 1, 30):
            start = position + cut
            got = [each.tolist() for each in asked.of_draws(start, count)]
            assert got == [each[cut : cut + count].tolist() for each in (found, ranks)]
        counts = np.bincount(found[:cut], minlength=len(shares)) + before
        assert asked.counts(position + cut) == counts.tolist()


def test_shares_are_exact_over_a_period():
    apportionment = Apportionment([1, 2, 4], 5)
    assert apportionment.counts(7 * 5 * 3) == [15, 30, 60]
    far = 7 * 10**9  # found without the blocks before
    assert apportionment.counts(far + 2) == [
        far // 7 * units + first
        for units, first in zip((1, 2, 4), apportionment.counts(2), strict=True)
    ]
    # Numbers that would overflow are rounded.
    rounded = Apportionment([10**20, 1, 10**20 // 3], 8)
    assert rounded.counts(8)[0] in (5, 6) and sum(rounded.counts(8)) == 8
    assert Apportionment([2, 1, 1], 8).is_constant and not Apportionment([2, 1, 1], 6).is_constant


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
    plan = GroupPlan(1, Sampling(1.0), 9, seed=1, first_draw=0, weight_version=0)
    assert plan.request(0, new_rollout(found[0], 0, 0)).max_tokens == 5


def of(sizes: dict[str, int], *weights: str, **options: Any) -> PromptSources:
    return sources(sizes, dict(zip(sizes, weights, strict=True)), **options)


def test_a_changed_set_of_sources_is_another_one():
    before = of({"a": 4, "b": 4}, "0.5", "0.5")
    assert before.are_those_of(of({"a": 4, "b": 4}, "0.5", "0.5").fingerprint)
    assert one_source(4).are_those_of(before.fingerprint) is False
    assert before.are_those_of("size and time of a file") is None
    for now, why in (
        (of({"a": 4, "b": 4}, "0.6", "0.4"), "weights differ"),
        (of({"b": 4, "a": 4}, "0.5", "0.5"), "order"),
        (of({"a": 4, "b": 4}, "0.5", "0.5", per_step=2), "a step has 2 prompts of all, and had 1"),
        (of({"a": 4, "b": 4, "c": 4}, "0.5", "0.25", "0.25"), "'c' is new"),
        (of({"b": 4}, "1"), "'a' is missing, 'b' is missing"),
        (of({"a": 4, "d": 4}, "0.5", "0.5"), "'d' is new, 'b' is missing"),
        (of({"a": 5, "b": 4}, "0.5", "0.5"), "'a' has other prompts"),
    ):
        assert now.are_those_of(before.fingerprint) is False
        assert why in changes_between(before.fingerprint, now.fingerprint)


def test_sources_continue_where_they_were_after_others_join_or_shares_change():
    def after(first: PromptSources, now: PromptSources, position: int) -> PromptSources:
        fingerprints = first.fingerprint, now.fingerprint
        return now.begun(continued(fingerprints[0], first.begin, position, fingerprints[1]))

    def drawn(prompts: PromptSources, start: int, count: int, name: str) -> list[str]:
        found = [prompts.of_draw(draw, seed=SEED) for draw in range(start, start + count)]
        return [each.text for each in found if each.text.startswith(name)]

    two = of({"a": 7, "b": 9}, "0.5", "0.5", per_step=4)
    three = after(two, of({"a": 7, "c": 5, "b": 9}, "0.25", "0.5", "0.25", per_step=8), 12)
    assert three.begin == Begin(12, {"a": 6, "b": 6})
    for name in "ab":
        assert drawn(two, 0, 12, name) + drawn(three, 12, 24, name) == drawn(two, 0, 24, name)
    assert len(drawn(three, 12, 8, "c")) == 4  # the first step has the new quotas
    assert drawn(three, 12, 8, "c") == drawn(three.begun(Begin()), 0, 8, "c")
    # Again, with other prompts of one source.
    last = after(three, of({"a": 8, "c": 5, "b": 9}, "0.25", "0.5", "0.25"), 20)
    assert last.begin == Begin(20, {"b": 8, "c": 4})


def test_the_only_source_continues_beside_another():
    one = PromptSources([(SourceSpec("", "a.jsonl"), dataset(7, "a"))])
    now = of({"b": 5, "a": 7}, "0.5", "0.5", per_step=2)
    two = now.begun(continued(one.fingerprint, one.begin, 10, now.fingerprint))
    assert two.begin == Begin(10, {"a": 10}, only_source="a")
    texts = [two.of_draw(draw, seed=SEED).text for draw in range(10, 30)]
    of_a = [text for text in texts if text.startswith("a")]
    assert of_a == [one.of_draw(draw, seed=SEED).text for draw in range(10, 20)]
    # Back to one file, which has no name: its order is another one, so it begins again.
    assert continued(two.fingerprint, two.begin, 30, one.fingerprint) == Begin(30)
    assert changes_between(one.fingerprint, two.fingerprint) == "'b' is new"


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
