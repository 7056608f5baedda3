"""Two stages of scripts/gpu_trial.sh as they are, on the CPU; the driver is tested without them in
tests/unit/test_gpu_trial.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rank_pool import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_environment_is_taken_and_a_run_is_told_of(tmp_path: Path) -> None:
    stages = ("environment", "train")
    done = subprocess.run(
        ["bash", "scripts/gpu_trial.sh", "--only", *stages, "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "MCORE_RL_ENV": sys.prefix},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    environment, train = (
        json.loads(next(tmp_path.glob(f"*-{stage}.json")).read_text()) for stage in stages
    )
    assert environment["taken"] == str(Path(sys.prefix) / "bin" / "python")
    assert environment["facts"]["versions"]["megatron-core"]
    assert train["status"] == "passed"
    assert [step["step"] for step in train["figures"]["steps"]] == [0, 1, 2]
    assert all(step["rollout tokens/s"] > 0 for step in train["figures"]["steps"])
    assert train["figures"]["tensors exported"] > 100
    assert "[Offload]" in train["figures"]["offload"]
    (command,) = [c for c in train["commands"] if "command" in c]
    assert command["exit_code"] == 0 and str(ROOT) not in command["command"]
    assert "three GRPO steps" in (tmp_path / "trial.md").read_text()
