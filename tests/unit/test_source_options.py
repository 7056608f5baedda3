"""Samples per prompt and teachers of sources of prompts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.batching.table import SampleTable
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.data.prompts import PromptSources
from mcore_rl.job.preflight import check_ranges
from mcore_rl.job.teachers import check_teacher_flags
from mcore_rl.model.teacher import TeacherPlace
from mcore_rl.trainer.models import teachers_by_source
from tests.prompt_tables import dataset

SEED = 7


def yaml_of(tmp_path: Path, text: str) -> str:
    (tmp_path / "s.yaml").write_text(text)
    return str(tmp_path / "s.yaml")


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
        ({"partial_rollouts": True}, "--rl-partial-rollouts .*; drop"),
        ({"rollout_ranks": "1"}, "--rl-rollout-ranks 1 .*--rl-max-staleness 0"),
    ],
)
def test_steps_of_any_prompts_need_groups_of_one_size(options, words, tmp_path):
    prompts = of_two_sizes(tmp_path, "0.25", "0.75")
    with pytest.raises(UsageError, match=f"different samples_per_prompt, and {words}"):
        check_ranges(RLConfig.of(prompts=prompts, num_prompts_per_step=4, **options))
    for served in ({}, {"algorithm": "dapo", "overlong_buffer_tokens": 0}, {"oversample": 1.5}):
        check_ranges(RLConfig.of(prompts=prompts, num_prompts_per_step=4, **served))
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
    assert prompts.most_samples == 6
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
