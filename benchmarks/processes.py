"""Processes of benchmarks: their environment, and single runs in a fresh Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
RUN_SECONDS = 1800
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


class PeakMemory:
    """The largest sum of a process's and its descendants' memory, to one percent.

    A thread reads their resident sets, which is cheap. Only when their sum grows does it count each
    shared page once: that walks all page tables and stops the process meanwhile. Read every two
    seconds, it made steps of SmolLM2 a tenth slower.
    """

    def __init__(self, seconds: float = 0.5) -> None:
        self.num_bytes = 0
        self._seconds = seconds
        self._ended = threading.Event()

    def watch(self, pid: int) -> None:
        """Start sampling the process `pid`."""
        threading.Thread(target=self._sample, args=(pid,), daemon=True).start()

    def end(self) -> None:
        """Stop sampling."""
        self._ended.set()

    def _sample(self, pid: int) -> None:
        largest = 0
        while not self._ended.wait(self._seconds):
            resident = _sum_of_tree(pid, lambda process: process.memory_info().rss)
            if resident > 1.01 * largest:
                largest = resident
                shared_once = _sum_of_tree(pid, lambda process: process.memory_full_info().pss)
                self.num_bytes = max(self.num_bytes, shared_once)


def _sum_of_tree(pid: int, num_bytes_of: Callable[[psutil.Process], int]) -> int:
    """Return the sum over a process and its descendants that are there."""
    total = 0
    with suppress(psutil.NoSuchProcess):  # it ended meanwhile
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            total += num_bytes_of(each)
    return total


def run_python(
    arguments: Sequence[str], *, memory: PeakMemory | None = None, **environment: str
) -> str:
    """Run a fresh Python and return its output. If it fails, raise RuntimeError with its end."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        if memory is not None:
            memory.watch(process.pid)
        try:
            output, errors = process.communicate(timeout=RUN_SECONDS)
        finally:
            process.kill()
            if memory is not None:
                memory.end()
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(arguments[:4])} ended with {process.returncode}\n"
            f"{output[-2000:]}\n{errors[-4000:]}"
        )
    return output


def train(
    num_processes: int,
    flags: Sequence[str],
    run_dir: Path,
    *,
    memory: PeakMemory | None = None,
    **environment: str,
) -> list[dict[str, float]]:
    """Run a job of mcore_rl with `flags`, and return the lines of its metrics.jsonl."""
    launch = ["-m", "mcore_rl.launch", "--nproc-per-node", str(num_processes)]
    run_python([*launch, "-m", "mcore_rl.train", *flags], memory=memory, **environment)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process, so that this one has neither threads nor a model."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def alternating(names: Iterable[str], repetition: int) -> list[str]:
    """Return the names, reversed in every second repetition."""
    ordered = list(names)
    return ordered if repetition % 2 == 0 else ordered[::-1]
