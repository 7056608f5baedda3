"""Budgets of CPU seconds of test files."""

from __future__ import annotations

import subprocess
import sys
import time

from tests import file_seconds
from tests.file_seconds import SHARED_SECONDS, cpu_seconds, over_budget


def took(cpu: float) -> dict[str, float]:
    return {"cpu": cpu, "wall": 1.0, "tests": 1}


def test_a_file_above_one_and_a_half_times_its_budget_is_named_with_its_figures():
    limit = 1.5 * 40 + SHARED_SECONDS
    seconds = {"tests/a.py": took(limit - 1), "tests/b.py": took(limit + 1)}
    allowed = {"tests/a.py": 40.0, "tests/b.py": 40.0, "tests/not_run.py": 1.0}
    (line,) = over_budget(seconds, allowed, 1.0)
    assert line.startswith("tests/b.py took 91 CPU seconds; its budget is 40 and the limit 90 ")


def test_a_slow_machine_has_more_and_a_fast_one_no_less():
    seconds, allowed = {"tests/a.py": took(100.0)}, {"tests/a.py": 40.0}
    assert not over_budget(seconds, allowed, 1.3)
    assert over_budget(seconds, allowed, 1.0) and over_budget(seconds, allowed, 0.5)


def test_other_work_is_what_a_run_does_not_account_for(monkeypatch):
    monkeypatch.setattr(file_seconds.os, "cpu_count", lambda: 2)
    assert not file_seconds.has_other_work(busy=1000.0, ours=800.0)
    assert not file_seconds.has_other_work(busy=100.0, ours=1.0)  # a pool's imports
    assert file_seconds.has_other_work(busy=1600.0, ours=800.0)


def test_seconds_of_programs_that_a_test_starts_count():
    before = cpu_seconds()
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert cpu_seconds() - before >= 0.3


def test_seconds_of_forked_ranks_count(monkeypatch):
    before = cpu_seconds()
    monkeypatch.setattr(file_seconds.RankPool, "cpu_seconds", file_seconds.RankPool.cpu_seconds + 7)
    assert cpu_seconds() - before >= 7


def test_the_loop_takes_processor_time():
    began = time.process_time()
    assert 0 < file_seconds.loop_seconds() <= time.process_time() - began


def test_budgets_are_those_of_files_that_exist():
    gone = [file for file in file_seconds.budgets() if not (file_seconds.ROOT / file).exists()]
    assert not gone, f"python -m tests.file_seconds leaves out {gone}"
