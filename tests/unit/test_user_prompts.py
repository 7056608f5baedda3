"""The file of prompts of a user's function."""

from __future__ import annotations

import stat
import tempfile

import pytest

from mcore_rl.data import user_prompts


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(user_prompts.SOURCES, "sums", lambda: [{"prompt": "1+1=", "answer": 2}])
    return "sums"


def test_file_with_other_content_is_replaced(source, tmp_path):
    path = user_prompts.prompts_path(source, str(tmp_path), "--rl-prompts")
    content = path.read_bytes()
    path.write_bytes(b"")
    assert user_prompts.prompts_path(source, str(tmp_path), "--rl-prompts").read_bytes() == content


def test_file_without_a_cache_is_in_a_private_folder(source, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "mcore_rl_prompts").touch()
    (tmp_path / "cache").touch()  # a file: nothing can be written below it
    path = user_prompts.prompts_path(source, str(tmp_path / "cache"), "--rl-prompts")
    assert b"1+1=" in path.read_bytes()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
