"""Scripts of examples/ that no machine here can run: their syntax, and what they would start."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
CONFIGS = ROOT / "tests" / "data" / "configs"


def test_readme_of_examples_names_each_and_its_test() -> None:
    text = (EXAMPLES / "README.md").read_text()
    named = set(re.findall(r"^\| `(\w+)/`", text, re.MULTILINE))
    assert named == {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    for test in re.findall(r"`(tests/\S+\.py)`", text):
        assert (ROOT / test).is_file(), test


@pytest.mark.parametrize(
    "script",
    [*EXAMPLES.glob("*/*.sh"), *EXAMPLES.glob("slurm/*.sbatch")],
    ids=lambda path: str(path.relative_to(EXAMPLES)),
)
def test_script_is_valid_and_says_how_to_use_it(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    run = subprocess.run(["bash", script, "one"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 2 and run.stderr.startswith("usage: ")


class Cluster:
    """A checkout on machines that Slurm started a batch file on; `srun` runs it on each of them."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.checkout, self.programs = folder / "checkout", folder / "programs"
        self.checkout.mkdir()
        self.programs.mkdir()
        for name in ("examples", "scripts"):
            shutil.copytree(ROOT / name, self.checkout / name)
        self.num_nodes = num_nodes
        self._program("scontrol", "for n in $(seq $SLURM_NNODES); do echo node$n; done")
        self._program(
            "srun",
            "while [ $1 != bash ]; do shift; done\n"
            "for SLURM_NODEID in $(seq 0 $((SLURM_NNODES - 1))); do\n"
            'export SLURM_NODEID; "$@"; done',
        )
        for python in ("python", "python3"):
            self._program(python, "printf '%s\\t' \"$@\"; echo")
        self._program("nvidia-smi", "for n in $(seq 8); do echo GPU $n: NVIDIA; done")

    def _program(self, name: str, code: str) -> None:
        (self.programs / name).write_text(f"#!/bin/bash\n{code}\n")
        (self.programs / name).chmod(0o755)

    def commands(self, batch: str, *arguments: str) -> list[list[str]]:
        """What every machine starts, a list of words each."""
        file = self.checkout / "examples" / "slurm" / batch
        text = file.read_text()
        (nodes,) = re.findall(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)
        assert int(nodes) == self.num_nodes
        for option in ("--ntasks-per-node=1", "--gpus-per-node=8"):
            assert f"#SBATCH {option}\n" in text
        run = subprocess.run(
            ["bash", file, *arguments],
            cwd=self.checkout,
            env={
                "PATH": f"{self.programs}:{os.defpath}",
                "HOME": str(self.checkout),
                "SLURM_JOB_ID": "123456",
                "SLURM_NNODES": nodes,
                "SLURM_JOB_NODELIST": "node[1-32]",
            },
            capture_output=True,
            text=True,
        )
        assert (run.returncode, run.stderr) == (0, "")
        started = [line for line in run.stdout.splitlines() if not line.startswith("# ")]
        return [line.rstrip("\t").split("\t") for line in started]


def plan_of(command: list[str], model: str, world_size: int, target: Path) -> dict[str, Any]:
    """What `mcore-rl plan` makes of the flags of a command."""
    flags = command[command.index("mcore_rl.train") + 1 :]
    flags = ["--hf-config", str(CONFIGS / f"{model}.json"), "--world-size", str(world_size), *flags]
    assert main(["plan", *flags, "--json", str(target)]) == 0
    return json.loads(target.read_text())


@pytest.mark.parametrize(
    ("batch", "model", "num_nodes"),
    [
        ("two_machines.sbatch", "qwen3-30b-a3b", 2),
        ("thirty_two_machines.sbatch", "deepseek-v3", 32),
    ],
)
def test_slurm_file_starts_a_job_that_fits(
    batch: str, model: str, num_nodes: int, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, num_nodes)
    commands = cluster.commands(batch, "CHECKPOINT", "PROMPTS", "--rl-num-steps", "7")
    assert len(commands) == num_nodes
    for node, command in enumerate(commands):
        launcher = command[: command.index("mcore_rl.train") - 1]
        at = {name: launcher[launcher.index(name) + 1] for name in launcher if name[:2] == "--"}
        assert launcher[:2] == ["-m", "mcore_rl.launch"]
        assert at == {
            "--nproc-per-node": "8",
            "--nnodes": str(num_nodes),
            "--node-rank": str(node),
            "--master-addr": "node1",
            "--master-port": "23456",
        }
        assert command[len(launcher) :] == commands[0][len(launcher) :]
    first = commands[0]
    assert first[-2:] == ["--rl-num-steps", "7"]
    # Nothing is read of a checkpoint that is not there.
    found = plan_of(first, model, 8 * num_nodes, tmp_path / "plan.json")
    assert found["fits"] is True and found["problems"] == []
    assert found["received_over_lower_bound"] == 1.0
    assert found["rollout"]["ep_size"] == found["train"]["ep_size"]
