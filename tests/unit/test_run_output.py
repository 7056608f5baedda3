"""Standard output and standard error on a full disk, or without a reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import logging, os, sys
from mcore_rl.common.run_output import setup_logging
setup_logging()
logging.getLogger("mcore_rl").addHandler(logging.FileHandler(sys.argv[1]))
"""
SHOWS = """
from rich.console import Console
from mcore_rl.observe.progress import RunProgress
METRICS = {
    "reward/mean": 0.5,
    "throughput/rollout_tokens_per_second": 1.0,
    "time/step_seconds": 1.0,
    "time/reshard_to_rollout_seconds": 0.1,
    "time/reshard_to_train_seconds": 0.1,
}
progress = RunProgress(num_steps=3, first_step=0, enabled=True)
for step in range(3):
    progress.update(step, METRICS)
print("what a library prints " * 1000, flush=True)
os.write(1, b"what C code writes")
Console().print("what a user's file shows")
progress.close()
progress.show_summary({"reward/mean": {"first": 0.1}}, {"files": "x"})
logging.getLogger("mcore_rl").info("the run ends")
"""
MISTAKE = """
from mcore_rl.common.agreement import leave_with
from mcore_rl.common.errors import UsageError
leave_with(UsageError("must be 4", flag="--some-flag 3", remedy="change it"))
"""


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def reader_gone() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def run(program: str, log: Path, *, closed: str = "", **streams: int) -> int:
    command = [sys.executable, "-c", PRELUDE + program, str(log)]
    if closed:
        command = ["bash", "-c", f'exec "$@" {closed}', "bash", *command]
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.run(command, timeout=300, **{**nowhere, **streams}).returncode
    finally:
        for descriptor in streams.values():
            os.close(descriptor)


@pytest.mark.parametrize("broken", [full_disk, reader_gone])
@pytest.mark.parametrize(
    ("name", "called"), [("stdout", "standard output"), ("stderr", "standard error")]
)
def test_run_continues_and_reports_a_broken_stream_once(name, called, broken, tmp_path):
    log = tmp_path / "log"
    program = SHOWS if name == "stdout" else "print('x', file=sys.stderr, flush=True)\n" + SHOWS
    assert run(program, log, **{name: broken()}) == 0
    lines = log.read_text().splitlines()
    assert lines[-1] == "the run ends"
    assert [line for line in lines if "cannot be written" in line] == lines[:1]
    assert lines[0].startswith(called)


def test_run_continues_with_closed_streams(tmp_path):
    program = SHOWS + "open(sys.argv[1] + '.file', 'w').write('text')\n"
    assert run(program, tmp_path / "log", closed=">&- 2>&-") == 0
    # Printed text is not written into a file that was opened later.
    assert (tmp_path / "log.file").read_text() == "text"
    assert (tmp_path / "log").read_text() == "the run ends\n"


def test_characters_outside_the_encoding_are_escaped(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii:strict")
    output = (tmp_path / "output").open("wb")
    assert run(SHOWS, tmp_path / "log", stdout=os.dup(output.fileno())) == 0
    assert b"step 2 (3/3) \\xb7 reward" in (tmp_path / "output").read_bytes()
    assert (tmp_path / "log").read_text() == "the run ends\n"


@pytest.mark.parametrize("broken", [full_disk, reader_gone])
def test_mistake_keeps_its_exit_code_without_output(broken, tmp_path):
    assert run(MISTAKE, tmp_path / "log", stderr=broken(), stdout=broken()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("broken", [full_disk, reader_gone])
def test_launcher_keeps_the_exit_code_of_its_ranks_without_output(broken, tmp_path):
    (tmp_path / "rank.py").write_text(PRELUDE + "print('x' * 100000, flush=True)\nsys.exit(3)")
    command = [sys.executable, "-m", "mcore_rl.launch", "--nproc-per-node", "1"]
    command += [str(tmp_path / "rank.py"), str(tmp_path / "log")]
    output = broken()
    try:
        ran = subprocess.run(command, stdout=output, stderr=output, timeout=300)
    finally:
        os.close(output)
    assert ran.returncode == 3
