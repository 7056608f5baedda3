"""The driver of scripts/gpu_trial.sh: which stages run, how they end, what is left to read.

The stages here are small commands; the real ones run in tests/e2e/test_gpu_trial.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.gpu_trial import driver, environments
from scripts.gpu_trial.desk import Desk, Done, Failed, Skipped
from scripts.gpu_trial.measurements import switch_row
from scripts.gpu_trial.page import page
from scripts.gpu_trial.processes import MARK, Memory, memory_reader
from scripts.gpu_trial.stages import FUNCTIONS, _outcome
from scripts.gpu_trial.table import ENVIRONMENT, MOST_SECONDS, NAMES, STAGES, missing
from tests.rank_pool import ROOT

STAGE = {stage.name: stage for stage in STAGES}
PACKAGES = {name: {"imports": True} for stage in STAGES for name in stage.packages}
FACTS: dict[str, Any] = {
    "python": sys.executable,
    "packages": PACKAGES,
    "has_cuda": True,
    "devices": 8,
    "versions": {"torch": "2.0", "cuda of torch": None},
    "gpus": [{"name": "GPU", "bytes": 80 << 30, "capability": "9.0", "multiprocessors": 132}],
}


def options(*tokens: str) -> Any:
    return driver.make_parser().parse_args(list(tokens))


def names(*tokens: str) -> list[str]:
    return [stage.name for stage in driver.chosen(options(*tokens))]


def test_stages_begin_where_they_are_told_to() -> None:
    assert names() == list(NAMES)
    assert names("--from", "switch") == list(NAMES[NAMES.index("switch") :])
    # In the order of the table, whatever that of the arguments is.
    assert names("--only", "train", "doctor") == ["doctor", "train"]
    assert set(FUNCTIONS) == set(NAMES) - {ENVIRONMENT}
    assert all(stage.limit_seconds <= MOST_SECONDS == 480 for stage in STAGES)


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (["--from", "nothing"], "nothing is not a stage; choose among environment, doctor"),
        (["--from", "train", "--only", "doctor"], "--from and --only exclude each other"),
        (["--limit", "500"], "--limit 500 must be above 0 and at most 480"),
        (["--devices", "0"], "--devices 0 must be at least 1"),
        (["--model", "/nowhere"], "--model /nowhere has no config.json"),
        (["--prompts", "/nowhere"], "--prompts /nowhere is not a file"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    tokens: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = driver.main(tokens)
    except SystemExit as leave:  # argparse's own
        code = leave.code
    assert code == driver.EXIT_USAGE
    said = capsys.readouterr().err
    assert said.startswith("gpu_trial: error: ") and sentence in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("stage", "facts", "reason"),
    [
        ("two-pp", {}, None),
        ("two-pp", {"devices": 1}, "needs 2 GPUs; here: 1"),
        ("four-tp", {"devices": 2, "has_cuda": False}, "needs 4 processes"),
        ("four-ep-dp", {"has_cuda": False}, "needs CUDA: vLLM on CPU"),
        (
            "train",
            {"packages": {**PACKAGES, "vllm": {"imports": False, "error": "ImportError: libcuda"}}},
            "needs vllm, which cannot be imported: ImportError: libcuda",
        ),
        ("train", {"packages": {"torch": {"imports": True}}}, "needs megatron.training"),
        ("gpu-tests", {"packages": {**PACKAGES, "vllm": {"imports": False}}}, None),
        ("doctor", {"python": None}, "no Python with torch and Megatron was found"),
    ],
)
def test_what_a_stage_lacks_is_said(stage: str, facts: dict[str, Any], reason: str | None) -> None:
    found = missing(STAGE[stage], {**FACTS, **facts})
    assert found is None if reason is None else str(found).startswith(reason)


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "100000"], start_new_session=True)
with open(sys.argv[1] + ".partial", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.replace(sys.argv[1] + ".partial", sys.argv[1])
time.sleep(100000)
"""


def test_a_stage_at_its_limit_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    memory = Memory(lambda: [7])
    found = driver.run_stage(
        STAGE["train"],
        [sys.executable, "-c", STUBBORN, str(started)],
        log=tmp_path / "log",
        environment=dict(os.environ),
        limit_seconds=480,
        memory=memory,
        grace_seconds=0,
        # A clock that strikes once everything is there, and not before.
        now=lambda: 1e6 if started.exists() else 0.0,
    )
    assert found["timed_out"] and found["status"] == driver.FAILED
    pids = [int(pid) for pid in started.read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_what_a_stage_leaves_behind_is_told_and_ended(tmp_path: Path) -> None:
    leaves = (
        "import subprocess as s\nprint(s.Popen(['sleep', '100000'], start_new_session=True).pid)\n"
    )
    found = driver.run_stage(
        STAGE["train"],
        [sys.executable, "-c", leaves],
        log=tmp_path / "log",
        environment=dict(os.environ),
        limit_seconds=480,
        memory=Memory(memory_reader()),
        grace_seconds=0,
    )
    pid = int((tmp_path / "log").read_text())
    assert (found["status"], found["left_processes"]) == (driver.PASSED, [pid])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert found["memory"]["highest_bytes"][0] >= found["memory"]["before_bytes"][0] > 0


class Small(driver.Trial):
    """Stages that only write what they are told to."""

    told: dict[str, tuple[int, dict[str, Any]]] = {}

    def _probed(self) -> driver.Json:
        return {**FACTS, "devices": 1}

    def _command(self, stage: driver.Stage, result_file: Path) -> list[str]:
        code, told = self.told[stage.name]
        text = f"import sys; open({str(result_file)!r}, 'w').write({json.dumps(told)!r}); "
        return [sys.executable, "-c", text + f"print('the last words'); sys.exit({code})"]


def test_a_failure_stops_nothing_and_all_is_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Small.told = {
        "doctor": (1, {"error": "something is wrong", "figures": {"a | b": 0.123456}}),
        "train": (0, {"figures": {"steps": [{"step": 1, "x | y": 2.0}, {"step": 2}]}}),
        "resume": (0, {"skipped": "nothing to see"}),
        "switch": (3, {}),
    }
    asked = options("--only", *Small.told, "two-pp", "--out", str(tmp_path))
    assert Small(asked, driver.chosen(asked)).run() == 2
    files = {file.name: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert {name: file["status"] for name, file in files.items()} == {
        "02-doctor.json": "failed",
        "07-train.json": "passed",
        "08-resume.json": "skipped",
        "09-switch.json": "failed",
        "12-two-pp.json": "skipped",
    }
    assert files["02-doctor.json"]["why"] == "something is wrong"
    assert files["02-doctor.json"]["log_tail"] == "the last words\n"
    assert files["09-switch.json"]["why"] == "ended with 3: the last words"
    assert files["12-two-pp.json"]["why"] == "needs 2 GPUs; here: 1"
    text = (tmp_path / "trial.md").read_text()
    for line in (
        "1 passed, 2 failed, 2 skipped, of 15 stages. Failed: doctor, switch.",
        "| doctor | **FAILED** |",
        "| nothing to see |",
        "| environment | not run |",
        "| step | x \\| y |",
        "| 2 | - |",
        "the last words",
        "80 GiB, capability 9.0",
    ):
        assert line in text, line
    # A later call for other stages keeps what this one has found.
    Small.told = {"doctor": (0, {})}
    asked = options("--only", "doctor", "--out", str(tmp_path))
    assert Small(asked, driver.chosen(asked)).run() == 0
    assert "2 passed, 1 failed, 2 skipped" in (tmp_path / "trial.md").read_text()
    assert "the page is" in capsys.readouterr().out


def test_the_limit_names_the_command_that_ran() -> None:
    outcome = {"timed_out": True, "limit_seconds": 480, "exit_code": -9}
    assert driver._why(outcome, {"running": "train, MoE"}, "") == (
        "ended at its limit of 480 s during train, MoE"
    )


def desk(folder: Path, **order: Any) -> Desk:
    return Desk(
        {
            **dict(stage="train", work=str(folder), result=str(folder / "result"), devices=1),
            **dict(has_cuda=True, packages={}, model=None, prompts=None),
            **order,
        }
    )


def test_a_stage_tells_what_it_ran_and_why_it_failed(tmp_path: Path) -> None:
    def fails(at: Desk) -> None:
        at.figures["before"] = 1
        code = "print('mcore_rl: error: --lr is odd'); print('ValueError: no'); raise SystemExit(2)"
        at.run("odd", [sys.executable, "-c", code])

    def has_nothing(at: Desk) -> None:
        raise Skipped("nothing here")

    def says(at: Desk) -> None:
        raise Failed("so", "and this")

    assert desk(tmp_path).at_work(fails) == 1
    told = json.loads((tmp_path / "result").read_text())
    assert told["error"] == "odd: mcore_rl: error: --lr is odd"
    assert told["figures"] == {"before": 1}
    (command,) = told["commands"]
    assert (command["label"], command["exit_code"]) == ("odd", 2)
    assert desk(tmp_path).at_work(has_nothing) == 0
    assert json.loads((tmp_path / "result").read_text())["skipped"] == "nothing here"
    assert desk(tmp_path).at_work(says) == 1
    assert json.loads((tmp_path / "result").read_text())["error_text"] == "and this"


def test_the_line_that_tells_most_is_found() -> None:
    line = "[rank0]: torch.OutOfMemoryError: CUDA out of memory"
    assert Done(1, f"[rank0]: Traceback\n{line}\nbye\n", 0.0).last_error() == line
    assert Done(3, "", 0.0).last_error() == "ended with 3"
    assert Done(3, "only this\n", 0.0).last_error() == "only this"


def test_ratios_are_medians_of_the_slowest_rank(tmp_path: Path) -> None:
    line = {
        **dict(resident_bytes=100, received_bytes=5, peak_extra_bytes=1, seconds=2.0),
        **dict(reload_seconds=1.0, wake_weights_seconds=0.1, wake_kv_cache_seconds=0.1),
        **dict(sleep_seconds=0.1, copy_bytes_per_second=100.0),
    }
    slow = {**line, "seconds": 4.0}
    first = {**line, "seconds": 1000.0}  # connects and compiles
    for rank, lines in enumerate(([first, line, line, line], [first, slow, slow, line])):
        (tmp_path / f"{rank}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    row = switch_row(tmp_path)
    assert (row["switch s"], row["of it reload s"]) == (4.0, 1.0)
    assert row["W' / switch / copy"] == 100 / 4.0 / 100
    assert row["W' / reload / copy"] == 1.0


def test_outcomes_of_tests_are_read() -> None:
    text = "<testcase classname='tests.gpu.test_a' name='b' time='1.5'>{}</testcase>"
    for inside, outcome, why in (
        ("", "passed", ""),
        ("<skipped message='needs CUDA'/>", "skipped", "needs CUDA"),
        ("<failure message='assert'/>", "failed", "assert"),
    ):
        found = _outcome(ElementTree.fromstring(text.format(inside)))
        assert found == {"test": "test_a::b", "outcome": outcome, "s": 1.5, "why": why}


def test_an_installation_outlives_the_stage_that_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripts").mkdir()
    setup = tmp_path / "scripts" / "setup_env.sh"
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setenv(MARK, "of this stage")
    setup.write_text("sleep 100000\n")
    sentence = environments.set_up(tmp_path, 0)
    assert sentence is not None and "goes on by itself" in sentence
    pid = int(sentence.partition("process ")[2].partition(",")[0])
    try:
        assert MARK not in psutil.Process(pid).environ()
        assert os.getpgid(pid) == pid  # not of the group that a limit ends
    finally:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    setup.write_text("echo no disk; exit 1\n")
    assert environments.set_up(tmp_path, 60) == "scripts/setup_env.sh ended with 1: no disk"
    setup.write_text("exit 0\n")
    assert environments.set_up(tmp_path, 60) is None


def test_the_environment_that_is_named_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environments.NAMED, str(tmp_path))
    assert environments.base() is None
    (tmp_path / "bin").mkdir()
    taken = tmp_path / "bin" / "python"
    taken.write_text("#!/bin/sh\nexit 0\n")  # finds whatever it is asked for
    taken.chmod(0o755)
    assert environments.base() == environments.find() == str(taken)
    assert environments.variables(str(taken))["PATH"].startswith(f"{taken.parent}:")


def test_the_command_lists_its_stages() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_trial.sh"), "--list"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[::2]] == list(NAMES)


def test_a_page_without_an_environment_can_be_read() -> None:
    text = page([{"stage": ENVIRONMENT, "status": "failed", "shows": "x", "seconds": 1.0}], {})
    assert "No environment." in text
