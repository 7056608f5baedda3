"""Runs all paths of a case in turns and measures them. Collective over the world throughout."""

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
    """What one rank measured of one path."""

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

    In the first warm-up run the destination is cleared before and checked after. Memory and traffic
    are those of the last; `return_freed_memory_at_once` should be in force.
    """
    found = {path.name: Samples() for path in paths}
    for number in range(NUM_WARM_UP):
        for path in paths:
            _warm_up(path, found[path.name], check, clear if number == 0 else None)
    return_freed_memory_at_once(False)
    for number in range(repetitions):
        # Another path follows another one each time.
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
    # The first run also sets up connections and plans; the last is what every later one takes.
    samples.peak_extra_bytes = peak.extra_bytes


def return_freed_memory_at_once(enabled: bool) -> None:
    """Whether malloc gives back what is freed, or keeps it for later, as it does by itself.

    What it keeps would be counted as memory of the path that happened to free or to want it. Call
    this before anything large is allocated: what lies in malloc's heap already stays there.
    Disabled is the state that malloc comes to once something of 32 MiB was freed.
    """
    if (libc := _libc()) is not None:
        libc.mallopt(_MMAP_THRESHOLD, 128 << 10 if enabled else 32 << 20)
        libc.mallopt(_TRIM_THRESHOLD, 128 << 10 if enabled else 64 << 20)


def _give_back_free_pages() -> None:
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


def _libc() -> Any:
    """The C library if it is glibc; only that has these calls."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        return libc
    return None


def of_all_ranks(mine: Mapping[str, Samples]) -> dict[str, list[Samples]]:
    """path -> every rank's samples."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, dict(mine))
    return {name: [samples[name] for samples in everybody] for name in mine}
