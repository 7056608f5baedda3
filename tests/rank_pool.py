"""Processes that have Megatron and vLLM imported and play the ranks of one small job after another.

Importing both costs more than most tests, so it is done once per rank: each job runs in children
forked from these processes, with ranks, ports and working files of its own. A fork is safe here
because the parents only import: they start no thread, no process group and no engine.

    pool.run("tests.dist.jobs:log_probs", world_size=4, arguments={...})  ->  each rank's result
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class RankOutcome:
    """How one rank of a job ended."""

    exit_code: int  # negative: the signal that ended it
    result: Any  # what the job's function returned, None if it did not
    output: str  # stdout and stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RankPool:
    """As many importing processes as the largest job so far had ranks."""

    def __init__(self) -> None:
        self._parents: list[subprocess.Popen] = []
        self._folder = Path(tempfile.mkdtemp(prefix="mcore_rl_ranks_"))
        self._num_jobs = 0

    def run_raw(
        self,
        function: str,
        *,
        world_size: int,
        arguments: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        timeout_seconds: float = 300,
    ) -> list[RankOutcome]:
        """Call `module:function(**arguments)` on `world_size` ranks; results must be JSON."""
        while len(self._parents) < world_size:
            self._parents.append(self._start())
        self._num_jobs += 1
        port = free_port()
        files = [self._folder / f"{self._num_jobs}.{rank}" for rank in range(world_size)]
        for rank in range(world_size):
            order = {
                "function": function,
                "arguments": arguments or {},
                "files": str(files[rank]),
                "timeout": timeout_seconds,
                "environment": {
                    **(environment or {}),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    "MASTER_PORT": str(port),
                },
            }
            stdin = self._parents[rank].stdin
            assert stdin is not None
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()
        outcomes = []
        for rank in range(world_size):
            stdout = self._parents[rank].stdout
            assert stdout is not None
            line = stdout.readline()
            assert line, f"the parent of rank {rank} died"
            result = files[rank].with_suffix(f".{rank}.result")
            outcomes.append(
                RankOutcome(
                    exit_code=int(line),
                    result=json.loads(result.read_text()) if result.exists() else None,
                    output=files[rank].with_suffix(f".{rank}.output").read_text(errors="replace"),
                )
            )
        return outcomes

    def run(self, function: str, **options: Any) -> list[Any]:
        """`run_raw`, for a job that must succeed: each rank's result."""
        outcomes = self.run_raw(function, **options)
        for rank, outcome in enumerate(outcomes):
            assert outcome.exit_code == 0, (
                f"rank {rank} of {function} ended with {outcome.exit_code}:\n"
                + "\n".join(o.output[-4000:] for o in outcomes)
            )
        return [outcome.result for outcome in outcomes]

    def _start(self) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.rank_pool"],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        for parent in self._parents:
            assert parent.stdin is not None
            parent.stdin.close()
        for parent in self._parents:
            parent.wait(timeout=60)


def _serve() -> None:
    """The parent of one rank: import, then fork a child per order from stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the imports print is no answer
    from mcore_rl import megatron_adapter, run_parts, train  # noqa: F401

    importlib.import_module("megatron.training.training")
    from vllm import LLM, _custom_ops  # noqa: F401  (the package alone is lazy)

    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _play(order)
        answers.write(f"{_wait(pid, order['timeout'])}\n")
        answers.flush()


def _wait(pid: int, timeout_seconds: float) -> int:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what a rank that was killed has left behind
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGALRM


def _play(order: dict[str, Any]) -> None:
    """The child: one rank of one job. Never returns."""
    os.setpgid(0, 0)
    base = Path(order["files"])
    rank = order["environment"]["RANK"]
    output = os.open(base.with_suffix(f".{rank}.output"), os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(order["environment"])
    code = 1
    try:
        module, name = order["function"].split(":")
        result = getattr(importlib.import_module(module), name)(**order["arguments"])
        base.with_suffix(f".{rank}.result").write_text(json.dumps(result))
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        # As at the end of any process: Megatron's checkpoint writer, for one, has a process to end.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
