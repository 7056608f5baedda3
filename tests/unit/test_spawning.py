"""Processes that multiprocessing starts from scripts without `if __name__ == "__main__"`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.common.spawning import main_script_left_out
from mcore_rl.rewards.pool import check_functions
from tests.reward_specs import rewards_of

# Megatron's checkpoint writer starts a manager in another process, too.
LEFT_OUT = """
import multiprocessing, sys
from mcore_rl.common.spawning import main_script_left_out
print("a process runs the script")
with main_script_left_out(), main_script_left_out():
    queue = multiprocessing.get_context("spawn").Manager().Queue()
    queue.put(1)
    print("got", queue.get())
assert sys.modules["__main__"].__spec__ is None
"""
STARTED_AGAIN = """
import multiprocessing
import mcore_rl
if multiprocessing.current_process().name == "MainProcess":
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
mcore_rl.run(None)
"""
REWARDS = """
import mcore_rl
mcore_rl.initialize()
def length(prompt, response, answer):
    return len(response)
"""


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True)


def test_spawned_process_does_not_run_the_script_again(tmp_path):
    run = run_script(tmp_path, LEFT_OUT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["a process runs the script", "got 1"]


def test_process_that_imports_the_script_does_not_start_a_run(tmp_path):
    run = run_script(tmp_path, STARTED_AGAIN)
    assert run.returncode == 1
    assert "put what starts it below if __name__" in run.stderr


def test_reward_in_a_script_without_a_guard_is_refused(tmp_path, monkeypatch):
    (tmp_path / "fork_script.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="fork_script:length .*put what starts it below if"):
        check_functions(rewards_of("fork_script:length"))


def test_last_exit_restores_the_spec():
    spec = sys.modules["__main__"].__spec__
    first, second = main_script_left_out(), main_script_left_out()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.modules["__main__"].__spec__.name == "__main__"
    second.__exit__(None, None, None)
    assert sys.modules["__main__"].__spec__ is spec
