"""The doctor's checks of a command line and of the files that it names."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.common.machine import MachineMemory
from mcore_rl.common.platform import WITHOUT_CUDA
from mcore_rl.config import RLConfig
from mcore_rl.job.facts import Facts
from mcore_rl.job.inputs import check_data
from mcore_rl.megatron.rng import RngState
from mcore_rl.planner.plan import Outcome
from mcore_rl.rewards.pool import check_functions
from mcore_rl.rewards.specs import RewardSpec, parse_rewards
from mcore_rl.tools.doctor import job as doctor_job
from mcore_rl.tools.doctor import reward as reward_checks
from mcore_rl.tools.doctor.data import examine_data, run
from mcore_rl.tools.doctor.examination import examine_machine
from mcore_rl.tools.doctor.finding import Finding, Report, Request
from mcore_rl.tools.doctor.flags import check_flags, check_taken_flags
from mcore_rl.tools.doctor.installation import Gpus
from mcore_rl.tools.doctor.job import (
    check_batches,
    check_interval,
    check_load,
    check_network_of,
    check_plan,
    check_space,
    checkpoint_bytes,
    examine_job,
    make_plan,
)
from mcore_rl.tools.doctor.reward import few_of, try_environment, try_rewards
from mcore_rl.trainer.resume import folders
from mcore_rl.trainer.resume.trainer_state import (
    TrainerState,
    date_of_checkpoints,
    read_trainer_state,
    save_trainer_state,
)
from tests.bad_input_cases import Case, tokens_of
from tests.bad_input_folder import FIRST, INDEX, SECOND
from tests.reward_server import Server, running_server
from tests.untrusted import need_code_of_tokenizer

GB = 10**9


def found_of(findings: Iterable[Finding], level: str) -> list[str]:
    return [finding.found for finding in findings if finding.level == level]


@dataclasses.dataclass(frozen=True)
class Job:
    """A job, and what is found of its flags."""

    facts: Facts
    findings: list[Finding]

    @property
    def reds(self) -> list[str]:
        return found_of(self.findings, "red")


def read(
    folder: Path, more: str = "", *, environment: dict[str, str] | None = None, **flags: str | None
) -> Job:
    """The job of a folder, its flags changed."""
    changes = {"--" + name.replace("_", "-"): value for name, value in flags.items()}
    tokens = tokens_of(Case("case", [], flags=changes, more=more), folder)
    report = Report()
    facts = check_flags(
        report, tokens, world_size=2, platform=WITHOUT_CUDA, environment=environment or {}
    )
    return Job(facts, report.findings)


@pytest.fixture(scope="module")
def passed(good: Path) -> Job:
    return read(good)


# -------------------------------------------------------------------------------------- the flags


def test_correct_command_line_is_green(passed: Job) -> None:
    assert [finding.level for finding in passed.findings] == ["green"]
    facts = passed.facts
    assert facts.spec is not None and facts.batches_are_right
    assert facts.actor is not None and facts.actor.layout.tp_size == 2


def test_flags_that_a_start_would_choose_are_named_and_examined(here: Path) -> None:
    given = dict.fromkeys(("tensor_model_parallel_size", "expert_model_parallel_size"))
    found = read(here, rl_layout="auto", **given)
    assert not found.reds, found.reds
    (finding,) = found.findings
    config, actor = found.facts.config, found.facts.actor
    assert config is not None and actor is not None
    tokens = config.trainer.max_tokens_per_microbatch
    assert finding.level == "green" and tokens > 0
    assert f"--tensor-model-parallel-size {actor.layout.tp_size} " in finding.found
    assert f"--rl-max-tokens-per-microbatch {tokens} " in finding.found


def test_a_layout_that_cannot_be_chosen_is_red(here: Path) -> None:
    assert "--tensor-model-parallel-size 2 fixes a part" in read(here, rl_layout="auto").reds[0]


def test_all_faults_are_reported_at_once(here: Path) -> None:
    (here / "flags.yaml").write_text("rl_num_stepz: 4\nlr: 1e-5\nrl-alarm-window: 1\n")
    (here / "run").write_text("a file where a folder is to be made")
    job = read(
        here,
        "--rl-foo 3 --rl-num-epochs abc --calculate-per-token-loss --num-layers 7 "
        f"--rl-config {here}/flags.yaml",
        tensor_model_parallel_size="3",
    )
    for words in (
        "unknown key 'rl_num_stepz'",
        "--rl-num-epochs: invalid int value: 'abc'",
        "unknown flag --rl-foo",
        "--rl-alarm-window 1 must be at least 2",
        "--calculate-per-token-loss switches on another normalisation",
        f"--rl-run-dir {here}/run",
        "--num-layers 7 contradicts config.json",
        "--tensor-model-parallel-size 3",
    ):
        assert sum(words in sentence for sentence in job.reds) == 1, (words, job.reds)
    assert len(job.reds) == 8, job.reds
    assert all(finding.remedy for finding in job.findings if finding.level != "green")
    assert job.facts.values is not None and job.facts.values["lr"] == 1e-5
    assert job.facts.spec is None


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("tensor_model_parallel_size", "two"),
        ("rl_max_prompt_tokens", "-5"),  # 512 of the default would not fit the model
        ("rl_num_prompts_per_step", "0"),
    ],
)
def test_checks_that_depend_on_a_wrong_flag_are_skipped(good: Path, flag: str, value: str) -> None:
    """Its default is not what the user meant."""
    job = read(good, **{flag: value})
    assert len(job.reds) == 1, job.findings
    assert job.facts.shape is not None and job.facts.spec is None


def test_a_batch_that_does_not_divide_is_red_and_the_layout_stands(good: Path) -> None:
    job = read(good, "--rl-num-mini-batches 3")
    (red,) = job.reds
    assert "--rl-num-mini-batches 3" in red
    assert job.facts.actor is not None and not job.facts.batches_are_right


def test_flags_that_megatron_refuses_are_red(good: Path) -> None:
    (red,) = read(good, "--overlap-param-gather").reds
    assert red.startswith("Megatron refuses these flags")


@pytest.mark.parametrize(
    ("queues", "flags", "is_refused"),
    [("8", "", True), ("1", "", False), ("1", "--use-megatron-fsdp", True)],
)
def test_queues_are_refused_where_megatron_asserts(
    good: Path, monkeypatch: pytest.MonkeyPatch, queues: str, flags: str, is_refused: bool
) -> None:
    """TP wants one queue before Blackwell, FSDP several."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    reds = read(good, flags).reds
    assert any("CUDA_DEVICE_MAX_CONNECTIONS" in red for red in reds) == is_refused, reds


def test_expandable_segments_that_slow_the_engines_are_yellow(passed: Job) -> None:
    assert passed.facts.config is not None
    job = doctor_job.Job(passed.facts, passed.facts.config)
    assert passed.facts.rollout is not None and passed.facts.rollout.tp_size == 2
    usual = {"HF_HUB_OFFLINE": "1"}
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    (found,) = check_network_of(job, {**usual, **setting}, [(9, 0)])
    assert found.level == "yellow" and "all-reduce" in found.found
    assert "take expandable_segments out of it" in found.remedy
    assert not list(check_network_of(job, usual, [(9, 0)]))
    assert not list(check_network_of(job, {**usual, **setting}, []))  # no GPU


def test_flags_without_effect_or_given_twice_are_yellow(good: Path) -> None:
    job = read(
        good,
        "--rl-rollout-gpu-memory-utilization 0.4 --lr 1e-5 --lr 1e-6 --eval-iters 3",
        environment={"WORLD_SIZE": "16"},
    )
    yellows = found_of(job.findings, "yellow")
    for words, found in zip(
        ("--lr is given 2 times", "--eval-iters", "--rl-rollout-gpu-memory", "WORLD_SIZE=16"),
        yellows,
        strict=True,
    ):
        assert words in found
    assert not job.reds and job.facts.spec is not None


IMPORTED = {
    "estimates": """
from mcore_rl.algorithms.registry import advantage_estimator
@advantage_estimator("doctor_estimates")
def estimate(inputs, config):
    raise NotImplementedError
""",
    "scores": """
from mcore_rl.rewards.functions import reward
@reward("doctor_scores")
def score(*, prompt, response, answer):
    return float(response == answer)
""",
}


@pytest.mark.slow
def test_several_files_may_be_imported(good: Path, tmp_path: Path) -> None:
    """What only one of them has is known to the checks, and to the processes of rewards."""
    imports = []
    for name, text in IMPORTED.items():
        (tmp_path / f"{name}.py").write_text(text)
        imports += ["--rl-import", str(tmp_path / f"{name}.py")]
    flags = f"{' '.join(imports)} --rl-advantage doctor_estimates"
    job = read(good, flags, rl_reward="doctor_scores")
    assert not job.reds and not found_of(job.findings, "yellow")
    assert job.facts.spec is not None
    (found,) = try_rewards(job.facts.spec.rewards, FEW)
    assert (found.level, found.area) == ("green", "reward")


def test_flags_that_megatron_defines_too_are_red() -> None:
    parser = argparse.ArgumentParser()
    assert not found_of(check_taken_flags(parser), "red")
    parser.add_argument("--rl-reward")
    parser.add_argument("--rl-config")
    reds = found_of(check_taken_flags(parser), "red")
    assert [sentence.split()[0] for sentence in reds] == ["--rl-reward", "--rl-config"]


# --------------------------------------------------------------------------------- the checkpoint


def test_a_missing_shard_is_red_and_flags_are_still_checked(here: Path) -> None:
    (here / "checkpoint" / SECOND).unlink()
    job = read(here, "--rl-num-stepz 4")
    assert [(f.area, f.level) for f in job.findings] == [("flags", "red"), ("checkpoint", "red")]
    assert f"{SECOND} is missing but named in" in job.findings[1].found
    assert job.findings[1].remedy == "copy the checkpoint again"


def save(folder: Path, step: int) -> Path:
    """A complete checkpoint of a few bytes."""
    place = folders.saving_folder(folder) / folders.iteration_name(step)
    place.mkdir(parents=True)
    (place / "__0_0.distcp").write_bytes(b"weights" * step)
    return folders.complete(folder, step, folders.sealed(place, folders.files_of(place)))


def loaded(
    config: RLConfig | None = None, **values: object
) -> tuple[list[tuple[str, str]], Path | None]:
    """Levels and sentences about `--load`, and the checkpoint to resume from."""
    report, place = Report(), None
    with report.catching("checkpoint"):
        place = check_load(report, values, config or RLConfig())
    return [(each.level, f"{each.found}; {each.remedy}") for each in report.findings], place


def test_load_takes_the_newest_undamaged_step(tmp_path: Path) -> None:
    load = str(tmp_path)
    assert loaded() == ([], None)
    (found,), place = loaded(load=load)
    assert found[0] == "red" and place is None
    assert f"--load {load}" in found[1] and "--rl-load-or-start" in found[1]
    (found,), place = loaded(RLConfig.of(load_or_start=True), load=load)
    assert found[0] == "green" and place is None
    newest, older = save(tmp_path, 20), save(tmp_path, 10)
    (found,), place = loaded(load=load)
    assert found[0] == "green" and "step 20" in found[1] and place == newest
    (newest / "__0_0.distcp").write_bytes(b"cut")
    (found, damaged), place = loaded(load=load)
    assert (damaged[0], found[0], place) == ("yellow", "green", older)
    assert "3 bytes instead of 140" in damaged[1] and "step 10" in found[1]
    (found,), _ = loaded(load=load, ckpt_step=15)
    assert found[0] == "red" and "--ckpt-step 15" in found[1] and "10, 20" in found[1]
    (older / "__0_0.distcp").write_bytes(b"x" * 70)  # as many bytes
    assert [level for level, _ in loaded(load=load)[0]] == ["yellow", "yellow", "red"]


def test_finetune_takes_only_the_weights(tmp_path: Path) -> None:
    """The prompts of the run may then differ from those of the checkpoint."""
    place = save(tmp_path, 10)
    (found,), resumed = loaded(load=str(tmp_path), finetune=True)
    assert found[0] == "green" and "only the weights of step 10" in found[1] and resumed is None
    (place / "__0_0.distcp").write_bytes(b"cut")
    found, _ = loaded(load=str(tmp_path), finetune=True)
    assert [level for level, _ in found] == ["yellow", "red"]


def test_save_only_at_the_end_is_yellow() -> None:
    levels = [check_interval(interval, 60).level for interval in (60, 59, None)]
    assert levels == ["yellow", "green", "green"]
    assert "drop it" in check_interval(60, 60).remedy


def test_saving_below_the_steps_of_another_run_is_red(tmp_path: Path) -> None:
    saved, other = tmp_path / "saved", tmp_path / "other"
    for step in (10, 20):
        save(saved, step)
    save(other, 5)

    def reds(**values: object) -> list[str]:
        return [text for level, text in loaded(save=str(saved), **values)[0] if level == "red"]

    (red,) = reds()
    assert f"--save {saved} has a checkpoint of step 20, and this run begins at step 0" in red
    assert reds(load=str(saved)) == []
    assert "begins at step 10" in reds(load=str(saved), ckpt_step=10)[0]
    assert "begins at step 5" in reds(load=str(other))[0]
    assert "begins at step 0" in reds(load=str(saved), finetune=True)[0]


# ------------------------------------------------------------------------------ batches and plan


def test_batches_are_described_as_at_a_start(passed: Job) -> None:
    found = list(check_batches(passed.facts))
    assert {finding.level for finding in found} == {"green"}
    assert found[0].found.startswith("a step: 16 prompts x ")
    assert found[-1].found.startswith("the run: 100 steps")


def planned(job: Job, gpu_bytes: int | None, reserved: int = 0) -> tuple[Outcome, Request]:
    request = Request(
        gpu_memory_bytes=gpu_bytes,
        gpu_memory_source="given",
        gpu_reserved_bytes=reserved,
        host_memory_bytes=100 * GB,
    )
    return make_plan(job.facts.tokens, 2, request), request


@pytest.mark.parametrize(
    ("gpu_bytes", "reserved", "level", "words"),
    [
        (80 * GB, 5 * GB, "green", "fits into 80.0 GB (given)"),
        (None, 0, "green", "no device memory"),
        # By formulas and reserves alone, where a start only warns.
        (3 * GB, 2 * GB, "yellow", "hand-over may lack"),
        (GB // 1000, 0, "red", "train lacks"),
    ],
)
def test_plan_says_what_fits(
    passed: Job, gpu_bytes: int | None, reserved: int, level: str, words: str
) -> None:
    found = list(check_plan(*planned(passed, gpu_bytes, reserved)))
    (first, *_) = [each for each in found if words in each.found]
    assert first.level == level
    assert bool(first.remedy) == (level != "green")
    if level == "yellow":
        assert {each.level for each in found} == {"yellow"}
        assert "--rl-reshard-bucket-mb 64" in first.remedy


def test_engines_on_ranks_of_their_own_are_checked_and_planned(good: Path) -> None:
    alone = dict.fromkeys(("tensor_model_parallel_size", "expert_model_parallel_size"), "1")
    job = read(good, "--rl-rollout-ranks 1", **alone)
    assert [finding.level for finding in job.findings] == ["green"]
    assert job.facts.rollout is not None and job.facts.rollout.world_size == 1
    for size, words in ((None, "no device memory"), (80 * GB, "fits into 80.0 GB")):
        outcome, request = planned(job, size)
        assert outcome.traffic is not None
        assert outcome.traffic.received.max() > 0  # all that the engine has
        (found,) = check_plan(outcome, request)
        assert found.level == "green" and words in found.found
    for rank in ("2", "0-1"):
        wrong = read(good, f"--rl-rollout-ranks {rank}", **alone)
        assert [f"--rl-rollout-ranks {rank}" in red for red in wrong.reds] == [True]


@pytest.mark.parametrize(
    ("limit", "available", "level"),
    # Other programs may end; of all parts only those of exact size are sure.
    [
        (100 * GB, 100 * GB, "green"),
        (100 * GB, 1, "yellow"),
        (3 * GB, 3 * GB, "yellow"),
        (1, 1, "red"),
    ],
)
def test_disk_and_host_memory_are_compared_with_what_the_job_needs(
    passed: Job, monkeypatch: pytest.MonkeyPatch, limit: int, available: int, level: str
) -> None:
    assert passed.facts.config is not None
    outcome, _ = planned(passed, None)
    memory = MachineMemory(limit, available, "the machine's memory")
    monkeypatch.setattr(doctor_job, "machine_memory", lambda: memory)
    report, job = Report(), doctor_job.Job(passed.facts, passed.facts.config, outcome)
    report.add("space", lambda: check_space(job, 2))
    disk, host = report.findings
    assert disk.level == "green" and "for 4 checkpoints of" in disk.found
    assert host.level == level and "2 rank" in host.found
    assert bool(host.remedy) == (level != "green")
    # bf16 weights; float32 main parameters and two moments
    assert checkpoint_bytes(outcome, [1000]) == 1000 * (2 + 12)


# ---------------------------------------------------------------------------------------- prompts


def config_of(folder: Path, **changes: object) -> RLConfig:
    config = RLConfig.of(
        hf_checkpoint=str(folder / "checkpoint"),
        prompts=str(folder / "prompts.jsonl"),
        cache_dir=str(folder / "cache"),
        reward="arithmetic",
    )
    return config.replaced(**changes)  # type: ignore[arg-type]


def rewards_in(config: RLConfig) -> RewardSpec:
    return parse_rewards(config.reward, config.rewards, config.trainer.import_)


def examined(
    config: RLConfig, resumed: Path | None = None, *, area: str = "prompts", **given: object
) -> list[Finding]:
    """What is found of the data in an area."""
    environment = config.environments.spec(config.trainer.import_, None)
    facts = Facts(
        parser=argparse.ArgumentParser(),
        given=given,
        config=config,
        rewards=rewards_in(config) if config.has_engines else None,
        environment=environment,
    )
    report = Report()
    examine_data(report, facts, resumed)
    return [finding for finding in report.findings if finding.area == area]


def tried(config: RLConfig, few: Sequence[Prompt]) -> list[Finding]:
    """What is found of rewards, by their check at a start and a trial."""
    report, spec = Report(), rewards_in(config)
    # `check_rewards` would also import the files here, where another test has used their names.
    run(report, [("reward", lambda: check_functions(spec))])
    if not report.findings:
        report.add("reward", lambda: try_rewards(spec, few))
    return report.findings


def said(found: Iterable[Finding]) -> list[str]:
    return [f"{each.level}: {each.found}" for each in found if each.level != "green"]


def rows(*pairs: tuple[str, str]) -> str:
    return "".join(json.dumps({"prompt": a, "answer": b}) + "\n" for a, b in pairs)


REPEATED = (("1+1=", "2"), ("1+1=", "3"), ("2+2=", ""), ("one hundred and one plus 1=", "102"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "changes", "problems"),
    [
        (None, {}, []),
        (
            None,
            {"eval_prompts": "{here}/eval.jsonl", "num_prompts_per_step": 32},
            [
                "yellow: a step draws 32 prompts of 16",
                "yellow: 16 of 16 prompts of --rl-eval-prompts are in --rl-prompts",
            ],
        ),
        (
            rows(*REPEATED),
            {"max_prompt_tokens": 8, "num_prompts_per_step": 1},
            [
                "yellow: --rl-prompts .*1 of 4 prompts are longer than 8 tokens",
                "yellow: --rl-prompts: 1 prompt without an answer",
                "yellow: --rl-prompts: 1 row with the prompt of another, 1 with another answer",
            ],
        ),
        (
            rows(("1+1=", ""), ("1+2=", ""), ("1+3=", "")),
            {"num_prompts_per_step": 1},
            ["yellow: --rl-prompts: 3 prompts without an answer"],
        ),
        (None, {"hf_checkpoint": "{here}/nowhere"}, ["yellow: 16 rows cannot be tokenised"]),
        (None, {"prompts": None}, ["red: --rl-prompts is missing"]),
        (rows(("1+1=", "2")) + '{"prompt"', {}, ["red: .*line 2: is not valid JSON"]),
    ],
)
def test_prompts_are_examined_and_nothing_is_written(
    here: Path, content: str | None, changes: dict[str, Any], problems: list[str]
) -> None:
    if content is not None:
        (here / "prompts.jsonl").write_text(content)
    before = sorted(here.rglob("*"))
    named = {key: str(here / value[7:]) for key, value in changes.items() if "{here}" in str(value)}
    found = examined(config_of(here, **{**changes, **named}))
    for pattern, sentence in zip(problems, said(found), strict=True):
        assert re.match(pattern, sentence), (pattern, sentence)
    assert all(each.remedy for each in found if each.level != "green")
    assert sorted(here.rglob("*")) == before
    if not problems:
        assert found[0].found == "--rl-prompts: 16 rows of 4 to 4 tokens, median 4"


def test_a_trial_takes_prompts_of_each_source_whose_answers_differ() -> None:
    pairs = (("1", ""), ("2", "a"), ("3", "a"), ("4", " "), ("5", "b"), ("6", "c"))
    assert [prompt.text for prompt in few_of(prompts(*pairs))] == ["2", "5"]  # type: ignore[arg-type]
    assert len(few_of(prompts(*(("1", ""),) * 3))) == 2  # type: ignore[arg-type]
    other = [dataclasses.replace(prompt, source="other") for prompt in FEW]
    assert few_of([*FEW, *other]) == [*FEW, *other]  # type: ignore[arg-type]


def data_of(config: RLConfig, here: Path) -> Any:
    """What a start checks."""
    return SimpleNamespace(
        config=config,
        rewards=rewards_in(config),
        environment=config.environments.spec((), None),
        checkpoint=SimpleNamespace(folder=here / "checkpoint"),
        trust_remote_code=False,
        flags={},
    )


def test_a_missing_end_token_is_yellow_and_logged_at_the_start(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config_json = json.loads((here / "checkpoint" / "config.json").read_text())
    del config_json["eos_token_id"]
    (here / "checkpoint" / "config.json").write_text(json.dumps(config_json))
    (yellow,) = [each for each in examined(config_of(here)) if each.level == "yellow"]
    assert f"{here}/checkpoint/config.json has no eos_token_id" in yellow.found
    assert '"eos_token_id": 2' in yellow.remedy and not caplog.messages
    check_data(data_of(config_of(here), here))
    assert caplog.messages == [f"{yellow.found}; {yellow.remedy}"]


@pytest.mark.parametrize(
    "changes", [{"reward": "python_sandbox"}, {"reward": None, "environment": "python_sandbox"}]
)
def test_rows_whose_tests_check_nothing_are_red_by_their_number(
    here: Path, changes: dict[str, Any]
) -> None:
    answers = ("assert f(1) == 2", "assert True", "5")
    (here / "prompts.jsonl").write_text(rows(*(("1+1=", answer) for answer in answers)))
    (red,) = found_of(examined(config_of(here, **changes)), "red")
    assert red.startswith(f"--rl-prompts {here / 'prompts.jsonl'}, row 2: ")
    assert "(1 more such rows: 3)" in red
    config = config_of(here, **changes, prompts=str(here / "eval.jsonl"))
    held_out = config.replaced(eval_prompts=str(here / "prompts.jsonl"))
    with pytest.raises(UsageError, match="row 1: the answer asserts nothing"):
        check_data(data_of(held_out, here))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("assert f(1) is None", "code whose functions return None passes"),
        ("assert len([1]) == 1 or f", "empty code passes"),
        ("def check(candidate):\n    assert candidate(1)", "no entry_point"),
    ],
)
def test_a_sandbox_that_would_pay_for_nothing_is_red(here: Path, answer: str, words: str) -> None:
    (here / "prompts.jsonl").write_text(rows(("1+1=", answer)))
    config = config_of(here, reward="python_sandbox")
    (red,) = [each for each in examined(config) if each.level == "red"]
    assert words in red.found and "--rl-answer-column" in red.remedy


@pytest.mark.slow
def test_a_tokenizer_with_code_is_red_unless_it_is_trusted(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "was_here"
    need_code_of_tokenizer(here / "checkpoint", marker)
    (refused,) = examined(config_of(here))
    assert refused.level == "red" and "with code of its own" in refused.found
    assert "--trust-remote-code" in refused.remedy and not marker.exists()
    found = examined(config_of(here), trust_remote_code=True)
    assert {each.level for each in found} == {"green"} and marker.exists()


@pytest.mark.parametrize(
    ("algorithm", "learned"),
    [("grpo", "1+1=«the response is learned»"), ("sft", "«2"), ("dpo", "«3")],
)
def test_first_row_is_shown_as_it_is_learned_and_bad_ones_are_counted(
    here: Path, algorithm: str, learned: str
) -> None:
    pair = {"prompt": "1+1=", "answer": "2", "response": "2", "chosen": "2", "rejected": "3"}
    (here / "prompts.jsonl").write_text("nonsense\n" + json.dumps(pair))
    config = config_of(here, bad_rows="skip", algorithm=algorithm, num_prompts_per_step=1)
    found = examined(config)
    text = " ".join(each.found for each in found)
    assert learned in text and "row 2, " in text
    assert "1 of 2 rows" in text and "is not valid JSON" in text
    assert {each.level for each in found} == {"green", "yellow"}
    assert any("correct the file" in each.remedy for each in found)


def save_state(state: TrainerState, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        save_trainer_state(state, RngState.capture(), folder / "trainer")
    finally:
        dist.destroy_process_group()


def test_prompts_must_be_those_that_the_checkpoint_has_drawn_from(here: Path) -> None:
    from mcore_rl.data.prompts import load_prompts, prompt_source

    config = config_of(here)
    assert config.data.prompts is not None and config.trainer.hf_checkpoint is not None
    fingerprint = load_prompts(
        prompt_source(config.data, config.data.train_sources()[0]),
        config.trainer.hf_checkpoint,
        write_cache=False,
    ).fingerprint
    fingerprints = {"same": fingerprint, "other": f"tokens:{'0' * 64}", "earlier": "0" * 64}
    for name, of_prompts in fingerprints.items():
        state = TrainerState(3, "TP1", prompts=of_prompts)
        save_state(state, here / name)
        assert read_trainer_state(here / name / "trainer") == state

    def last(name: str, **changes: object) -> Finding:
        return examined(config_of(here, **changes), here / name)[-1]

    assert last("same").found == f"the prompts are those of {here}/same"
    assert last("other").level == "red" and "restart" in last("other").remedy
    assert last("other", on_changed_prompts="restart").level == "yellow"
    # What an earlier version noted says nothing of tokens.
    assert last("earlier").level == "yellow" and "not known" in last("earlier").found


def test_start_date_is_read_from_the_checkpoints(tmp_path: Path) -> None:
    def save(folder: Path, step: int, day: str) -> None:
        place = folders.saving_folder(folder) / folders.iteration_name(step)
        save_state(TrainerState(step, "TP1", date=day), place)
        folders.complete(folder, step, folders.sealed(place, folders.files_of(place)))

    assert date_of_checkpoints(tmp_path / "nothing") is None
    save(tmp_path / "run", 3, "2026-01-02")
    save(tmp_path / "run", 5, "2026-01-02")
    save(tmp_path / "earlier", 3, "")  # by a version that did not note it
    assert date_of_checkpoints(tmp_path / "run") == "2026-01-02"
    assert date_of_checkpoints(tmp_path / "earlier") is None
    shutil.rmtree(tmp_path / "run" / folders.iteration_name(5) / "trainer")
    assert date_of_checkpoints(tmp_path / "run") == "2026-01-02"


# ----------------------------------------------------------------------------------------- reward

REWARDS = """
import asyncio, sys, time
from mcore_rl.rewards.functions import reward

@reward("raises")
def raises(*, prompt, response, answer):
    print("about to divide")
    return 1 / 0

@reward("blind")
def blind(*, prompt, response, answer):
    return 0.5

@reward("awaits")
async def awaits(*, prompt, response, answer):
    await asyncio.sleep(0)
    return float(response == answer)

@reward("hangs")
def hangs(*, prompt, response, answer):
    time.sleep(600)
"""


def prompts(*pairs: tuple[str, str]) -> list[Prompt]:
    return [Prompt(i, text, answer, None) for i, (text, answer) in enumerate(pairs)]  # type: ignore[arg-type]


FEW = prompts(("2+3=", "5"), ("4+5=", "9"))
BLANK = prompts(("2+3=", ""), ("4+5=", " "))


def importing(folder: Path, source: str, **changes: object) -> RLConfig:
    """A configuration that imports a file with this source."""
    (folder / "mine.py").write_text(source)
    return config_of(folder, import_=(str(folder / "mine.py"),), **changes)


def test_a_reward_that_tells_right_from_wrong_is_green(tmp_path: Path) -> None:
    config = config_of(tmp_path, reward="arithmetic,exact_match")
    found = tried(config, FEW)
    assert [finding.level for finding in found] == ["green", "green"]
    assert found[0].found == "arithmetic gives 1 to the prompts' own answers and 0 to others"


@pytest.mark.slow
def test_failing_rewards_are_reported_with_what_they_raise_and_print(tmp_path: Path) -> None:
    names = "raises,blind,awaits,hangs"
    config = importing(tmp_path, REWARDS, reward=names, reward_timeout_seconds=1.0)
    printed, raises, blind, awaits, hangs = tried(config, FEW[:1])
    assert awaits.level == "green" and "awaits gives 1 to" in awaits.found
    assert printed.found.startswith("raises prints: about to divide about to divide")
    assert raises.level == "red"
    assert "gives no value for 2 of 2 samples: raised ZeroDivisionError" in raises.found
    assert blind.level == "yellow" and "blind gives 0.5 to" in blind.found
    assert hangs.level == "red" and "no value within 1 s" in hangs.found


TESTS = json.dumps({"inputs": ["1"], "outputs": ["2"]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "answer", "level", "words"),
    [
        ("nowhere:fn", "5", "red", "--rl-reward nowhere:fn cannot be imported"),
        ("exact_mach", "5", "red", "did you mean exact_match?"),
        ("arithmetic", "five", "red", "'five' is not a number"),
        ("python_sandbox", TESTS, "green", "python_sandbox runs; code is confined by "),
        ("python_sandbox", "5", "red", "--rl-answer-column"),
    ],
)
def test_a_reward_is_tried_with_the_answers(
    tmp_path: Path, reward: str, answer: str, level: str, words: str
) -> None:
    (found,) = tried(config_of(tmp_path, reward=reward), prompts(("2+3=", answer)))
    assert found.level == level and words in f"{found.found} {found.remedy}"


def test_the_folder_of_a_reward_model_is_read(here: Path) -> None:
    def of(folder: Path) -> Finding:
        job = read(here, rl_reward="model", rl_reward_model=str(folder))
        facts = job.facts
        assert facts.rewards is not None
        report = Report()
        report.findings += job.findings
        examine_data(report, facts)
        (found,) = [finding for finding in report.findings if finding.area == "reward"]
        return found

    folder = Path(shutil.copytree(here / "checkpoint", here / "reward"))
    assert of(folder).level == "red" and "has no score.weight" in of(folder).found
    assert of(here / "nowhere").level == "red"
    save_file({"score.weight": torch.zeros(1, 32)}, folder / SECOND)
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: file for name, file in files.items() if file != SECOND}
    (folder / INDEX).write_text(json.dumps({"weight_map": {**files, "score.weight": SECOND}}))
    assert of(folder).level == "green"


def test_without_prompts_a_reward_is_not_tried(here: Path) -> None:
    (here / "prompts.jsonl").write_text("nonsense")
    (warning,) = examined(config_of(here), area="reward")
    assert warning.level == "yellow" and "correct the prompts" in warning.remedy


@pytest.mark.slow
def test_a_reward_slower_than_the_doctor_waits_is_yellow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_checks, "_MOST_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # takes connections, never answers
        config = importing(
            tmp_path,
            REWARDS,
            reward="hangs,raises,http",
            reward_url=f"http://127.0.0.1:{listening.getsockname()[1]}/",
            reward_timeout_seconds=30.0,
        )
        hangs, _, raises, http = tried(config, FEW[:1])
    for name, found in (("hangs", hangs), ("http", http)):
        assert found.level == "yellow"
        assert found.found.startswith(f"{name} gives no value within 1 s")
        assert "30 s" in found.remedy
    assert raises.level == "red"
    config = config.replaced(reward="hangs", reward_url=None)
    short = config.replaced(reward_timeout_seconds=1.0)
    assert [tried(c, FEW[:1])[0].level for c in (config, short)] == ["yellow", "red"]


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that gives 1 to responses that equal the answer."""

    def equals_answer(body: dict[str, Any]) -> tuple[int, bytes]:
        rewards = [float(each["response"] == each["answer"]) for each in body["samples"]]
        return 200, json.dumps({"rewards": rewards}).encode()

    with running_server() as running:
        running.behaviour = equals_answer
        yield running


def test_a_server_that_tells_right_from_wrong_is_green(server: Server, tmp_path: Path) -> None:
    config = config_of(tmp_path, reward="http", reward_url=server.url)
    (found,) = tried(config, FEW)
    assert found.level == "green", found


@pytest.mark.parametrize("few", [FEW, BLANK], ids=["with answers", "without"])
def test_a_server_that_fails_is_asked_once(
    server: Server, tmp_path: Path, few: list[Prompt]
) -> None:
    server.behaviour = lambda body: (503, b"")
    config = config_of(tmp_path, reward="http", reward_url=server.url)
    (found,) = tried(config, few)
    assert found.level == "red" and "HTTP status 503" in found.found
    assert len(server.requests) == 1


def test_without_answers_a_reward_must_only_give_a_value(server: Server, tmp_path: Path) -> None:
    config = importing(tmp_path, REWARDS, reward="blind,arithmetic,http", reward_url=server.url)
    blind, arithmetic, http = tried(config, BLANK)
    assert (blind.level, http.level) == ("green", "green")
    assert blind.found == "blind gives 0.5 where prompts have no answer"
    assert arithmetic.level == "red" and "fill in the answers" in arithmetic.remedy


PICKY = """
from mcore_rl.api.environment import Environment
class Picky(Environment, name="picky"):
    def start(self, prompt):
        assert prompt.answer == "5", "another answer"
    def step(self, response):
        return "", 0, True
"""


def test_an_environment_is_started_with_a_few_prompts(here: Path, tmp_path: Path) -> None:
    config = importing(tmp_path, PICKY, reward=None, environment="picky")
    spec = config.environments.spec(config.trainer.import_, None)
    assert spec is not None
    (good,) = try_environment(spec, FEW[:1])
    assert (good.level, good.found) == ("green", "environment picky starts with 1 prompt(s)")
    of_sandbox = config_of(here, reward=None, environment="python_sandbox").environments
    sandboxed = of_sandbox.spec((), None)
    assert sandboxed is not None
    (sandbox,) = try_environment(sandboxed, prompts(("2+3=", TESTS)))
    assert sandbox.level == "green" and "code is confined by " in sandbox.found
    (bad,) = try_environment(spec, FEW)
    assert bad.level == "red" and "picky cannot start with 1 of 2 prompts" in bad.found
    assert bad.found.endswith("raised AssertionError: another answer")
    unknown_name = config_of(here, reward=None, environment="pickey", no_chat_template=True)
    (unknown,) = examined(unknown_name, area="reward")
    assert unknown.level == "red" and "pickey is not an environment" in unknown.found


PAYS_FOR_NOTHING = """
from mcore_rl.api import reward
@reward("within")
def within(*, prompt, response, answer):
    return float(response.strip() in answer)
@reward("any_answer")
def any_answer(*, prompt, response, answer):
    return float(response in ("5", "9"))
@reward("shy")
def shy(*, prompt, response, answer):
    return {answer: 1.0, "": 0.25}.get(response, 0.0)
@reward("below_zero")
def below_zero(*, prompt, response, answer):
    return 1.0 if response == answer else -0.5
"""


def test_a_reward_that_pays_for_nothing_is_yellow(tmp_path: Path) -> None:
    config = importing(tmp_path, PAYS_FOR_NOTHING, reward="within,any_answer,shy,below_zero")
    within, any_answer, shy, below_zero = tried(config, FEW)
    assert [each.level for each in (within, any_answer, shy)] == ["yellow"] * 3
    assert "it pays 1 for an empty response and 1 for a blank one" in within.found
    assert "it pays 1 for another prompt's answer" in any_answer.found
    assert "it pays 0.25 for an empty response" in shy.found
    assert below_zero.level == "green"


def test_a_trial_leaves_no_process(tmp_path: Path) -> None:
    source = REWARDS.replace("return 0.5", "import os; print(os.getpid(), flush=True)")
    printed, _ = tried(importing(tmp_path, source, reward="blind"), FEW)
    (pid, *_) = {*printed.found.removeprefix("blind prints: ").split()}
    assert int(pid) != os.getpid() and not Path(f"/proc/{pid}").exists()


# ---------------------------------------------------------------------- folders that lack something


def keep(*names: str) -> Callable[[Path], None]:
    """Remove all files of the model but these."""

    def change(model: Path) -> None:
        for path in model.iterdir():
            if path.name not in names:
                path.unlink()

    return change


def replaced(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda model: (model / name).write_bytes(content) and None


def as_a_file(model: Path) -> None:
    shutil.rmtree(model)
    model.write_text("a file")


def dangling(model: Path) -> None:
    (model / FIRST).unlink()
    (model / FIRST).symlink_to(model / "nowhere")


def of_pickles(model: Path) -> None:
    keep("config.json", "tokenizer.json", "tokenizer_config.json")(model)
    (model / "pytorch_model.bin").write_bytes(b"pickle")


def in_place_of_a_file(name: str) -> Callable[[Path], None]:
    return lambda model: ((model / name).unlink(), (model / name).mkdir()) and None


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
INCOMPLETE = {
    "only config.json": keep("config.json"),
    "only a tokenizer": keep("tokenizer.json", "tokenizer_config.json"),
    "nothing": keep(),
    "no folder": shutil.rmtree,
    "a file": as_a_file,
    "an index without files": keep("config.json", "tokenizer.json", INDEX),
    "a shard missing": lambda model: (model / SECOND).unlink(),
    "a shard without bytes": replaced(SECOND, b""),
    "a shard that is a pointer": replaced(SECOND, POINTER),
    "a shard that is a folder": in_place_of_a_file(SECOND),
    "a shard that leads nowhere": dangling,
    "an index without bytes": replaced(INDEX, b""),
    "an index that is a pointer": replaced(INDEX, POINTER),
    "pickles": of_pickles,
    "a config without bytes": replaced("config.json", b""),
    "a config that is a pointer": replaced("config.json", POINTER),
    "a config that is a folder": in_place_of_a_file("config.json"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "with_prompts"),
    [*((spoil, True) for spoil in INCOMPLETE.values()), (INCOMPLETE["only config.json"], False)],
    ids=[*INCOMPLETE, "only config.json, no prompts"],
)
def test_incomplete_folder_is_a_finding_and_no_check_fails(
    here: Path, spoil: Callable[[Path], None], with_prompts: bool
) -> None:
    spoil(here / "checkpoint")
    flags = {} if with_prompts else {"--rl-prompts": None}
    tokens = tokens_of(Case("case", [], flags=flags), here)
    report, request = Report(), Request(tuple(tokens))  # of this machine
    examine_machine(report, request, examine_job(report, request, Gpus(), {}), Gpus(), {})
    reds = found_of(report.findings, "red")
    assert any("checkpoint" in each for each in reds), reds
    assert any("without --world-size, a job of 1 rank" in each.found for each in report.findings)
    said = " ".join(finding.found for finding in report.findings)
    assert "this check failed" not in said and "all complete" not in said
