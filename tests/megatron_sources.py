"""Megatrons to put on Python's path: of one file, of links to the installed one, of a release."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from mcore_rl.common.megatron_version import OLDEST

# Those that were tried, but for the installed one.
RELEASES = (OLDEST, "0.18.2", "0.19.0")
GPT_PACKAGE = "megatron/core/models/gpt/__init__.py"
GPT_MODEL = "megatron/core/models/gpt/gpt_model.py"
_WRAPPERS = "megatron/core/inference/model_inference_wrappers"
IMPORT_GPT_MODEL = {
    f"{_WRAPPERS}/abstract_model_inference_wrapper.py": "gpt.gpt_model",
    f"{_WRAPPERS}/gpt/gpt_inference_wrapper.py": "gpt",
    "megatron/core/models/multimodal/llava_model.py": "gpt",
    "megatron/training/models/gpt.py": "gpt.gpt_model",
}
ROTATION = "megatron/core/models/common/embeddings/rope_utils.py"


def installed_megatron() -> Path:
    """The folder that the installed `megatron` is in."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[2]


def write_version(folder: Path, version: str) -> None:
    """A `megatron.core` that states its version as releases do, and holds nothing else."""
    major, minor, patch = version.split(".")
    file = folder / "megatron" / "core" / "package_info.py"
    file.parent.mkdir(parents=True)
    (file.parent / "__init__.py").touch()
    file.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n")


def megatron_on_the_path(
    folder: Path,
    version: str,
    *,
    changed: bool = False,
    has_gpt_model: bool = True,
    deprecates_gpt_model: bool = True,
) -> None:
    """The installed Megatron again, linked file by file, that calls itself `version`.

    With `changed`, a function that a patch replaces takes a parameter that no release has. Without
    `has_gpt_model` the class has another name, also where other modules import it. Without
    `deprecates_gpt_model` it logs no deprecation.
    """
    source = installed_megatron()
    for kept, _, files in os.walk(source / "megatron"):
        copy = folder / Path(kept).relative_to(source)
        copy.mkdir(parents=True, exist_ok=True)
        for file in files:
            if not file.endswith(".pyc"):
                (copy / file).symlink_to(Path(kept) / file)
    _rewrite(folder / "megatron/core/package_info.py", *_version_lines(source, version))
    if changed:
        place = "def _apply_rotary_pos_emb_thd(\n    t: Tensor,"
        _rewrite(folder / ROTATION, (place, f"{place}\n    a_parameter_of_a_fork: int,"))
    if not deprecates_gpt_model:
        _rewrite(folder / GPT_MODEL, ("GPTModel IS DEPRECATED. ", ""))
    if not has_gpt_model:
        _rewrite(folder / GPT_MODEL, ("class GPTModel(", "class RemovedModel("))
        _rewrite(folder / GPT_PACKAGE, ("from .gpt_model import GPTModel", ""))
        for file, module in IMPORT_GPT_MODEL.items():
            new = "from megatron.core.models.gpt.gpt_model import RemovedModel as GPTModel"
            _rewrite(folder / file, (f"from megatron.core.models.{module} import GPTModel", new))


def _version_lines(source: Path, version: str) -> list[tuple[str, str]]:
    text = (source / "megatron/core/package_info.py").read_text()
    found = []
    for name, number in zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True):
        line = next(line for line in text.splitlines() if line.startswith(f"{name} ="))
        found.append((line, f"{name} = {number}"))
    return found


def _rewrite(link: Path, *changes: tuple[str, str]) -> None:
    """Put a changed copy in the place of a link."""
    text = link.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    link.unlink()
    link.write_text(text)


def other_sources() -> list[str]:
    """Checkouts that no index has, such as Megatron-LM's main."""
    named = os.environ.get("MCORE_RL_MEGATRON_SOURCES", "")
    return [folder for folder in named.split(":") if folder]


def release(version: str) -> Path:
    """A checkout of the release's source, downloaded once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("MCORE_RL_CACHE") or cache / "mcore_rl") / "megatron"
    name = f"megatron_core-{version}"
    if (root / name).is_dir():
        return root / name
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:")
        run = subprocess.run(
            [*pip, "--ignore-requires-python", f"megatron-core=={version}", "-d", folder],
            capture_output=True,
            text=True,
        )
        if run.returncode:
            said = (run.stderr.strip() or "pip said nothing").splitlines()[-1]
            pytest.skip(f"the source of megatron-core {version} cannot be downloaded: {said}")
        with tarfile.open(Path(folder) / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        unpacked = Path(folder) / name
        author = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
        for command in (("init", "-q"), ("add", "-A"), (*author, "commit", "-q", "-m", version)):
            git(unpacked, *command)
        unpacked.rename(root / name)
    return root / name


def git(folder: Path, *command: str) -> str | None:
    run = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else None
