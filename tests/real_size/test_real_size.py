"""Models of real sizes on one machine: a step, saving, resuming bit for bit, export, verify.

`bash scripts/run_tests.sh -m real_size tests/real_size`; each case takes about 20 GB of host memory
and many minutes, so that nothing else may run beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_size import (
    CASES,
    ENVIRONMENT,
    ROOT,
    Measured,
    RealSize,
    exported,
    flags_of,
    make_checkpoint,
    planned_bytes,
    rows,
    run,
)

pytestmark = [pytest.mark.slow, pytest.mark.real_size, pytest.mark.timeout(7200)]
NAMES = ["dense", "moe"]


@dataclass(frozen=True)
class Ran:
    """A run of two steps, and one that resumed after the first of them."""

    case: RealSize
    checkpoint: Path
    first: Path
    resumed: Path
    measured: dict[str, Measured]
    planned: dict[str, dict[str, int]]


@pytest.fixture(scope="module", params=NAMES)
def ran(request: Any, tmp_path_factory: Any) -> Ran:
    if "real_size" not in request.config.option.markexpr:
        pytest.skip("takes 20 GB and many minutes: asked for by -m real_size")
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    checkpoint = make_checkpoint(case, folder / "checkpoint")
    first, resumed = folder / "first", folder / "resumed"
    load = ["--load", str(first / "checkpoints"), "--ckpt-step", "1"]
    measured, planned, lines = {}, {}, []
    for name, run_dir, more in (("first", first, []), ("resumed", resumed, load)):
        flags = [*flags_of(case, checkpoint, run_dir), *more]
        measured[name] = run(case, flags, folder / "phases.jsonl")
        planned[name] = planned_bytes(case, flags)
        lines += rows(f"{request.param}, {name}", measured[name], planned[name])
    table = ROOT / "build" / f"real_size_{request.param}.md"
    table.parent.mkdir(exist_ok=True)
    table.write_text("\n".join(lines) + "\n")
    return Ran(case, checkpoint, first, resumed, measured, planned)


def test_a_resumed_run_exports_the_same_weights(ran: Ran) -> None:
    assert exported(ran.first) == exported(ran.resumed) != {}


def test_the_hand_over_is_proven(ran: Ran, tmp_path: Path) -> None:
    out = tmp_path / "verified.json"
    command = [sys.executable, "-m", "mcore_rl.launch", "--nproc-per-node", str(ran.case.num_ranks)]
    command += ["-m", "mcore_rl.verify", *flags_of(ran.case, ran.checkpoint, tmp_path / "unused")]
    subprocess.run(
        [*command, "--rl-verify-out", str(out)],
        env={**os.environ, **ENVIRONMENT},
        cwd=ROOT,
        check=True,
    )
    found = json.loads(out.read_text())
    assert found["stored_equal"] is True and found["differing"] == []


@pytest.mark.parametrize("name", ["first", "resumed"])
def test_memory_is_as_planned_in_every_phase(name: str, ran: Ran) -> None:
    measured, planned = ran.measured[name].peak_bytes, ran.planned[name]
    assert measured.keys() & planned.keys() >= {"start", "train", "save", "export"}
    for phase in measured.keys() & planned.keys():
        assert planned[phase] == pytest.approx(measured[phase], rel=0.1), phase
