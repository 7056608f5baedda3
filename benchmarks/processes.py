"""Processes of benchmarks: their environment, and single runs in a fresh Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

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


def run_python(arguments: Sequence[str], **environment: str) -> str:
    """Run a fresh Python and return its output. If it fails, raise RuntimeError with its end."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(arguments[:4])} ended with {done.returncode}\n"
            f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def train(
    num_processes: int, flags: Sequence[str], run_dir: Path, **environment: str
) -> list[dict[str, float]]:
    """Run a job of mcore_rl with `flags`, and return the lines of its metrics.jsonl."""
    launch = ["-m", "mcore_rl.launch", "--nproc-per-node", str(num_processes)]
    run_python([*launch, "-m", "mcore_rl.train", *flags], **environment)
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
