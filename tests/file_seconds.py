"""CPU and wall seconds of each test file, recorded in every run and held against budgets.

`tests/conftest.py` loads this as a plugin. CPU seconds are those of the process that runs the test,
of the programs that it starts, and of the ranks that `tests.rank_pool` forks. Workers of
pytest-xdist report to the process that collects them, which

- writes `build/test_seconds.json`;
- prints the files that take the most, and what each folder takes;
- fails the run, with the figures, if a file takes more than 1.5 times its budget. Beside other work
  it only prints them: shared caches and cores make the same work up to four times as long.

Budgets are in `tests/file_seconds.json`, in CPU seconds, since wall seconds depend on what other
workers do. Processors differ: a budget is scaled by a loop that each worker measures, relative to
`REFERENCE`.
`python -m tests.file_seconds` sets the budgets from the last run.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.rank_pool import RankPool

ROOT = Path(__file__).parent.parent
BUDGETS = ROOT / "tests" / "file_seconds.json"
RECORD = ROOT / "build" / "test_seconds.json"
ALLOWED = 1.5  # times its budget
# The first test of a file may pay for what a session shares (a pool of ranks, checkpoints).
SHARED_SECONDS = 30.0
REFERENCE = 0.065  # seconds of `loop_seconds` on the machine whose seconds are the budgets


def loop_seconds() -> float:
    """Return the CPU seconds of a fixed loop in Python, the least of several."""

    def once() -> float:
        began = time.process_time()
        sum(i & 7 for i in range(1_000_000))
        return time.process_time() - began

    return min(once() for _ in range(5))


def cpu_seconds() -> float:
    """Return what this process, the children it has waited for, and the ranks and programs that
    were forked for it have used."""
    total = RankPool.cpu_seconds + sum(each.cpu_seconds() for each in RankPool.programs)
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def busy_seconds() -> float:
    """CPU seconds of all processes since the machine started; steal by other machines included."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def has_other_work(busy: float, ours: float) -> bool:
    """Whether many of the machine's `busy` CPU seconds were not `ours`, those of the tests.

    Collecting tests and importing for pools are ours as well, and in no file's seconds.
    """
    return busy > 1.25 * ours + 60.0 * os.cpu_count()


def budgets() -> dict[str, float]:
    return json.loads(BUDGETS.read_text())


def over_budget(
    seconds: dict[str, dict[str, float]], allowed: dict[str, float], slowness: float
) -> list[str]:
    """A line for each file that takes more than it may; files without a budget may take any."""
    lines = []
    for file, budget in sorted(allowed.items()):
        took = seconds.get(file, {"cpu": 0.0})
        limit = ALLOWED * budget * max(slowness, 1.0) + SHARED_SECONDS
        if took["cpu"] > limit:
            lines.append(
                f"{file} took {took['cpu']:.0f} CPU seconds; its budget is {budget:.0f} and the "
                f"limit {limit:.0f} (1.5 times, on a machine {slowness:.2f} times as slow, and "
                f"{SHARED_SECONDS:.0f} for shared starts). Shorten it, or set its budget in "
                f"{BUDGETS.relative_to(ROOT)}."
            )
    return lines


class FileSeconds:
    """The plugin; see the head of this file."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._is_worker = hasattr(config, "workerinput")
        self._seconds: dict[str, dict[str, float]] = {}
        self._slowness = loop_seconds() / REFERENCE
        self._busy_before = busy_seconds()
        self._other_work = False

    def _add(self, file: str, cpu: float, wall: float, tests: int) -> None:
        total = self._seconds.setdefault(file, {"cpu": 0.0, "wall": 0.0, "tests": 0})
        for name, value in (("cpu", cpu), ("wall", wall), ("tests", tests)):
            total[name] += value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        cpu, wall = cpu_seconds(), time.monotonic()
        outcome = yield
        self._add(item.nodeid.split("::")[0], cpu_seconds() - cpu, time.monotonic() - wall, tests=1)
        return outcome

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        report = getattr(node, "workeroutput", {}).get("file_seconds")
        if report is None:
            return  # the worker died
        for file, took in report["seconds"].items():
            self._add(file, took["cpu"], took["wall"], took["tests"])
        self._slowness = max(self._slowness, report["slowness"])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._is_worker:
            session.config.workeroutput["file_seconds"] = {  # type: ignore[attr-defined]
                "seconds": self._seconds,
                "slowness": self._slowness,
            }
            return
        if not self._seconds:
            return  # tests were only collected
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(self._seconds, indent=1, sort_keys=True) + "\n")
        ours = sum(took["cpu"] for took in self._seconds.values())
        self._other_work = has_other_work(busy_seconds() - self._busy_before, ours)
        if self._too_long() and not self._other_work and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _too_long(self) -> list[str]:
        return over_budget(self._seconds, budgets(), self._slowness)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._seconds:
            return
        folders: dict[str, float] = {}
        for file, took in self._seconds.items():
            folder = "/".join(file.split("/")[:2])
            folders[folder] = folders.get(folder, 0.0) + took["cpu"]
        terminalreporter.section("CPU seconds")
        total = ", ".join(f"{folder} {cpu:.0f}" for folder, cpu in sorted(folders.items()))
        beside = "; beside other work" if self._other_work else ""
        terminalreporter.line(f"{total}; loop {self._slowness:.2f} of the reference{beside}")
        for file, took in sorted(self._seconds.items(), key=lambda item: -item[1]["cpu"])[:20]:
            terminalreporter.line(
                f"{took['cpu']:7.1f} CPU {took['wall']:7.1f} wall  {took['tests']:4.0f} tests  "
                f"{file}"
            )
        for line in self._too_long():
            terminalreporter.line(f"over budget: {line}", red=True)


def main() -> None:
    """Set the budgets of the files that the last run has, with a tenth more than they took."""
    now = json.loads(RECORD.read_text())
    merged = budgets() if BUDGETS.exists() else {}
    merged |= {file: float(round(took["cpu"] * 1.1 + 0.5)) for file, took in now.items()}
    kept = {file: merged[file] for file in sorted(merged) if (ROOT / file).exists()}
    BUDGETS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
