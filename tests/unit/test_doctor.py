"""The program `mcore-rl doctor`, from its command line to what it prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mcore_rl.cli import main
from mcore_rl.tools.doctor import machine
from mcore_rl.tools.doctor.examination import examine_machine
from mcore_rl.tools.doctor.finding import Finding, Report, Request, green
from mcore_rl.tools.doctor.installation import Device, Gpus
from tests.bad_input_cases import Case, tokens_of
from tests.bad_input_folder import make_good_folder
from tests.e2e.recipe import task_flags
from tests.megatron_sources import megatron_on_the_path

ROOT = Path(__file__).resolve().parents[2]
AREAS = (
    "versions patches flags checkpoint batches plan prompts reward ports shared_memory limits "
    "space network"
).split()

# Runs a command and reports what its process has loaded and started.
WATCHED = """
import json, sys
from mcore_rl.cli import main
code = main(sys.argv[1:])
import psutil, torch
print(json.dumps({
    "cuda": torch.cuda.is_initialized(),
    "distributed": torch.distributed.is_initialized(),
    "engine": "vllm.v1.engine.llm_engine" in sys.modules,
    "children": [child.pid for child in psutil.Process().children(recursive=True)],
}), file=sys.stderr)
sys.exit(code)
"""


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.timeout(600)
def test_main_job_has_no_red_and_leaves_nothing(warmed_checkpoint: Path, tmp_path: Path) -> None:
    mark = str(tmp_path)
    process = subprocess.run(
        [
            *(sys.executable, "-m", "mcore_rl.cli", "doctor", "--world-size", "4", "--"),
            *task_flags(warmed_checkpoint, tmp_path / "run"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MCORE_RL_TEST_MARK": mark},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    lines = [line.rstrip() for line in process.stdout.splitlines()]
    assert [line for line in lines if line and line[0].isalpha()] == [
        area.replace("_", " ") for area in AREAS
    ]
    assert re.fullmatch(r"\d+ ok, \d+ warn, 0 fail, in \d+\.\d s", lines[-1])
    text = " ".join(process.stdout.split())
    assert "the flags are valid for 4 ranks, by all checks of a start" in text
    assert "a step: 16 prompts x 8 samples = 128 sequences of up to 32 tokens" in text
    assert "arithmetic gives 1 to the prompts' own answers and 0 to others" in text
    assert "for 4 checkpoints of" in text and "4 ranks here need about" in text
    assert "\x1b" not in process.stdout and process.stderr == ""
    assert tree(tmp_path) == set(), "nothing is written"
    left = [p for p in psutil.process_iter() if _environment(p).get("MCORE_RL_TEST_MARK") == mark]
    assert left == [], "no process of it is left"


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Findings, facts of the process and exit code of a run with three faults of three kinds."""
    here = tmp_path_factory.mktemp("spoilt") / "case"
    make_good_folder(here)
    with (here / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "1+1="}\n')
    tokens = tokens_of(
        Case("", [], flags={"--tensor-model-parallel-size": "3"}, more="--rl-reward nowhere:fn"),
        here,
    )
    process = subprocess.run(
        [sys.executable, "-c", WATCHED, "doctor", "--json", "--world-size", "2", "--", *tokens],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MASTER_PORT": "65536"},
    )
    facts = json.loads(process.stderr.splitlines()[-1])
    return json.loads(process.stdout), facts, process.returncode


@pytest.mark.slow
def test_independent_mistakes_are_all_reported_with_exit_code_1(spoilt: tuple) -> None:
    found, _, code = spoilt
    reds = {each["area"]: each["found"] for each in found["findings"] if each["level"] == "red"}
    assert reds.keys() == {"flags", "prompts", "reward", "ports"}
    assert "--tensor-model-parallel-size 3" in reds["flags"]
    assert "lacks in line 17" in reds["prompts"]
    assert "nowhere:fn cannot be imported" in reds["reward"]
    assert reds["ports"] == "MASTER_PORT=65536 is not a port"
    assert found["counts"]["red"] == 4 and code == 1
    assert all(each["remedy"] for each in found["findings"] if each["level"] != "green")


@pytest.mark.slow  # ten seconds of imports, in a process of its own
def test_no_device_engine_or_process_is_taken(spoilt: tuple) -> None:
    _, facts, _ = spoilt
    assert facts == {"cuda": False, "distributed": False, "engine": False, "children": []}


@pytest.mark.slow
def test_unsupported_megatron_is_reported_and_the_machine_still_examined(tmp_path: Path) -> None:
    """Its import would end the process, as it ends a start."""
    metadata = tmp_path / "transformers-4.0.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")
    megatron_on_the_path(tmp_path, "0.20.0", changed=True)
    process = subprocess.run(
        [sys.executable, "-m", "mcore_rl.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert process.returncode == 1, process.stderr
    findings = json.loads(process.stdout)["findings"]
    reds = [each for each in findings if each["level"] == "red"]
    assert "packed_rope" in reds[0]["found"]
    assert "does not fit the code of megatron-core 0.20.0" in reds[0]["found"]
    assert "(drop the patch when: " in reds[0]["remedy"]
    assert reds[-1]["found"].endswith("are not examined: Megatron cannot be imported")
    yellows = [each["found"] for each in findings if each["level"] == "yellow"]
    assert any(
        found.startswith("transformers 4.0.0 is installed and vLLM requires") for found in yellows
    )
    assert {"ports", "shared memory", "limits", "space", "network"} < {e["area"] for e in findings}


def test_failing_check_is_red_and_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> Iterator[Finding]:
        yield green("ports", "found before")
        raise OSError(5, "no such\nregister")

    monkeypatch.setattr(machine, "check_ports", broken)
    report = Report()
    examine_machine(report, Request(), None, Gpus(), {})
    before, first, *others = report.findings
    assert (before.found, first.area, first.level) == ("found before", "ports", "red")
    assert "OSError: [Errno 5] no such register" in first.found
    assert {each.area for each in others} == {"shared memory", "limits", "space", "network"}


@pytest.mark.parametrize(
    ("visible", "environment", "level"),
    [
        (2, {}, "green"),
        (1, {}, "red"),  # of CUDA_VISIBLE_DEVICES, or of Slurm's cgroup
        (1, {"LOCAL_RANK": "0"}, "green"),  # in a task with one GPU, for engines of TP1
        (1, {"LOCAL_RANK": "1"}, "red"),
    ],
)
def test_visible_gpus_are_compared_with_the_ranks_of_a_machine(
    visible: int, environment: dict[str, str], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    report, device = Report(), Device("H100", 80 << 30, 0, (9, 0))
    examine_machine(report, Request(world_size=2), None, Gpus((device, device)), environment)
    assert report.findings[-1].level == level
    assert ("sees" if level == "green" else "LOCAL_RANK 1") in report.findings[-1].found


def test_without_a_world_size_the_visible_gpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    report, device = Report(), Device("H100", 80 << 30, 0, (9, 0))
    gpus = Gpus((device,) * 4, num_visible=2)
    examine_machine(report, Request(), None, gpus, {})
    assert report.findings[-1].found == "each process sees 2 GPUs, for 2 ranks"
    assert Gpus((device,)).num_ranks == 1


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (["--world-size", "0"], "--world-size: '0' must be a number greater than 0"),
        (["--world-size", "two"], "--world-size: 'two' must be a number greater than 0"),
        (
            ["--world-size", "2", "--jason", "--", "--lr", "1"],
            "--jason is not a flag of the doctor",
        ),
        (["--world-size", "2", "--", "--help"], "see -m mcore_rl.train --help"),
        (["--gpu", "h300x"], "--gpu h300x is not a known device; choose one of a100-40gb, a100, "),
        (["--gpu-memory-gb", "-1"], "--gpu-memory-gb: '-1' must be a number greater than 0"),
        (["--gpu-reserved-gb", "-1"], "--gpu-reserved-gb: '-1' must be a number of at least 0"),
    ],
)
def test_wrong_use_of_the_command_gets_one_sentence_and_exit_code_2(
    tokens: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *tokens]) == 2
    output = capsys.readouterr()
    assert re.fullmatch(r"mcore_rl: error: [^\n]+\n", output.err), output.err
    assert sentence in output.err and output.out == ""
