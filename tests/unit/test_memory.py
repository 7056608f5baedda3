"""Measurements of this process's memory."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest
import torch

from mcore_rl.hybrid_engine.memory import usage as memory
from mcore_rl.hybrid_engine.memory.usage import PeakMemory, highest_bytes, host_bytes
from tests.footprint import Footprint

MIB = 1 << 20


def _peaks() -> None:
    with PeakMemory() as peak:
        torch.ones(64 * MIB, dtype=torch.uint8)
    with PeakMemory() as small:
        torch.ones(MIB, dtype=torch.uint8)
    # Pages of other threads and of the interpreter come and go meanwhile, by far less than 8 MiB.
    assert abs(peak.extra_bytes - 64 * MIB) < 8 * MIB, peak.extra_bytes
    assert small.extra_bytes < 8 * MIB, small.extra_bytes


def _highest() -> None:
    held = torch.ones(256 * MIB, dtype=torch.uint8)
    high = host_bytes()
    del held
    with PeakMemory():
        pass
    assert host_bytes("VmHWM") < high - 128 * MIB
    assert highest_bytes()[0] >= high - MIB  # the kernel counts per core, and sums now and then


def test_peak_counts_freed_memory_and_highest_survives_measurement() -> None:
    """In a fresh process, where no leftovers of other tests are freed meanwhile."""
    code = f"from {__name__} import _highest, _peaks; _peaks(); _highest()"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_device_memory_is_that_of_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's allocator counts a sleeping engine, 70 of 80 here, and is not asked."""
    used = {"engine": 70, "cached": 3, "in use": 5, "communicators": 1}

    def mem_get_info() -> tuple[int, int]:
        return (80 - sum(used.values())) * MIB, 80 * MIB

    monkeypatch.setattr(memory, "_highest", [0, 0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: used.update(cached=0))
    monkeypatch.delattr(torch.cuda, "memory_allocated")
    monkeypatch.delattr(torch.cuda, "max_memory_allocated")
    memory.give_back_cached()
    used["engine"] = 0  # asleep
    assert memory.device_bytes() == 6 * MIB
    used["cached"] = 60  # a stage's peak, which the allocator keeps
    memory.give_back_cached()
    assert memory.device_bytes() == 6 * MIB
    assert highest_bytes()[1] == 79 * MIB, "before anything was given back"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc's heap")
@pytest.mark.parametrize(("mib", "knows_heap"), [(640, True), (128, False)])
def test_freed_tensors_between_kept_ones_are_returned_to_kernel(
    mib: int, knows_heap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heap cannot shrink past a tensor that is kept, and keeps what was freed before it."""
    if not knows_heap:  # before glibc 2.33
        monkeypatch.setattr(memory, "malloc_info", lambda: None)
    tensors = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(16 * mib)]
    kept = tensors[::2]
    tensors.clear()
    before = host_bytes("RssAnon")
    memory.give_back_cached()
    assert before - host_bytes("RssAnon") > 0.8 * mib / 2 * MIB, "of half of them"
    assert len(kept) == 8 * mib


@pytest.mark.slow
def test_footprint_counts_memory_files_threads_and_segments(tmp_path: Path) -> None:
    resource_tracker.ensure_running()  # it takes two files of its own
    before = Footprint.now()
    assert 0 < before.heap_bytes < before.resident_bytes < host_bytes()
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    segment = shared_memory.SharedMemory(create=True, size=4096)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with open(tmp_path / "file", "w"):
            during = Footprint.now()
    finally:
        stop.set()
        thread.join()
        segment.close()
        segment.unlink()
    assert abs(during.resident_bytes - before.resident_bytes - 64 * MIB) < 8 * MIB
    assert abs(during.heap_bytes - before.heap_bytes - 64 * MIB) < MIB
    assert during.open_files == before.open_files + 3  # the file, the segment, its mapping
    assert during.threads == before.threads + 1
    assert during.shared_memory == before.shared_memory + 1
    assert during.device_bytes == before.device_bytes == 0 or torch.cuda.is_available()
    del held
    after = Footprint.now()
    assert abs(after.resident_bytes - before.resident_bytes) < 8 * MIB
    assert abs(after.heap_bytes - before.heap_bytes) < MIB
    for name in ("open_files", "threads", "shared_memory"):
        assert getattr(after, name) == getattr(before, name), name
