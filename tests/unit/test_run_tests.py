"""What scripts/run_tests.sh runs in each of its tiers, by programs that write down their names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rank_pool import ROOT

# Records its arguments, and fails for the command in FAILS.
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in *"$FAILS"*) exit 3;; esac
"""
CHECKS = ["setup", "ruff check .", "ruff format --check ."]
MYPY = "mypy "  # beside the others
LINES = "python scripts/count_lines.py"
QUICK = "tests/unit tests/dist/test_sharding_manager.py tests/e2e/test_fork.py"
WORKERS = (
    "--numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 20"
)


def run_tests(folder: Path, *arguments: str, fails: str = "nothing") -> tuple[int, str, list[str]]:
    """The exit code, the output, and the commands in the order of their calls."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "run_tests.sh", folder / "scripts")
    (folder / "scripts" / "setup_env.sh").write_text('echo setup >> "$CALLS"\n')
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("ruff", "mypy", "python"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    calls = folder / "calls"
    calls.touch()
    process = subprocess.run(
        ["bash", "scripts/run_tests.sh", *arguments],
        cwd=folder,
        env={"PATH": os.defpath, "CALLS": str(calls), "FAILS": fails},
        capture_output=True,
        text=True,
    )
    assert process.stderr == ""
    return process.returncode, process.stdout, calls.read_text().splitlines()


@pytest.mark.parametrize(
    ("arguments", "tests"),
    [
        ((), [f"python -m pytest {WORKERS} -m quick {QUICK}"]),
        # The program that stands for Python names no file of tests/cuda.
        (
            ("--touched",),
            ["python -m tests.tiers", f"python -m pytest {WORKERS} --tier touched", LINES],
        ),
        (("--all",), ["python -m tests.cuda.stack", f"python -m pytest {WORKERS}", LINES]),
        (
            ("tests/unit/test_plan.py", "-k", "a b"),
            ["python -m pytest tests/unit/test_plan.py -k a b"],
        ),
    ],
)
def test_each_tier_runs_its_commands(arguments, tests, tmp_path):
    code, output, calls = run_tests(tmp_path, *arguments)
    calls.remove(MYPY)
    assert (code, calls) == (0, [*CHECKS, *tests])
    took, last = output.splitlines()[-2:]
    assert re.fullmatch(r"== setup \d+ s, ruff check \d+ s, ruff format \d+ s, .*mypy \d+ s", took)
    assert last == "== ruff check, ruff format, mypy and pytest passed"


@pytest.mark.parametrize("check", ["ruff format", "mypy"])
def test_failed_check_is_named_and_the_others_run(check, tmp_path):
    code, output, calls = run_tests(tmp_path, "--all", fails=check)
    assert code == 1 and len(calls) == len([*CHECKS, MYPY, LINES]) + 2
    assert output.splitlines()[-1] == f"== failed: {check}"


def test_help_lists_the_tiers_and_runs_nothing(tmp_path):
    code, output, calls = run_tests(tmp_path, "--help")
    assert (code, calls) == (0, [])
    assert all(f"run_tests.sh {tier} " in output for tier in ("--touched", "--all"))


def test_quick_tests_are_collected_from_all_files_that_have_some():
    marked = {
        str(path.relative_to(ROOT))
        for folder in ("dist", "e2e", "cuda", "versions")
        for path in (ROOT / "tests" / folder).rglob("*.py")
        if "pytest.mark.quick" in path.read_text()
    }
    assert marked == set(QUICK.split()[1:])


def test_continuous_integration_runs_what_a_change_touches():
    assert "bash scripts/run_tests.sh --touched\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_quick_tests_include_a_transfer_and_a_run_but_no_slow_unit_test():
    """Collects a few files only, to be fast."""
    files = [
        *("tests/dist/test_sharding_manager.py", "tests/e2e/test_fork.py"),
        *("tests/unit/test_plan.py", "tests/unit/test_installing.py"),
    ]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "quick", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout
    collected = [line for line in process.stdout.splitlines() if "::" in line]
    assert "tests/e2e/test_fork.py::test_moe_of_a_fork_on_tp2_ep2" in collected
    bit_for_bit = "test_engine_stores_what_its_own_loader_stores"
    (transfer,) = [line for line in collected if bit_for_bit in line]
    assert transfer == f"tests/dist/test_sharding_manager.py::{bit_for_bit}[tp_and_ep_intact]"
    assert any(line.startswith("tests/unit/test_plan.py") for line in collected)
    assert not any("test_pip_install_adds" in line for line in collected)
