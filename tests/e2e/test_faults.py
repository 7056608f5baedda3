"""Faults in a whole run: it ends cleanly or continues, and loses nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.observe import run_lock
from mcore_rl.observe.run_directory import read_metrics
from mcore_rl.trainer.resume import folders
from tests.conftest import load_script
from tests.e2e.recipe import HOOKS, SMALL, Ended, run_job, task_flags
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, small enough to fill."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root's rights")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run(
    ranks: RankPool, checkpoint: Path, run_dir: Path, *more: str, disk: dict[str, Any] | None = None
) -> Ended:
    environment = {}
    if disk is not None:
        more = (*more, "--rl-import", str(HOOKS / "spoilt_disk.py"))
        environment["MCORE_RL_TEST_DISK"] = json.dumps(disk)
    tokens = task_flags(checkpoint, run_dir, *SMALL, *more)
    return run_job(ranks, tokens, environment=environment)


@pytest.mark.parametrize(
    ("how", "reason"),
    [("full", "No space left on device"), ("read-only", "Read-only file system")],
)
def test_a_checkpoint_that_cannot_be_written_ends_the_run_which_resumes_from_the_previous_one(
    how: str,
    reason: str,
    disk: Path,
    tmp_path: Path,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
) -> None:
    checkpoint, checkpoints = checkpoint_factory(), disk / "checkpoints"
    flags = ["--save", str(checkpoints), "--save-interval", "1", "--load", str(checkpoints)]
    flags += ["--rl-load-or-start"]
    spoilt = {"folder": str(disk), "how": how, "after": 1}
    ended = run(ranks, checkpoint, tmp_path / "run", *flags, "--rl-num-steps", "4", disk=spoilt)
    # All ranks, by themselves: nobody has waited for another until it was ended.
    ended.require(1)
    for rank, outcome in enumerate(ended.ranks):
        assert f"rank {rank}: the run ended early" in outcome.output
        # Last of all, and not only in a traceback of Megatron's writer.
        assert re.fullmatch(
            rf"RuntimeError: the checkpoint of step 2 could not be written to {checkpoints}: "
            rf".*\[Errno \d+\] {reason}.*; that of step 1 is complete: .* --load {checkpoints}",
            outcome.output.splitlines()[-1],
        ), outcome.output[-3000:]
    assert folders.complete_steps(checkpoints) == [1]
    assert folders.damage(checkpoints, 1) == []
    assert sorted(read_metrics(tmp_path / "run" / "metrics.jsonl")) == [0, 1]

    if how == "full":
        (disk / "filler").unlink()
    else:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    ended = run(ranks, checkpoint, tmp_path / "run", *flags, "--rl-num-steps", "3")
    ended.require(0)
    assert "[Resume] resuming from step 1" in ended.ranks[0].output
    assert folders.complete_steps(checkpoints) == [3, 2, 1]


def test_a_full_disk_and_dying_reward_processes_do_not_stop_training(
    disk: Path, tmp_path: Path, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    run_dir = disk / "run"
    ended = run(
        ranks,
        checkpoint_factory(),
        run_dir,
        *("--rl-reward", "tests.e2e.deadly_reward:score", "--rl-num-steps", "4"),
        *("--save", str(tmp_path / "checkpoints")),
        disk={"folder": str(disk), "how": "full", "after": 0, "until": 2},
    )
    ended.require(0)
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert {0, 1, 2, 3} <= metrics.keys()  # the lines of the full disk's time came later
    assert "No space left on device; its lines wait" in ended.ranks[0].output
    assert "can be written again, and nothing is missing in it" in ended.ranks[0].output
    failures = [metrics[step]["reward/failures"] for step in range(4)]
    assert 0 < sum(failures) < 4 * 16, failures
    with (run_dir / "rollouts.jsonl").open(encoding="utf-8") as file:
        texts = [json.loads(line)["failure"] for line in file]
    assert any(text and "ended its process: exit code 7" in text for text in texts), set(texts)


def test_a_step_without_any_reward_ends_the_run_with_the_reason_and_loses_nothing(
    tmp_path: Path, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    checkpoint, marker = checkpoint_factory(), tmp_path / "fails"

    def run_once(folder: Path, *more: str, stays: bool = False) -> Ended:
        environment = {"MCORE_RL_TEST_REWARD_FAILS": str(marker)}
        if stays:
            environment["MCORE_RL_TEST_REWARD_STAYS"] = "1"
        more = (
            *("--rl-import", str(HOOKS / "fails_later.py"), "--rl-reward", "fails_later"),
            *("--rl-reward-env", "MCORE_RL_TEST_REWARD_FAILS", "--rl-num-steps", "4"),
            *("--rl-num-mini-batches", "2", *more),
        )
        tokens = task_flags(checkpoint, folder, *SMALL, *more)
        return run_job(ranks, tokens, environment=environment)

    checkpoints = tmp_path / "run" / "checkpoints"
    ended = run_once(tmp_path / "run")
    ended.require(1)
    reason = (
        "[Reward] step 2: none of 16 samples has a reward to learn from; the most frequent reason: "
        "raised ConnectionError: the judge is away; earlier steps are saved: "
        f"resume with --load {checkpoints}"
    )
    assert ended.said.count(reason) == 1 and "Traceback" not in ended.said
    assert folders.complete_steps(checkpoints) == [2]
    marker.unlink()
    for folder, more in (("run", ("--load", str(checkpoints))), ("whole", ())):
        ended = run_once(tmp_path / folder, *more, stays=True)
        ended.require(0)
    found, expected = (
        [
            [metrics[step][name] for name in ("reward/mean", "loss/policy", "grad_norm")]
            for step in range(4)
        ]
        for metrics in (
            read_metrics(tmp_path / folder / "metrics.jsonl") for folder in ("run", "whole")
        )
    )
    assert found == expected and all(0 < reward < 1 for reward, *_ in found)


def test_killed_runs_leave_nothing_and_go_on_to_the_same_weights(tmp_path: Path, capsys) -> None:
    """One of the kills that `python scripts/kill_test.py --kills 20` makes: this seed draws SIGTERM
    to both ranks in the rollout of step 2, test_gpu_trial.py has SIGKILL in an update."""
    code = load_script("kill_test").main(
        ["--kills", "1", "--steps", "4", "--seed", "4"]
        + ["--folder", str(tmp_path), "--limit-seconds", "300"]
    )
    said = capsys.readouterr().out
    assert code == 0, said
    assert "SIGTERM to all ranks" in said and "into rollout of step 2" in said
    assert "the rerun ends with the same weights" in said
    assert "1 of 1 kills went as they should" in said


def test_vllm_raising_while_it_generates_ends_all_ranks_and_names_the_one(tmp_path: Path) -> None:
    """By the launcher, whose processes, shared memory and files are looked for afterwards."""
    kill_test = load_script("kill_test")
    checkpoint = kill_test.make_checkpoint(tmp_path / "checkpoint", size="micro")
    setting = kill_test.Setting(checkpoint, tmp_path, num_processes=2, num_steps=4)
    more = ("--rl-import", str(HOOKS / "engine_raises.py"), "--save-interval", "1")
    ending = kill_test.run(setting, tmp_path / "run", more=more)
    assert ending.exit_code == 1 and not ending.faults, (ending.faults, ending.output[-6000:])
    assert "rank 1: the run ended early" in ending.output
    assert "RuntimeError: the engine's kernel found an illegal address" in ending.output
    assert "rank      : 1 " in ending.output  # torchrun's table
    assert folders.complete_steps(tmp_path / "run" / "checkpoints") == [1]
    assert folders.damage(tmp_path / "run" / "checkpoints", 1) == []
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == [
        run_lock.LOCK,
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]


def test_an_actor_that_fails_does_not_wait_for_its_critic(tmp_path: Path) -> None:
    """One rank each: nobody but the actor itself could end it, and the critic is in an update."""
    kill_test = load_script("kill_test")
    checkpoint = kill_test.make_checkpoint(tmp_path / "checkpoint", size="micro")
    setting = kill_test.Setting(checkpoint, tmp_path, num_processes=2, num_steps=4)
    critic = ("--rl-algorithm", "ppo", "--rl-critic-ranks", "1")
    more = (*critic, "--rl-import", str(HOOKS / "actor_raises.py"), "--save-interval", "9")
    ending = kill_test.run(setting, tmp_path / "run", more=more)
    assert ending.exit_code == 1 and not ending.faults, (ending.faults, ending.output[-6000:])
    assert "RuntimeError: the gradients are gone" in ending.output
    assert "rank      : 0 " in ending.output  # torchrun's table
    assert sorted(read_metrics(tmp_path / "run" / "metrics.jsonl")) == [0]


def test_the_loss_scale_of_fp16_falls_until_gradients_are_finite(
    tmp_path: Path, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    """Megatron's scaler finds its scale by gradients that overflow: no fault that ends a run."""
    more = ("--rl-precision", "fp16", "--initial-loss-scale", str(2**24), "--rl-num-steps", "9")
    reward = ("--rl-reward", "scripts.varied_reward:score")
    ended = run(ranks, checkpoint_factory(), tmp_path / "run", *more, *reward)
    ended.require(0)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    skipped = [metrics[step]["skipped_updates"] for step in range(9)]
    assert skipped[0] == 1 and skipped[-1] == 0, skipped
    assert metrics[8]["grad_norm"] > 0
    # Weights travel in fp16 as well: vLLM warns of others.
    assert "with dtype torch.bfloat16 into" not in ended.said
