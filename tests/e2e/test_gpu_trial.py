"""Two stages of scripts/gpu_trial.sh on the CPU; tests/unit/test_gpu_trial.py tests the driver."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rank_pool import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_trial_uses_the_environment_and_trains_three_steps(tmp_path: Path) -> None:
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
    assert f"environment: {sys.prefix}/bin/python" in environment["found"]
    assert any(line.startswith("megatron-core==") for line in environment["found"])
    assert environment["facts"]["devices"] >= 1 and environment["facts"]["missing"] == {}
    assert train["status"] == "passed"
    found = "\n".join(train["found"])
    assert re.findall(r"^step (\d+) .* tok/s", found, re.MULTILINE) == ["0", "1", "2"]
    (exported,) = re.findall(r"^(\d+) tensors exported", found, re.MULTILINE)
    assert int(exported) > 100
    assert "[Offload]" in found
    (command,) = train["commands"]
    assert command.startswith("python -m mcore_rl.launch ") and str(ROOT) not in command
    assert "three GRPO steps" in (tmp_path / "trial.md").read_text()
