"""Print what is installed next to this Python, as JSON: `has_cuda`, `devices` (GPUs, or cores
without one), `missing` (required module -> why it cannot be imported), and `waits` (required module
-> the parts that bring it and have not arrived)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu_trial.parts import KEPT, waiting  # noqa: E402

# Imported in a process of its own, because some builds crash it.
_IMPORTED = {"torch": "import torch", "vllm": "from vllm import LLM, SamplingParams"}
_REQUIRED = ("torch", "megatron.training", "vllm", "pytest")


def why_missing(module: str) -> str | None:
    try:
        if importlib.util.find_spec(module) is None:
            return "it is not installed"
    except ImportError as error:
        return str(error)
    if module not in _IMPORTED:
        return None
    command = [sys.executable, "-c", _IMPORTED[module]]
    done = subprocess.run(command, capture_output=True, text=True)
    errors = done.stderr.strip().splitlines() or ["no message"]
    return f"{errors[-1][:400]} (exit code {done.returncode})" if done.returncode else None


def facts() -> dict[str, Any]:
    missing = {module: why for module in _REQUIRED if (why := why_missing(module))}
    devices = 0
    if "torch" not in missing:
        import torch

        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0))
    waits = waiting(Path(sys.prefix) / KEPT) if os.environ.get("PARTS") else {}
    machine = {"has_cuda": devices > 0, "devices": devices or cores}
    return {**machine, "missing": missing, "waits": waits}


if __name__ == "__main__":
    print(json.dumps(facts()))
