"""A folder belongs to one run at a time."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.observe import run_lock

HOLDS = """
import sys, time
from pathlib import Path
from mcore_rl.observe.run_lock import hold
hold(Path(sys.argv[1]), "--rl-run-dir")
print("held", flush=True)
time.sleep(300)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another run, which has the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with process:
        yield process
        process.kill()


def test_folder_is_refused_while_other_run_holds_it(
    other: subprocess.Popen[str], tmp_path: Path
) -> None:
    (tmp_path / "other_name").symlink_to(tmp_path / "run")
    for name in ("run", "other_name"):
        with pytest.raises(UsageError, match=f"process {other.pid} on ") as refused:
            run_lock.hold(tmp_path / name, "--save")
        assert refused.value.flag == f"--save {tmp_path / name}"
        assert "another folder" in refused.value.remedy
    other.kill()
    other.wait()
    run_lock.hold(tmp_path / "run", "--save")
    run_lock.hold(tmp_path / "other_name", "--rl-run-dir")  # its own is not another run's


def test_directories_made_at_same_time_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = [run_lock.make_directory("a b") for _ in range(20)]
    assert len(set(made)) == 20 and all(folder.is_dir() for folder in made)
    assert all(re.fullmatch(r"a b-\d{8}-\d{6}\.\d{3}", folder.name) for folder in made)


def test_directory_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    with pytest.raises(UsageError, match="--rl-run-name a: .*cannot be made.*; give --rl-run-dir"):
        run_lock.make_directory("a")
