"""Exports that follow a run: the newest, the best, and folders that are replaced at once."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.common import disk
from mcore_rl.config import TrainerOptions
from mcore_rl.megatron.hf_files import EXPORT_MARKER, best_export
from mcore_rl.trainer import exports as module
from mcore_rl.trainer.exports import RunExports


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exports of `exports_of`, each of a file with its number, by `hf_export`'s last step."""
    numbers: list[int] = []

    def write(_shards: Any, _checkpoint: Any, target: Path, **_: Any) -> None:
        numbers.append(len(numbers))
        partial = target.with_name("partial")
        partial.mkdir()
        (partial / "model.safetensors").write_text(str(numbers[-1]))
        (partial / EXPORT_MARKER).write_text('{"exported_from": "there"}')
        disk.replace_folder(partial, target)

    monkeypatch.setattr(module, "export", write)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    return numbers


def exports_of(target: Path, interval: int = 4) -> RunExports:
    options = TrainerOptions(export_hf=str(target), export_interval=interval)
    nothing: Any = None
    return RunExports(options, nothing, nothing, apart_from=())


def content(folder: Path) -> str:
    return (folder / "model.safetensors").read_text()


def test_newest_and_best_export_stay_also_after_a_resume(
    tmp_path: Path, written: list[int]
) -> None:
    target = tmp_path / "exported"
    best, exports = best_export(str(target)), exports_of(target)
    exports.note(0, {"eval/accuracy": 0.9})  # of weights that are not exported
    for num_steps, accuracy in ((4, 0.5), (8, 0.7), (12, 0.6)):
        exports.export_if_due(num_steps - 1)
        exports.export_if_due(num_steps)
        exports.note(num_steps, {} if num_steps == 4 else {"eval/accuracy": accuracy})
    assert (content(target), content(best)) == ("2", "1")
    assert json.loads((best / EXPORT_MARKER).read_text()) == {
        "exported_from": "there",
        "score": 0.7,
    }
    again = exports_of(target)
    for num_steps, accuracy in ((16, 0.65), (18, 0.7)):
        again.export(num_steps)
        again.export(num_steps)  # is there already
        again.note(num_steps, {"eval/accuracy": accuracy})
    assert (content(target), content(best)) == ("4", "4")
    assert "score" not in json.loads((target / EXPORT_MARKER).read_text())
    assert {path.name for path in tmp_path.iterdir()} == {target.name, best.name}


def test_without_an_interval_there_is_one_export(tmp_path: Path, written: list[int]) -> None:
    exports = exports_of(tmp_path / "exported", interval=0)
    exports.export_if_due(4)
    exports.export(5)
    exports.note(5, {"eval/accuracy": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["exported"] and written == [0]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_folder_is_replaced_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:  # as on NFS, and without renameat2
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    target = tmp_path / "target"
    for number in "12":
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / number).touch()
        disk.replace_folder(tmp_path / "new", target)
        assert [path.name for path in target.iterdir()] == [number]
        assert [path.name for path in tmp_path.iterdir()] == ["target"]
