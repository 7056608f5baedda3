"""An alarm saves and ends a run, which can be resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mcore_rl.common.agreement import EXIT_ALARM
from mcore_rl.observe.run_directory import read_metrics
from mcore_rl.trainer.resume import folders
from tests.e2e.recipe import Ended, run_job, task_flags
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Only the rewards' alarm: the host's memory and the speed belong to the machine that runs this.
COMMON = (
    *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"),
    *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "4"),
    *("--rl-eval-interval", "0", "--rl-alarm-window", "2"),
    *("--rl-alarm-host-growth-mib", "0", "--rl-alarm-tokens-per-second", "0"),
)


@pytest.fixture(scope="module")
def runs(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path_factory: Any
) -> tuple[Path, list[Ended]]:
    """The folder; the run that an alarm ends, and the next one."""
    folder = tmp_path_factory.mktemp("health") / "run"
    found = []
    for more in (
        # No reward varies so much.
        ("--rl-num-steps", "6", "--rl-on-alarm", "stop", "--rl-alarm-reward-std", "9"),
        ("--rl-num-steps", "3", "--rl-alarm-reward-std", "9"),
    ):
        load = ("--load", str(folder / "checkpoints"), "--rl-load-or-start")
        tokens = task_flags(warmed_checkpoint, folder, *COMMON, *more, *load)
        found.append(run_job(ranks, tokens))
    return folder, found


def test_an_alarm_saves_and_ends_the_run_on_all_ranks(runs) -> None:
    folder, (ended, _) = runs
    ended.require(EXIT_ALARM)
    said = ended.said
    assert said.count("[Health] step 1, reward-std: the rewards' standard deviation is") == 1
    assert "[Health] stopped after step 1 by --rl-on-alarm stop" in said
    assert 2 in folders.complete_steps(folder / "checkpoints")
    assert folders.damage(folder / "checkpoints", 2) == []
    assert "Traceback" not in said


def test_the_run_resumes_and_a_lasting_alarm_is_not_repeated(runs) -> None:
    folder, (_, ended) = runs
    ended.require(0)
    assert "resuming from step 2" in ended.said and "[Health]" not in ended.said
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [metrics[step]["health/alarms"] for step in range(3)] == [0, 1, 1]


def test_what_alarms_look_at_is_measured(runs) -> None:
    folder, _ = runs
    for step, metrics in read_metrics(folder / "metrics.jsonl").items():
        if step < 3:
            assert 1 <= metrics["moe/imbalance"] <= 16  # experts
            assert 0 <= metrics["moe/unused_experts"] <= metrics["moe/most_unused_experts"] < 1
            assert 1e8 < metrics["memory/host_bytes"] <= metrics["memory/host_peak_bytes"]
            assert metrics["memory/open_files"] > 10


def test_other_prompts_end_the_run_before_models_are_built(
    runs, warmed_checkpoint: Path, ranks: RankPool
) -> None:
    folder, _ = runs
    other = (
        *("--rl-prompts", str(warmed_checkpoint / "prompts" / "heldout.jsonl")),
        *("--rl-num-steps", "4", "--load", str(folder / "checkpoints")),
    )
    ended = run_job(ranks, task_flags(warmed_checkpoint, folder, *COMMON, *other))
    ended.require(2)
    said = ended.said
    assert said.count("are others than those that the checkpoint of step 3 has drawn from") == 1
    assert "--rl-on-changed-prompts restart" in said
    assert "model and engines ready" not in said


def test_a_folder_that_is_no_longer_the_reference_ends_the_run_before_models_are_built(
    runs, warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    folder, _ = runs
    changed = tmp_path / "changed"
    shutil.copytree(warmed_checkpoint, changed)
    file = next(changed.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    flags = task_flags(
        warmed_checkpoint,
        folder,
        *COMMON,
        *("--rl-hf-checkpoint", str(changed), "--rl-kl-coef", "0.05"),
        *("--rl-num-steps", "4", "--load", str(folder / "checkpoints")),
    )
    ended = run_job(ranks, flags)
    ended.require(2)
    said = ended.said
    sentence = f"--rl-hf-checkpoint {changed} has other weights than those that the run began with"
    assert said.count(sentence) == 1 and "by --finetune and another --rl-run-dir" in said
    assert "model and engines ready" not in said
