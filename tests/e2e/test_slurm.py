"""Starts under Slurm: a stand-in `srun` starts tasks with the variables that Slurm sets."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.recipe import SMALL, task_flags
from tests.rank_pool import ENVIRONMENT, ROOT, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SRUN = """\
import argparse, os, subprocess, sys

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=1)
parser.add_argument("--ntasks-per-node", type=int, default=1)
parser.add_argument("--gpus-per-task", type=int)
parser.add_argument("command", nargs=argparse.REMAINDER)
given = parser.parse_args()
count = given.nodes * given.ntasks_per_node
tasks = []
for number in range(count):
    node, local = divmod(number, given.ntasks_per_node)
    own = {
        "SLURM_JOB_ID": 77, "SLURM_NNODES": given.nodes, "SLURM_NODEID": node,
        "SLURM_NTASKS": count, "SLURM_STEP_NUM_TASKS": count,
        "SLURM_PROCID": number, "SLURM_LOCALID": local,
    }
    if given.gpus_per_task:  # each task's cgroup has its own, numbered from 0
        own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(given.gpus_per_task)))
    environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
    tasks.append(subprocess.Popen(given.command, env=environment))
sys.exit(max(task.wait() for task in tasks))
"""
# What a batch file does for tasks that Slurm starts directly.
RANKS = (
    "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK={local_rank} "
    "LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES)); "
)
STEP = (*SMALL, "--rl-num-steps", "1")


def srun(
    folder: Path, python: Path, flags: list[str], command: str, tokens: list[str]
) -> tuple[int, str]:
    """The exit code and the output of `srun FLAGS bash -c COMMAND`; `"$@"` are the tokens."""
    program = folder / "srun"
    program.write_text(f"#!{sys.executable}\n{SRUN}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, **ENVIRONMENT, "MASTER_PORT": str(free_port())}
    environment["PYTHON"] = str(python)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    done = subprocess.run(
        [str(program), *flags, "bash", "-c", command, "task", *tokens],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout


STARTS = {
    "a launcher on each of two nodes": (
        ["--nodes=2", "--ntasks-per-node=1"],
        "exec $PYTHON -m mcore_rl.launch --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID "
        "--nproc-per-node 1 --master-addr $MASTER_ADDR --master-port $MASTER_PORT "
        '-m mcore_rl.train "$@"',
        2,  # each launcher says what is wrong
    ),
    "a task for each rank": (
        ["--ntasks-per-node=2"],
        f'{RANKS.format(local_rank="$SLURM_LOCALID")} exec $PYTHON -m mcore_rl.train "$@"',
        1,
    ),
}


@pytest.mark.parametrize("start", STARTS)
def test_tasks_of_slurm_are_one_world(
    start: str, warm_python: Path, tmp_path: Path, warmed_checkpoint: Path
) -> None:
    """The case of two ranks, which agree on a mistake that depends on their number."""
    flags, command, num_sentences = STARTS[start]
    wrong = ("--tensor-model-parallel-size", "4")
    tokens = task_flags(warmed_checkpoint, tmp_path / "run", *STEP, *wrong)
    code, said = srun(tmp_path, warm_python, flags, command, tokens)
    assert code == 2, said[-6000:]
    errors = [line for line in said.splitlines() if "mcore_rl: error: " in line]
    assert len(errors) == num_sentences and len({*errors}) == 1, said[-3000:]
    assert "Traceback" not in said
    assert "the world of 2 processes" in errors[0]
    assert "on rank" not in said  # all ranks have found it
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


REFUSED = {
    "no ranks": (
        ["--ntasks-per-node=2"],
        'exec $PYTHON -m mcore_rl.train "$@"',
        ("SLURM_STEP_NUM_TASKS 2", "mcore_rl.launch"),
    ),
    "no local rank": (
        ["--ntasks-per-node=2"],
        'export RANK=$SLURM_PROCID WORLD_SIZE=2; exec $PYTHON -m mcore_rl.train "$@"',
        ("lacks LOCAL_RANK", "mcore_rl.launch"),
    ),
    "one GPU for each task": (
        ["--ntasks-per-node=2", "--gpus-per-task=1"],
        f"{RANKS.format(local_rank=0)} exec $PYTHON -m tests.e2e.gpu_of_task "
        '"$@" --tensor-model-parallel-size 2',
        ("--rl-rollout-tp-size 2", "--gpus-per-node"),
    ),
    "one GPU for each task, numbered on": (
        ["--ntasks-per-node=2", "--gpus-per-task=1"],
        f'{RANKS.format(local_rank="$SLURM_LOCALID")} exec $PYTHON -m tests.e2e.gpu_of_task "$@"',
        ("LOCAL_RANK 1", "--gpus-per-node"),
    ),
}


@pytest.mark.parametrize("start", REFUSED)
def test_tasks_of_slurm_that_cannot_be_one_run_are_refused(
    start: str, warm_python: Path, tmp_path: Path, warmed_checkpoint: Path
) -> None:
    flags, command, words = REFUSED[start]
    run = tmp_path / "run"
    tokens = task_flags(warmed_checkpoint, run, *STEP)
    code, said = srun(tmp_path, warm_python, flags, command, tokens)
    assert code == 2, said[-6000:]
    assert not run.exists()
    errors = [line for line in said.splitlines() if "mcore_rl: error: " in line]
    assert errors and all(word in error for error in errors for word in words), said[-3000:]
