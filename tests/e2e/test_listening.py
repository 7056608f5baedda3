"""While a run goes on, started by its launcher on one machine, nothing listens beyond loopback."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mcore_rl.observe.run_directory import read_metrics
from tests.e2e.recipe import task_flags
from tests.rank_pool import ENVIRONMENT, ROOT, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = (
    *("--pipeline-model-parallel-size", "1", "--rl-num-steps", "2"),
    *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "4"),
    *("--rl-eval-interval", "0"),
)


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


def test_a_run_listens_on_loopback_only(warmed_checkpoint: Path, tmp_path: Path) -> None:
    environment = {**os.environ, **ENVIRONMENT}
    for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "VLLM_HOST_IP"):
        environment.pop(name, None)  # what a user has not set
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with log.open("w") as output:
        launcher = psutil.Popen(
            [
                *(sys.executable, "-m", "mcore_rl.launch", "--nproc-per-node", "2"),
                *("--master-port", str(free_port()), "-m", "mcore_rl.train"),
                *task_flags(warmed_checkpoint, run_dir, *FLAGS),
            ],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        found: set[tuple[str, str]] = set()
        in_steps: set[tuple[str, str]] = set()
        while launcher.poll() is None:
            now = listening_in(launcher)
            found |= now
            if (run_dir / "metrics.jsonl").exists():
                in_steps |= now
            time.sleep(0.2)
    assert launcher.returncode == 0, log.read_text()[-3000:]
    assert {0, 1} <= set(read_metrics(run_dir / "metrics.jsonl"))
    assert "tcp" in {protocol for protocol, _ in in_steps}, "there is a store, at least"
    beyond = {(p, a) for p, a in found if not ipaddress.ip_address(a).is_loopback}
    assert beyond == set()


def test_listening_in_finds_what_is_open_to_all() -> None:
    """Else the test above could not fail."""
    with socket.create_server(("0.0.0.0", 0)), socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("127.0.0.1", 0))
        assert {("tcp", "0.0.0.0"), ("udp", "127.0.0.1")} <= listening_in(psutil.Process())
