"""examples/fork/train.py in a fork, on the real launcher, Megatron and vLLM.

While it runs, started by its launcher on one machine, nothing listens beyond loopback.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from mcore_rl.trainer.resume import folders
from tests.e2e.recipe import metrics_of, task_flags
from tests.rank_pool import ENVIRONMENT, ROOT, RankPool, free_port
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


def listening_in(process: psutil.Process) -> set[tuple[str, str]]:
    """(protocol, address) of all that take what strangers send, in a process and those below."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        try:
            connections = one.net_connections("inet")
        except psutil.Error:  # it has ended
            continue
        for connection in connections:
            if not connection.laddr:
                continue
            if connection.type == socket.SOCK_DGRAM and not connection.raddr:
                found.add(("udp", connection.laddr.ip))
            elif connection.status == psutil.CONN_LISTEN:
                found.add(("tcp", connection.laddr.ip))
    return found


def environment_of_fork(**more: str) -> dict[str, str]:
    environment = {**os.environ, **ENVIRONMENT, **more, "PYTHONPATH": str(FORK)}
    for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "VLLM_HOST_IP"):
        environment.pop(name, None)  # what a user has not set
    return environment


@dataclass
class Run:
    """Its directory, and (protocol, address) of all that took what strangers send."""

    folder: Path
    listened: set[tuple[str, str]] = field(default_factory=set)
    listened_in_steps: set[tuple[str, str]] = field(default_factory=set)


def run_fork(
    ranks: RankPool, folder: Path, checkpoint: Path, *flags: str, **environment: str
) -> Run:
    (folder / "fork.py").write_text(script_of_a_fork())
    (folder / "notes").mkdir()
    run, log = Run(folder / "run"), folder / "log"
    with log.open("w") as output:
        launcher = psutil.Popen(
            [
                *(str(ranks.python.program), "-m", "mcore_rl.launch", "--nproc-per-node", "2"),
                *("--master-port", str(free_port()), "fork.py"),
                *task_flags(checkpoint, run.folder, *SMALL, "--notes", str(folder / "notes")),
                *flags,
            ],
            cwd=folder,
            env=environment_of_fork(**environment),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        while launcher.poll() is None:
            now = listening_in(launcher) | listening_in(ranks.process())
            run.listened |= now
            if (run.folder / "metrics.jsonl").exists():
                run.listened_in_steps |= now
            time.sleep(0.2)
    assert launcher.returncode == 0, log.read_text()[-6000:]
    return run


@pytest.fixture(scope="module")
def moe(
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    return run_fork(ranks, tmp_path_factory.mktemp("moe"), checkpoint_factory("deepseek_v3"))


@pytest.mark.quick
def test_moe_of_a_fork_on_tp2_ep2(moe: Run) -> None:
    steps = metrics_of(moe.folder)
    assert [metrics["step"] for metrics in steps] == [0, 1]
    assert all(metrics["kl/rollout_actor"] < 0.01 for metrics in steps)
    assert (moe.folder / "checkpoints" / folders.iteration_name(2) / folders.COMPLETE).is_file()


@pytest.mark.quick
def test_a_run_listens_on_loopback_only(moe: Run) -> None:
    assert "tcp" in {protocol for protocol, _ in moe.listened_in_steps}, (
        "there is a store, at least"
    )
    beyond = {(p, a) for p, a in moe.listened if not ipaddress.ip_address(a).is_loopback}
    assert beyond == set()


def test_listening_in_finds_what_is_open_to_all() -> None:
    """Else the test above could not fail."""
    with socket.create_server(("0.0.0.0", 0)), socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("127.0.0.1", 0))
        assert {("tcp", "0.0.0.0"), ("udp", "127.0.0.1")} <= listening_in(psutil.Process())


def test_dense_model_of_a_fork_on_tp2_with_its_spec_reward_tokenizer_and_critic(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    """These processes are new: they have a folder of their own for the tokenizer's code."""
    marker = tmp_path / "was_here"
    checkpoint = Path(shutil.copytree(checkpoint_factory("qwen2"), tmp_path / "model"))
    need_code_of_tokenizer(checkpoint, marker)
    run = run_fork(
        ranks,
        tmp_path,
        checkpoint,
        *("--expert-model-parallel-size", "1", "--rl-routing-replay", "off"),
        *("--spec", "layers_of_fork", "layer_of_fork"),
        *("--rl-reward", "rewards_of_fork:length", "--rl-algorithm", "ppo"),
        *("--rl-num-samples-per-prompt", "1", "--trust-remote-code"),
        *("--rl-cache-dir", str(tmp_path / "cache")),
        HF_MODULES_CACHE=str(tmp_path / "modules"),
    )
    steps = metrics_of(run.folder)
    assert len(steps) == 2
    assert all(metrics["kl/rollout_actor"] < 0.01 for metrics in steps)
    assert all(metrics["reward/mean"] > 0 and "loss/value" in metrics for metrics in steps)
    assert marker.exists()
    # Every layer of actor and critic is the fork's.
    noted = {path.name for path in (tmp_path / "notes").iterdir()}
    layers = [f"rank{rank}.layer{layer}" for rank in range(2) for layer in range(1, 3)]
    assert noted == {f"{event}.{layer}" for event in ("built", "trained") for layer in layers}


def test_a_forgotten_prepare_is_reported(tmp_path: Path) -> None:
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
