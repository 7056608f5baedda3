"""The pins of scripts/requirements-*.txt on each Python that setup.py accepts.

uv resolves them for that Python, from wheels alone, and installs nothing: no such Python is needed,
but a package index is. By default the newest Python alone; `-m versions` takes all of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cuda.stack import canonical
from tests.python_versions import supported_pythons
from tests.rank_pool import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.versions]

# They are installed without their dependencies: see the head of requirements-cpu.txt.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
# torch's builds for CPU are in an index of their own. PyPI's needs CUDA's libraries, and pins
# another triton.
OVERRIDES = ("torch==2.13.0", "triton==3.9.0")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "python" in metafunc.fixturenames:
        asked_for = "versions" in metafunc.config.option.markexpr
        metafunc.parametrize("python", supported_pythons()[0 if asked_for else -1 :])


def pins(python: str, *stacks: str) -> list[str]:
    """The lines that apply to this Python. Only pip can install megatron-core on 3.11."""
    files = (ROOT / "scripts" / f"requirements-{stack}.txt" for stack in stacks)
    lines = [line for file in files for line in file.read_text().splitlines()]
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [
        f"{canonical(pin.name)}{pin.specifier}"
        for pin in wanted
        if pin.marker is None or pin.marker.evaluate({"python_version": python})
        if not (pin.name == "megatron-core" and python == "3.11")
    ]


def resolved(folder: Path, python: str, lines: list[str], *options: str) -> set[str]:
    """What uv would install for these lines, dependencies included."""
    (folder / "pins.txt").write_text("\n".join(lines))
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config"]
    command += [
        "--no-header",
        "--no-annotate",
        "--python-version",
        python,
        "--only-binary",
        ":all:",
        *options,
        "pins.txt",
    ]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if "Failed to fetch" in run.stderr:
        pytest.skip(f"no package index answers: {run.stderr.splitlines()[-1]}")
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split("\n")) - {""}


def test_cpu_stack_has_wheels_and_lacks_no_dependency(python: str, tmp_path: Path) -> None:
    wanted = pins(python, "cpu")
    (tmp_path / "overrides.txt").write_text("\n".join(OVERRIDES))
    (tmp_path / "excludes.txt").write_text("\n".join(LEFT_OUT))
    options = ("--overrides", "overrides.txt", "--excludes", "excludes.txt")
    found = resolved(tmp_path, python, wanted, *options)
    libraries = {line for line in found if line.startswith(("nvidia-", "cuda-"))}
    assert found - libraries == {line.removesuffix("+cpu") for line in wanted}


def test_cuda_stack_has_wheels(python: str, tmp_path: Path) -> None:
    # The extension alone has none: it is compiled during the installation.
    wanted = [line for line in pins(python, "cuda", "te") if "transformer-engine-torch" not in line]
    assert set(wanted) <= resolved(tmp_path, python, wanted)
