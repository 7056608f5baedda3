"""Rows of a user's function, as the file that a run reads."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from mcore_rl.data import user_prompts


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(user_prompts._SOURCES, "sums", lambda: [{"prompt": "1+1=", "answer": 2}])
    return "sums"


def test_a_file_of_other_content_is_replaced(source: str, tmp_path: Path) -> None:
    path = user_prompts.prompts_path(source, str(tmp_path))
    content = path.read_bytes()
    path.write_bytes(b"")
    assert user_prompts.prompts_path(source, str(tmp_path)).read_bytes() == content


def test_without_a_cache_the_file_is_where_others_cannot_write(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "mcore_rl_prompts").touch()
    (tmp_path / "cache").touch()  # a file: nothing can be written below it
    path = user_prompts.prompts_path(source, str(tmp_path / "cache"))
    assert b"1+1=" in path.read_bytes()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
