"""The Dockerfile: hadolint, the files that its image gets, and its environment.

scripts/test_dockerfile.py carries it out, which takes a quarter of an hour.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from scripts.gpu_trial.stages import STAGES
from scripts.test_dockerfile import Image, instructions, is_ignored

ROOT = Path(__file__).resolve().parents[2]
FOUND = instructions((ROOT / "Dockerfile").read_text())


def carried_out(root: Path, *words: str) -> Image:
    """The image after those of its instructions, which need no network."""
    image = Image(root, {})
    for word, rest in FOUND:
        if word in words:
            image.do(word, rest)
    return image


def test_hadolint_finds_nothing() -> None:
    linted = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (linted.returncode, linted.stdout + linted.stderr) == (0, "")


def test_instructions_end_with_the_doctor() -> None:
    assert FOUND[0][0] == "FROM" and FOUND[-1][0] == "CMD"
    assert json.loads(FOUND[-1][1]) == ["mcore-rl", "doctor"]
    assert "NOT BUILT" in (ROOT / "Dockerfile").read_text()


def test_image_gets_the_files_of_the_trial_and_no_caches(tmp_path: Path) -> None:
    home = tmp_path / "opt" / "mcore_rl"
    carried_out(tmp_path, "WORKDIR", "COPY")
    commands = [stage.command for stage in STAGES]
    trial = ROOT / "scripts" / "gpu_trial"
    commands += [file.read_text() for file in trial.iterdir() if file.is_file()]
    named = set(re.findall(r"\b(?:tests|benchmarks|scripts)/[\w./-]*\w", "\n".join(commands)))
    assert len(named) > 8 and "tests/gpu" in named
    assert {name for name in named if not (home / name).exists()} == set()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "examples", "patches"):
        assert (home / name).exists(), name
    assert not [file for file in home.rglob("*") if file.name in ("__pycache__", ".git")]


def test_files_are_there_before_setup_reads_them(tmp_path: Path) -> None:
    (at,) = [at for at, (_, rest) in enumerate(FOUND) if "bash scripts/setup_env.sh" in rest]
    assert "MCORE_RL_STACK=cuda" in FOUND[at][1]
    there = " ".join(rest for word, rest in FOUND[:at] if word == "COPY")
    script = (ROOT / "scripts" / "setup_env.sh").read_text()
    for file in ("scripts/requirements-cuda.txt", "scripts/requirements-te.txt", "setup.py"):
        assert file in there and "scripts/setup_env " in there
        assert Path(file).name.replace("cuda", "$stack") in script


def test_environment_finds_python_and_nvcc_of_the_packages(tmp_path: Path) -> None:
    image = carried_out(tmp_path, "WORKDIR", "ARG", "ENV")
    folder = re.search(r"folder=(\.venv-\w+)", (ROOT / "scripts" / "setup_env.sh").read_text())
    assert folder
    venv = f"{image.workdir}/{folder[1]}"
    (python,) = re.findall(r" (python3\.\d+) ", dict(FOUND[:2])["RUN"])
    assert image.env["CUDA_HOME"] == f"{venv}/lib/{python}/site-packages/nvidia/cu13"
    assert image.env["PATH"].split(":")[:2] == [f"{venv}/bin", f"{image.env['CUDA_HOME']}/bin"]
    assert image.env["MCORE_RL_SKIP_SETUP"] == "1"


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("README.md", False),
        ("CHANGELOG.md", True),
        (".git/config", True),
        ("runs/tests/metrics.jsonl", True),
        ("tests/gpu/jobs.py", False),
        ("tests/gpu/__pycache__/jobs.pyc", True),
    ],
)
def test_dockerignore_keeps_named_folders_without_caches(path: str, ignored: bool) -> None:
    assert is_ignored(path, (ROOT / ".dockerignore").read_text().split()) == ignored
