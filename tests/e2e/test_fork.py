"""examples/fork/train.py in a fork, on the real launcher, Megatron and vLLM."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.resume import folders
from tests.e2e.recipe import task_flags
from tests.e2e.test_training import metrics_of
from tests.rank_pool import ENVIRONMENT, ROOT, free_port
from tests.untrusted import need_code_of_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FORK = Path(__file__).parent / "fork"  # beside what a checkout of Megatron-LM has at its top
SMALL = (
    *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "1"),
    *("--rl-num-steps", "2", "--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "2"),
    *("--rl-eval-interval", "0", "--rl-num-eval-prompts", "8", "--save-interval", "1"),
)


def script_of_a_fork() -> str:
    """The example: at most twelve lines that are not empty."""
    script = (ROOT / "examples" / "fork" / "train.py").read_text()
    assert len([line for line in script.splitlines() if line]) <= 12
    assert "__main__" not in script
    return script


def environment_of_fork(**more: str) -> dict[str, str]:
    environment = {**os.environ, **ENVIRONMENT, **more, "PYTHONPATH": str(FORK)}
    del environment["MASTER_ADDR"]
    return environment


def run_fork(folder: Path, checkpoint: Path, *flags: str, **environment: str) -> Path:
    """The run directory."""
    (folder / "fork.py").write_text(script_of_a_fork())
    (folder / "notes").mkdir()
    run = subprocess.run(
        [
            *(sys.executable, "-m", "mcore_rl.launch", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), "fork.py"),
            *task_flags(checkpoint, folder / "run", *SMALL, "--notes", str(folder / "notes")),
            *flags,
        ],
        cwd=folder,
        env=environment_of_fork(**environment),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    return folder / "run"


@pytest.mark.quick
def test_moe_of_a_fork_on_tp2_ep2(checkpoint_factory: Callable[..., Path], tmp_path: Path) -> None:
    run_dir = run_fork(tmp_path, checkpoint_factory("deepseek_v3"))
    steps = metrics_of(run_dir)
    assert [metrics["step"] for metrics in steps] == [0, 1]
    assert all(metrics["kl/rollout_actor"] < 0.01 for metrics in steps)
    assert (run_dir / "checkpoints" / folders.iteration_name(2) / folders.COMPLETE).is_file()


def test_dense_model_of_a_fork_on_tp2_with_its_spec_reward_tokenizer_and_critic(
    checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    marker = tmp_path / "was_here"
    checkpoint = Path(shutil.copytree(checkpoint_factory("qwen2"), tmp_path / "model"))
    need_code_of_tokenizer(checkpoint, marker)
    run_dir = run_fork(
        tmp_path,
        checkpoint,
        *("--expert-model-parallel-size", "1"),
        *("--spec", "layers_of_fork", "layer_of_fork"),
        *("--rl-reward", "rewards_of_fork:length", "--rl-algorithm", "ppo"),
        *("--rl-num-samples-per-prompt", "1", "--trust-remote-code"),
        *("--rl-cache-dir", str(tmp_path / "cache")),
        HF_MODULES_CACHE=str(tmp_path / "modules"),
    )
    steps = metrics_of(run_dir)
    assert len(steps) == 2
    assert all(metrics["kl/rollout_actor"] < 0.01 for metrics in steps)
    assert all(metrics["reward/mean"] > 0 and "loss/value" in metrics for metrics in steps)
    assert marker.exists()
    # Every layer of actor and critic is the fork's.
    noted = {path.name for path in (tmp_path / "notes").iterdir()}
    layers = [f"rank{rank}.layer{layer}" for rank in range(2) for layer in range(1, 3)]
    assert noted == {f"{event}.{layer}" for event in ("built", "trained") for layer in layers}


def test_a_forgotten_prepare_is_told(tmp_path: Path) -> None:
    script = script_of_a_fork()
    (tmp_path / "fork.py").write_text(
        "".join(f"{line}\n" for line in script.splitlines() if "prepare()" not in line)
    )
    run = subprocess.run(
        [sys.executable, "fork.py"],
        cwd=tmp_path,
        env=environment_of_fork(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2, run.stderr
    *_, said = run.stderr.splitlines()
    assert said == (
        "mcore_rl: error: Megatron was imported before mcore_rl.prepare(), which repairs it for "
        "this machine; call it before the first import of Megatron"
    )
