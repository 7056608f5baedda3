"""The driver of scripts/gpu_trial.sh: selection, limits and reports of stages.

The stages here are small commands; the real ones run in tests/e2e/test_gpu_trial.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.cases import MOE
from mcore_rl.tools.plan.command_line import read_command_line
from scripts.gpu_trial import driver, tools
from scripts.gpu_trial.page import page
from scripts.gpu_trial.processes import run_limited
from scripts.gpu_trial.stages import MOST_SECONDS, NAMES, STAGES, Stage, missing
from scripts.make_tiny_deepseek import hf_config
from tests.processes import lives, wait_until_all_have_ended
from tests.rank_pool import ROOT

STAGE = {stage.name: stage for stage in STAGES}
FACTS: dict[str, Any] = {"missing": {}, "has_cuda": True, "devices": 8}
_SHARED = f"--rl-import {ROOT}/scripts/gpu_trial/shared_gpu.py"


def names(*tokens: str) -> list[str]:
    return [stage.name for stage in driver.read_options(tokens).stages]


def test_stages_run_in_order_of_table() -> None:
    assert names() == list(NAMES)
    assert names("--from", "switch") == list(NAMES[NAMES.index("switch") :])
    assert names("--only", "train", "doctor") == ["doctor", "train"]
    assert all(stage.limit_seconds <= MOST_SECONDS == 480 for stage in STAGES)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["--from", "nothing"], ["--from", "nothing", "environment"]),
        (["--from", "train", "--only", "doctor"], ["--from", "--only"]),
        (["--limit", "500"], ["--limit 500", "at most 480"]),
        (["--devices", "0"], ["--devices 0", "at least 1"]),
        (["--model", "/nowhere"], ["--model /nowhere", "config.json"]),
        (["--prompts", "/nowhere"], ["--prompts /nowhere"]),
        (["--unknown"], ["--unknown"]),
    ],
)
def test_invalid_arguments_exit_with_64(
    tokens: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        driver.main(tokens)
    assert left.value.code == driver.EXIT_USAGE
    message = capsys.readouterr().err
    assert message.startswith("gpu_trial: error: ") and message.count("\n") == 1
    assert all(word in message for word in words)


def test_stages_without_environment_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MCORE_RL_ENV", "/nowhere")
    assert driver.main(["--only", "doctor"]) == driver.EXIT_USAGE
    assert "MCORE_RL_ENV=DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "facts", "reason"),
    [
        ("two-pp", {}, None),
        ("two-pp", {"devices": 1}, "needs 2 GPUs; here: 1"),
        ("four-tp", {"devices": 2, "has_cuda": False}, "needs 4 processes"),
        ("four-ep-dp", {"has_cuda": False}, "needs CUDA: vLLM on CPU"),
        ("separate", {"has_cuda": False}, "needs CUDA: tests/e2e"),
        ("verify-graphs", {"has_cuda": False}, "needs CUDA: without graphs"),
        ("train", {"missing": {"vllm": "ImportError: libcuda"}}, "needs vllm, which cannot"),
        ("train", {"missing": {"megatron.training": "x"}}, "needs megatron.training"),
        ("gpu-tests", {"missing": {"vllm": "it is not installed"}}, None),
        ("doctor", {"missing": {"vllm": "it is not installed"}}, "needs vllm"),
    ],
)
def test_stage_that_cannot_run_names_requirement(
    stage: str, facts: dict[str, Any], reason: str | None
) -> None:
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


def run_in(folder: Path, command: list[str], **options: Any) -> dict[str, Any]:
    limits = {"environment": os.environ, "limit_seconds": 480, "grace_seconds": 0} | options
    return run_limited(command, cwd=folder, log=folder / "log", **limits)


def past_limit_once(path: Path) -> Callable[[], float]:
    """A clock that passes every limit once `path` exists."""
    return lambda: 1e6 if path.exists() else 0.0


def test_stage_at_limit_is_killed_with_its_processes(tmp_path: Path) -> None:
    started = tmp_path / "started"
    command = [sys.executable, "-c", STUBBORN, str(started)]
    found = run_in(tmp_path, command, now=past_limit_once(started))
    assert found["timed_out"]
    pids = [int(pid) for pid in started.read_text().split()]
    assert len(pids) == 2 and not any(map(lives, pids))
    why = driver.fault(STAGE["train"], found, "+ first\n+ python -m mcore_rl.train\n")
    assert why == "ended at its limit of 480 s during python -m mcore_rl.train"


def test_processes_that_outlive_stage_are_reported_and_ended(tmp_path: Path) -> None:
    # A process in exec has no environment to be found by.
    script = (
        "setsid sleep 100000 >/dev/null 2>&1 & echo $!; "
        "until grep -q ^sleep /proc/$!/cmdline; do :; done"
    )
    found = run_in(tmp_path, ["bash", "-c", script])
    assert found["exit_code"] == 0
    (pid,) = found["left_processes"]
    wait_until_all_have_ended([pid])
    memory = found["memory_bytes"]
    assert memory["highest"][0] >= memory["before"][0] > 0


SMALL = (
    Stage("environment", "the environment", "true"),
    Stage("doctor", "fails", "echo 'mcore_rl: error: --lr is odd'; run false"),
    Stage("train", "passes", "run echo 'step 1 | 2 of 3'", (r"^step \d.*",)),
    Stage("resume", "says too little", "echo nothing", (r"^step \d",)),
    Stage("verify-eager", "goes on after a failure", "failed=1; echo 'the last words'"),
    Stage("two-pp", "needs more", "true", num_devices=2),
)


def trial(folder: Path, monkeypatch: pytest.MonkeyPatch, *stages: Stage) -> int:
    monkeypatch.setattr(driver.Trial, "_read_facts", lambda self: {**FACTS, "devices": 1})
    options = driver.read_options(["--out", str(folder)])
    options.stages = stages
    return driver.Trial(options).run()


def test_failed_stage_does_not_stop_next_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCORE_RL_ENV", sys.prefix)
    assert trial(tmp_path, monkeypatch, *SMALL) == 3
    files = {f.name[3:-5]: json.loads(f.read_text()) for f in sorted(tmp_path.glob("*-*.json"))}
    assert {name: (file["status"], file.get("why")) for name, file in files.items()} == {
        "environment": ("passed", None),
        "doctor": ("failed", "ended with 1: mcore_rl: error: --lr is odd"),
        "train": ("passed", None),
        "resume": ("failed", r"its output has no line like ^step \d"),
        "verify-eager": ("failed", "ended with 1: the last words"),
        "two-pp": ("skipped", "needs 2 GPUs; here: 1"),
    }
    assert files["train"]["commands"] == ["echo step 1 | 2 of 3"]
    assert files["train"]["found"] == ["step 1 | 2 of 3"]
    assert (tmp_path / "04-doctor.log").read_text() == files["doctor"]["log_tail"]
    text = (tmp_path / "trial.md").read_text()
    for line in (
        "2 passed, 3 failed, 1 skipped, of 20 stages. Failed: doctor, verify-eager, resume.",
        "| doctor | **FAILED** |",
        "| switch | not run |",
        "Devices: 1 GPUs.",
        "\nthe last words\n",
    ):
        assert line in text, line
    whole = json.loads((tmp_path / "trial.json").read_text())
    assert [result["stage"] for result in whole] == list(NAMES)
    assert [r.get("status") for r in whole].count("failed") == 3
    # A later call for other stages keeps the results of this one.
    assert trial(tmp_path, monkeypatch, Stage("doctor", "passes now", "true")) == 0
    assert "3 passed, 2 failed, 1 skipped" in (tmp_path / "trial.md").read_text()


def test_line_that_explains_failure_is_found() -> None:
    ended = {"timed_out": False, "exit_code": 1}
    line = "[rank0]: torch.OutOfMemoryError: CUDA out of memory"
    for text, expected in (
        (f"[rank0]: Traceback\n{line}\nbye\n", f"ended with 1: {line}"),
        ("only this\n", "ended with 1: only this"),
        ("", "ended with 1"),
    ):
        assert driver.fault(STAGE["train"], ended, text) == expected


def test_page_without_results_is_readable() -> None:
    text = page([{"stage": "environment", "status": "failed", "shows": "a | b"}], {})
    assert "no GPU" in text and "a \\| b" in text


def test_commands_are_valid_shell() -> None:
    functions = (ROOT / "scripts" / "gpu_trial" / "commands.sh").read_text()
    for code in (functions, *(stage.command for stage in STAGES)):
        subprocess.run(["bash", "-n", "-c", code], check=True)
        for word in code.split():
            if word.startswith(("scripts/", "tests/", "benchmarks/")) and word.endswith(".py"):
                assert (ROOT / word).is_file(), word


@pytest.mark.parametrize(
    "stage", [s for s in STAGES if "-" in s.name and s.num_devices > 1], ids=lambda s: s.name
)
def test_layouts_of_several_devices_fit_the_models(stage: Stage, tmp_path: Path) -> None:
    """The stages two-... and four-...; without a GPU only `two-pp` runs."""
    sized = {**MOE.overrides, **tools.ON_GPU["moe"]}
    configs = {"tiny": hf_config("deepseek_v3"), "sized moe": hf_config(MOE.arch) | sized}
    jobs = re.findall(r'(?:verify|switch) ".*" "\$\((.*)\)" (\d) (.*)', stage.command)
    assert jobs
    for model, world_size, flags in jobs:
        (tmp_path / "config.json").write_text(json.dumps(configs[model]))
        given = ["--hf-config", str(tmp_path / "config.json"), "--world-size", world_size]
        for size in ("1", "4") if "$size" in flags else ("",):
            case = read_command_line([*given, *flags.replace("$size", size).split()]).case
            assert case.train.world_size == stage.num_devices


def test_processes_beyond_the_gpus_are_machines_that_share_one(tmp_path: Path) -> None:
    """A stand-in for Python prints what each of two processes gets."""
    (tmp_path / "python").write_text(
        '#!/bin/bash\n[[ $1 == -c ]] && echo 7 || echo "$NCCL_HOSTID $*"'
    )
    (tmp_path / "python").chmod(0o755)
    code = f". {driver.COMMANDS}\nPATH={tmp_path}:$PATH\nlaunch 2 mcore_rl.verify --lr 1"
    variables = {"OUT": "", "WORK": "", "HAS_CUDA": "1", "NUM_GPUS": "1"}
    said = subprocess.run(
        ["bash", "-c", code],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    first, *processes = said.splitlines()
    assert first == f"+ python -m mcore_rl.launch --nnodes 2 -m mcore_rl.verify --lr 1 {_SHARED}"
    assert sorted(processes) == [
        f"rank-{node} -m mcore_rl.launch --nnodes 2 --nproc-per-node 1 --node-rank {node} "
        f"--master-addr 127.0.0.1 --master-port 7 -m mcore_rl.verify --lr 1 {_SHARED}"
        for node in range(2)
    ]


FAULTS = """
from mcore_rl.job import preflight
from scripts import kill_test
preflight.check_vllm_version = lambda: None
def ending_of(ending: kill_test.Ending, kill: kill_test.Kill) -> list[str]:
    return kill_test.faults_of_kill(ending, kill)
"""


@pytest.mark.slow
def test_type_checker_finds_missing_names_and_arguments(tmp_path: Path) -> None:
    """Faults of this kind ended stages of the trial that no CPU had run."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert {"scripts", "tests/gpu", "tests/cuda"} <= set(settings["files"])
    (tmp_path / "faults.py").write_text(FAULTS)
    command = [sys.executable, "-m", "mypy", str(tmp_path / "faults.py")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert '"check_vllm_version"' in said and 'argument "folder" in call to' in said, said


def test_ratios_of_switch_are_medians_of_slowest_rank(tmp_path: Path) -> None:
    line = {
        **dict(resident_bytes=100, received_bytes=5, seconds=2.0, reload_seconds=1.0),
        **dict(copy_bytes_per_second=100.0),
    }
    slow = {**line, "seconds": 4.0}
    first = {**line, "seconds": 1000.0}  # connects and compiles
    for rank, lines in enumerate(([first, line, line, line], [first, slow, slow, line])):
        (tmp_path / f"{rank}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    command = [sys.executable, "benchmarks/switch_parts.py", str(tmp_path)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ", seconds 4, reload_seconds 1, " in printed
    assert ", copy_over_switch 0.25, copy_over_reload 1\n" in printed


def test_verification_fails_for_other_weights_or_distant_log_probs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = dict(stored_equal=True, mean_abs_difference=0.01, max_abs_difference=0.5)
    good |= dict(received_bytes_max=10, differing=[])
    for change, wrong in (
        ({}, None),
        ({"mean_abs_difference": 0.2}, "log-probs"),
        ({"stored_equal": False, "differing": ["rank 0: w"]}, "rank 0: w"),
    ):
        (tmp_path / "found").write_text(json.dumps({**good, **change}))
        fault = tools.verified("tiny", str(tmp_path / "found"))
        assert fault is None if wrong is None else wrong in str(fault)
    assert capsys.readouterr().out.count("verified tiny: ") == 3


def test_metrics_of_two_runs_may_differ_in_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]

    def write(run: Path, **metrics: float) -> None:
        run.mkdir(exist_ok=True)
        (run / "metrics.jsonl").write_text(json.dumps({"step": 0, **metrics}) + "\n")

    write(runs[0], loss=1.0, **{"time/step_seconds": 1.0})
    write(runs[1], loss=1.0, **{"time/step_seconds": 2.0})
    assert tools.metrics(*map(str, runs)) is None
    assert "metrics equal" in capsys.readouterr().out
    write(runs[1], loss=1.5)
    assert "loss" in str(tools.metrics(*map(str, runs)))


@pytest.mark.slow
def test_compiled_modules_that_do_not_load_are_named(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    for name in ("_C_stable_libtorch", "for_another_card"):
        (tmp_path / "vllm" / f"{name}.abi3.so").write_text("not compiled")

    def libraries() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "scripts/gpu_trial/tools.py", "libraries"]
        path = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True)

    done = libraries()
    assert (done.returncode, done.stdout.count(" does not load: ")) == (1, 2), done
    assert "cannot run without _C_stable_libtorch\n" in done.stdout
    (tmp_path / "vllm" / "_C_stable_libtorch.abi3.so").unlink()
    assert libraries().returncode == 0


ENVIRONMENT = f'. "{driver.COMMANDS}"\n'
VARIABLES = {"HAS_CUDA": "0", "MODEL": "", "PROMPTS": ""}


def test_named_environment_is_used(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    taken = tmp_path / "bin" / "python"
    taken.write_text("#!/bin/sh\nexit 0\n")  # finds every module
    taken.chmod(0o755)
    for named, expected in ((tmp_path, taken), (taken, taken), (tmp_path / "no", "")):
        done = subprocess.run(
            ["bash", "-c", ENVIRONMENT + 'echo "$BASE"; command -v python'],
            cwd=ROOT,
            env={**os.environ, **VARIABLES, "MCORE_RL_ENV": str(named)},
            capture_output=True,
            text=True,
        )
        first, python = done.stdout.split("\n")[:2]
        assert first == str(expected)
        assert (python == str(taken)) is bool(expected)


def test_installation_outlives_stage_at_limit(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    setup = tmp_path / "scripts" / "setup_env.sh"
    variables = {**VARIABLES, "OUT": str(tmp_path), "PATH": "/usr/bin:/bin", "VIRTUAL_ENV": ""}
    find_nothing = "find_base() { BASE=; }\nBASE=\n"

    def stage(now: Callable[[], float]) -> dict[str, Any]:
        command = ["bash", "-c", f"{ENVIRONMENT}{find_nothing}environment"]
        return run_in(tmp_path, command, environment={**os.environ, **variables}, now=now)

    pid_file = tmp_path / "pid"
    setup.write_text(f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 100000\n")
    found = stage(past_limit_once(pid_file))
    assert found["timed_out"]
    process = psutil.Process(int(pid_file.read_text()))
    try:
        assert lives(process)
        assert "start the trial again" in (tmp_path / "log").read_text()
    finally:
        for each in [process, *process.children()]:
            each.kill()
    setup.write_text("echo no disk; exit 1\n")
    assert stage(lambda: 0.0)["exit_code"] == 1
    assert "no disk" in (tmp_path / "log").read_text()


def test_list_prints_stages_as_documented() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_trial.sh"), "--list"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert [row.split("`")[1] for row in rows[2:]] == list(NAMES)
    documented = (ROOT / "docs" / "using" / "gpu.md").read_text()
    assert done.stdout in documented, f"the table there must be\n{done.stdout}"
