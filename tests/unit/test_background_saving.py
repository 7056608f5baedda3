"""The files of checkpoints that a process of its own writes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load

from mcore_rl.patches.megatron import background_saving
from mcore_rl.patches.megatron.background_saving import StagedFile

STATE = {
    "whole": torch.randn(300, 200),
    "view": torch.randn(64, 64).t()[3:40],
    "bfloat16": torch.randn(70).bfloat16(),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
}


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """End this process's writer."""
    yield
    process = background_saving.writer_process()
    process.kill()
    process.wait()


def staged(path: Path, state: dict[str, torch.Tensor]) -> tuple[StagedFile, SimpleNamespace]:
    """A copy of `state`, and what PyTorch's writer knows of it besides."""
    plans, metadata = create_default_global_save_plan([create_default_local_save_plan(state, True)])
    items = [(item, state[item.index.fqn]) for item in plans[0].items]
    return StagedFile(path, items), SimpleNamespace(metadata=metadata, items=plans[0].items)


def test_file_has_the_state_at_the_time_of_the_copy(tmp_path: Path) -> None:
    """Two files are written one after the other by the same process, from the same memory."""
    background_saving.free_buffers.clear()
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
        state = {name: tensor.clone() for name, tensor in STATE.items()}
        file, known = staged(folder / "__0_0.distcp", state)
        for tensor in state.values():
            tensor.zero_()
        written = file.start()
        results, digest = written.result(60)
        assert digest == hashlib.sha256((folder / "__0_0.distcp").read_bytes()).hexdigest()
        FileSystemWriter(folder).finish(known.metadata, [results])
    for folder in folders:
        found = {name: torch.full_like(tensor, 7) for name, tensor in STATE.items()}
        load(found, storage_reader=FileSystemReader(folder), no_dist=True)
        assert all(found[name].equal(tensor) for name, tensor in STATE.items())
    assert len(background_saving.free_buffers) == 1
    sizes = {(folder / "__0_0.distcp").stat().st_size for folder in folders}
    assert len(sizes) == 1 and max(sizes) < 2 * sum(t.nbytes for t in STATE.values()) + 10_000


def test_first_copy_is_in_the_memory_that_was_reserved(tmp_path: Path) -> None:
    background_saving.free_buffers.clear()
    background_saving.reserve(1 << 20)
    file, _ = staged(tmp_path / "file", STATE)
    background_saving.reserve(1 << 20)  # has no effect
    file.start().result(60)
    (buffer,) = background_saving.free_buffers
    assert len(buffer) == 1 << 20


@pytest.mark.slow
def test_failures_are_told_and_the_next_file_has_another_process(tmp_path: Path) -> None:
    large = {"large": torch.zeros(1 << 22)}  # more than a pipe holds
    with pytest.raises(RuntimeError, match=r"gone/file could not be written: .*\[Errno 2\]"):
        staged(tmp_path / "gone" / "file", large)[0].start().result(60)
    file, _ = staged(tmp_path / "file", large)
    process = background_saving.writer_process()
    process.kill()
    process.wait()
    assert background_saving.writer_process().pid != process.pid
    assert len(file.start().result(60)[0]) == 1
    file, _ = staged(tmp_path / "again", large)
    background_saving.writer_process().kill()
    with pytest.raises(RuntimeError, match="its process ended with -9"):
        file.start().result(60)


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    _, known = staged(tmp_path / "unused", {"scalar": torch.tensor(3)})
    item = known.items[0]
    item = type(item)(item.index, type(item.type).BYTE_IO)
    ((result,), _) = StagedFile(tmp_path / "file", [(item, io.BytesIO(b"abc"))]).start().result(60)
    assert (tmp_path / "file").read_bytes() == b"abc" and result.size_in_bytes == 3
