"""How fast this machine is at a moment: other tenants of its host slow it down by a third at times.

    python benchmarks/machine_speed.py

prints the speed of one process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

SECONDS = 3.0  # of a measurement
_SIZE = 128  # of matrices: three of them fit in a second-level cache
_CALLS = 200  # of Python for each product


def machine_speed(num_processes: int) -> float:
    """Return units of a fixed computation per second and process, while `num_processes` compute:
    matrix products, and calls in Python."""
    processes = [
        subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
        for _ in range(num_processes)
    ]
    return statistics.fmean(float(each.communicate()[0]) for each in processes)


@contextmanager
def noting_speed(file: Path, num_processes: int) -> Iterator[None]:
    """Measure the speed before and after the block, and write the mean to `file`."""
    before = machine_speed(num_processes)
    yield
    file.write_text(str((before + machine_speed(num_processes)) / 2))


def _units_per_second() -> float:
    matrix = np.random.default_rng(1).standard_normal((_SIZE, _SIZE)).astype(np.float32)
    product, units = np.empty_like(matrix), 0
    started = time.perf_counter()
    while (seconds := time.perf_counter() - started) < SECONDS:
        np.matmul(matrix, matrix, out=product)
        sum(abs(number) for number in range(_CALLS))
        units += 1
    return units / seconds


if __name__ == "__main__":
    print(_units_per_second())
