"""Memory, cores and workers within the limits of the machine and of the process's cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.common.machine import MachineMemory, available_cores, machine_memory
from mcore_rl.rewards import pool

GIB = 1 << 30


def machine(root: Path, cgroup: str = "", files: dict[str, str] | None = None) -> Path:
    """A tree with 64 GiB, of which 48 are available, and these files below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {64 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB >> 10} kB\n"
    )
    if cgroup:
        (root / "proc/self/cgroup").write_text(cgroup)
    for name, content in (files or {}).items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return root


V2 = {
    "job/memory.max": f"{32 * GIB}\n",
    "job/memory.current": f"{20 * GIB}\n",
    "job/memory.stat": f"anon 5\ninactive_file {8 * GIB}\n",
    "job/step/memory.max": "max\n",
}
V1 = {
    "memory/memory.limit_in_bytes": "9223372036854771712\n",
    "memory/job/memory.limit_in_bytes": f"{16 * GIB}\n",
    "memory/job/memory.usage_in_bytes": f"{4 * GIB}\n",
    "memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
}


@pytest.mark.parametrize(
    ("cgroup", "files", "limit", "available", "named"),
    [
        ("", {}, 64, 48, "machine"),
        ("0::/\n", {"memory.max": "max\n"}, 64, 48, "machine"),
        ("0::/job/step\n", V2, 32, 20, "cgroup/job"),
        ("4:cpu,cpuacct:/x\n3:memory:/job\n0::/\n", V1, 16, 13, "memory/job"),
        # In a container the path is the host's, and the topmost folder is its own.
        ("0::/kubepods/pod1\n", {"memory.max": f"{8 * GIB}"}, 8, 8, "cgroup"),
        # Looser than the machine.
        ("0::/\n", {"memory.max": f"{128 * GIB}"}, 64, 48, "machine"),
    ],
)
def test_tightest_limit_is_found(
    cgroup: str, files: dict[str, str], limit: int, available: int, named: str, tmp_path: Path
) -> None:
    found = machine_memory(machine(tmp_path, cgroup, files))
    assert found.limit_bytes == limit * GIB
    assert found.available_bytes // GIB == available
    assert named in found.source


def test_memory_of_this_machine_is_positive() -> None:
    found = machine_memory()
    assert 0 < found.available_bytes <= found.limit_bytes


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/job/step\n", {"job/cpu.max": "250000 100000\n", "job/step/cpu.max": "max 100000"}, 2),
        ("0::/job\n", {"job/cpu.max": "max 100000\n"}, 8),
        ("0::/job\n", {"job/cpu.max": "5000 100000\n"}, 1),
        (
            "3:cpu,cpuacct:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "400000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        (
            "3:cpu,cpuacct:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            8,
        ),
    ],
)
def test_cores_are_limited_by_mask_and_cgroups(tmp_path, monkeypatch, cgroup, files, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert available_cores(machine(tmp_path, cgroup, files)) == expected


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "available_gib", "expected"),
    [
        (2, 1, 48, 1),
        (8, 1, 48, 7),
        (8, 8, 48, 1),
        (128, 8, 1000, 15),
        (256, 1, 1000, 16),
        (64, 1, 12, 6),
        (64, 4, 0, 1),
    ],
)
def test_reward_workers_use_cores_left_by_ranks(
    monkeypatch, num_cores, num_ranks, available_gib, expected
):
    memory = MachineMemory(available_gib * GIB, available_gib * GIB, "")
    monkeypatch.setattr(pool, "available_cores", lambda: num_cores)
    monkeypatch.setattr(pool, "machine_memory", lambda: memory)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    assert pool.default_workers() == expected
