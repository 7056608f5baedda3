"""Programs in forks of the process that has imported everything, beside those of a new Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import wait_until_all_have_ended
from tests.rank_pool import RankPool
from tests.warm_python import obstacle

PROGRAM = """
import os, sys
assert ("torch" in sys.modules) == bool(os.environ["FORKED"])
print(sys.argv, sys.orig_argv[1:], os.getcwd(), os.environ["GIVEN"], sys.stdin.read(), __name__)
print(f"mine {__import__('mine').WHERE}", file=sys.stderr)
sys.exit({end})
"""
ENDS = {"3": "3", "none": "None", "text": "'a sentence'", "signal": "os.kill(os.getpid(), 15)"}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_a_fork_does_and_says_what_a_new_python_does(
    how: str, end: str, warm_python: Path, tmp_path: Path
) -> None:
    text = PROGRAM.replace("{end}", ENDS[end])
    (tmp_path / "program.py").write_text(text)
    (tmp_path / "mine.py").write_text("WHERE = __file__")
    how_given = {"-c": ["-c", text], "-m": ["-m", "program"], "script": ["program.py"]}

    def run(python: str | Path) -> tuple[int, str, str]:
        given = {"GIVEN": "a value", "FORKED": "" if python == sys.executable else "1"}
        done = subprocess.run(
            [python, *how_given[how], "--flag", "two words"],
            cwd=tmp_path,
            env={**os.environ, **given},
            input="typed",
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    assert run(warm_python) == run(sys.executable)


def test_signals_reach_the_fork_and_a_killed_caller_ends_it(warm_python: Path) -> None:
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('stopped', flush=True))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen([warm_python, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopped\n"
    process.kill()
    process.wait()
    wait_until_all_have_ended([pid])


OBSTACLES: dict[str, Callable[[Path], tuple[list[str], dict[str, str], str]]] = {
    "a variable read early": lambda _: (["-c", ""], {"VLLM_LOGGING_LEVEL": "DEBUG"}, "VLLM_LOGG"),
    "an option": lambda _: (["-X", "importtime", "-c", ""], {}, "-X"),
    "another package": lambda folder: (["-c", ""], {"PYTHONPATH": str(folder)}, "torch in "),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_a_new_python_runs_what_a_fork_would_run_in_another_way(
    case: str, ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").touch()
    arguments, variables, why = OBSTACLES[case](tmp_path)
    before = len(ranks.python.refused())
    done = subprocess.run(
        [ranks.python.program, *arguments], env={**os.environ, **variables}, cwd=tmp_path.parent
    )
    (reason,) = ranks.python.refused()[before:]
    assert done.returncode == 0 and why in reason


def test_modules_of_the_programs_own_folder_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "program.py").touch()
    request = {"arguments": ["-u", "program.py"], "environment": {}, "folder": str(tmp_path)}
    assert obstacle(request, {}, {}) == ""
    (tmp_path / "pytest").mkdir()
    assert "pytest" in obstacle(request, {}, {})


def test_variables_that_imports_have_set_are_no_obstacle(tmp_path: Path) -> None:
    request = {"arguments": ["-c", ""], "environment": {"VLLM_A": "1"}, "folder": str(tmp_path)}
    assert obstacle(request, {}, {"VLLM_A": "1"}) == obstacle(request, {"VLLM_A": "1"}, {}) == ""
    assert "VLLM_A" in obstacle(request, {}, {"VLLM_A": "2"})
