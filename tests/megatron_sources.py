"""Megatrons to put on Python's path: of one file, of links to the installed one, of a release."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

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


def megatron_on_the_path(folder: Path, version: str, *, changed: bool = False) -> None:
    """The installed Megatron again, linked file by file, that calls itself `version`.

    With `changed`, a function that a patch replaces takes a parameter that no release has.
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
