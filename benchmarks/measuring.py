"""Measurement of all paths of a case, in turns. Collective over the world."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from benchmarks.counters import counted
from benchmarks.paths import Path
from mcore_rl.hybrid_engine.memory.usage import PeakMemory

NUM_WARM_UP = 2
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, from malloc.h


@dataclass(slots=True)
class Samples:
    """Measurements of one path on one rank."""

    received_bytes: int = 0
    num_calls: int = 0
    control_bytes: int = 0
    control_calls: int = 0
    peak_extra_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of this process, all threads
    differing: list[str] = field(default_factory=list)


def measure(
    paths: Sequence[Path],
    *,
    repetitions: int,
    check: Callable[[Path], list[str]],
    clear: Callable[[Path], None],
) -> dict[str, Samples]:
    """Warm up and count, then time `repetitions` runs of every path in turns.

    The first warm-up run starts with a cleared destination and is checked. Memory and traffic are
    measured in the last one, under `return_freed_memory_at_once`.
    """
    found = {path.name: Samples() for path in paths}
    for number in range(NUM_WARM_UP):
        for path in paths:
            _warm_up(path, found[path.name], check, clear if number == 0 else None)
    return_freed_memory_at_once(False)
    for number in range(repetitions):
        # Rotate, so that no path always follows the same one.
        turn = number % len(paths)
        for path in (*paths[turn:], *paths[:turn]):
            path.prepare()
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.process_time()
            path.run()
            found[path.name].seconds.append(time.perf_counter() - started)
            found[path.name].cpu_seconds.append(time.process_time() - cpu_started)
            dist.barrier()
            path.finish()
    return found


def _warm_up(
    path: Path,
    samples: Samples,
    check: Callable[[Path], list[str]],
    clear: Callable[[Path], None] | None,
) -> None:
    if clear is not None:
        clear(path)
    path.prepare()
    _give_back_free_pages()
    dist.barrier()
    with counted() as traffic, PeakMemory() as peak:
        path.run()
    if clear is not None:
        samples.differing = check(path)
    path.finish()
    samples.received_bytes, samples.num_calls = traffic.received_bytes, traffic.num_calls
    samples.control_bytes, samples.control_calls = traffic.control_bytes, traffic.control_calls
    # The first run also sets up connections and plans; the last one is like all later ones.
    samples.peak_extra_bytes = peak.extra_bytes


def return_freed_memory_at_once(enabled: bool) -> None:
    """Make malloc return freed memory at once, or restore its default.

    Memory that malloc keeps would count for the path that freed or reused it. Call this before any
    large allocation, since allocations in malloc's heap stay there. The default is the state of
    malloc after 32 MiB were freed.
    """
    if (libc := _libc()) is not None:
        libc.mallopt(_MMAP_THRESHOLD, 128 << 10 if enabled else 32 << 20)
        libc.mallopt(_TRIM_THRESHOLD, 128 << 10 if enabled else 64 << 20)


def _give_back_free_pages() -> None:
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


def _libc() -> Any:
    """Return the C library if it is glibc, which alone has these calls."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        return libc
    return None


def of_all_ranks(mine: Mapping[str, Samples]) -> dict[str, list[Samples]]:
    """Return the samples of all ranks, by path."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, dict(mine))
    return {name: [samples[name] for samples in everybody] for name in mine}
