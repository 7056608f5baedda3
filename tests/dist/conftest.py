"""Fixtures of test_bad_input*.py: one good folder for them all, and a copy of it for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.dist.bad_input_cases")


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and prompts that pass all checks."""
    from tests.dist.bad_input_folder import make_good_folder  # which imports transformers

    here = tmp_path_factory.mktemp("bad_input") / "good"
    make_good_folder(here)
    return here


@pytest.fixture
def here(good: Path, tmp_path: Path) -> Path:
    """A copy of the good folder to spoil; the cache of tokenised prompts is shared."""
    shutil.copytree(good, tmp_path / "case")
    (tmp_path / "cache").symlink_to(good.parent)
    return tmp_path / "case"
