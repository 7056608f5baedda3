"""scripts/setup_env.sh, run for real in a copy of what it reads, with failures put in its way.

PATH holds nothing but the programs the script needs and what a test adds, so no other Python, disk
or driver of this machine takes part. The installation itself is not repeated here: the environment
these tests run in is its result.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ("scripts/requirements-cpu.txt", "scripts/requirements-cuda.txt")
ENGINE_REQUIREMENTS = "scripts/requirements-te.txt"
PROGRAMS = """awk basename bash cut date df dirname flock grep mkdir mv rm sed sha256sum sleep tac
tail timeout uname""".split()
PYTHON_NAMES = ("python3.11", "python3.12", "python3", "python")


@dataclass(frozen=True)
class Checkout:
    """A copy of the checkout, and the directory that is PATH in it."""

    path: Path
    programs: Path

    @property
    def venv(self) -> Path:
        return self.path / ".venv"

    def program(self, name: str, script: str) -> None:
        """Puts a shell script in PATH, in place of what has this name."""
        file = self.programs / name
        file.unlink(missing_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def python(self, name: str, before: str = "pass", making_venv: str = "") -> None:
        """Puts this Python in PATH: `before` runs first in `-c`, `making_venv` in place of `-m`."""
        instead = f'if [ "$1" = -m ]; then {making_venv}; fi\n' if making_venv else ""
        self.program(
            name,
            f'if [ "$1" = -c ]; then code=$2; set -- -c "{before}\n$code"; fi\n'
            f'{instead}exec "{sys.executable}" "$@"',
        )

    def little_disk(self) -> None:
        self.program("df", "echo Filesystem; echo '/dev/full 99 98 1024 99% /'")

    def make_complete_venv(self) -> None:
        """A `.venv` that the script takes for its own work, with a file to know it by."""
        (self.venv / "bin").mkdir(parents=True)
        (self.venv / "bin" / "python").symlink_to(sys.executable)
        (self.venv / "kept").touch()
        sha = {
            name: hashlib.sha256((self.path / name).read_bytes()).hexdigest()
            for name in (*REQUIREMENTS, "setup.py")
        }
        (self.venv / "mcore_rl_stamp").write_text(
            f"stack=cpu requirements={sha[REQUIREMENTS[0]]} root={self.path}\n"
            f"package={sha['setup.py']}\n"
        )

    def outdate(self) -> None:
        with (self.path / REQUIREMENTS[0]).open("a") as file:
            file.write("# another day\n")

    def start(self, **environment: str) -> subprocess.Popen[str]:
        """The script, on the CPU stack and with an index that refuses connections."""
        defaults = {
            "PATH": str(self.programs),
            "HOME": str(self.path),
            "MCORE_RL_STACK": "cpu",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "UV_HTTP_RETRIES": "0",
        }
        return subprocess.Popen(
            [shutil.which("bash") or "bash", "scripts/setup_env.sh"],
            cwd=self.path,
            env=defaults | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fails(self, exit_code: int, **environment: str) -> str:
        """Runs it to its end, and returns the one sentence it must leave on stderr."""
        process = self.start(**environment)
        return self.sentence(process, exit_code)

    def sentence(self, process: subprocess.Popen[str], exit_code: int) -> str:
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == exit_code, stdout + stderr
        sentences = [line for line in stderr.splitlines() if not line.startswith("  | ")]
        assert len(sentences) == 1, stderr
        assert re.fullmatch(r"setup_env: .*\.", sentences[0]), stderr
        assert stderr.rstrip().endswith(sentences[0]), stderr
        return sentences[0]

    def environments(self) -> list[str]:
        return sorted(path.name for path in self.path.glob(".venv*"))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited for 30 s"
        time.sleep(0.05)


def has_ended(pid: str) -> bool:
    try:
        return "State:\tZ" in (Path("/proc") / pid / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "checkout", tmp_path / "programs")
    shutil.copytree(ROOT / "scripts" / "setup_env", made.path / "scripts" / "setup_env")
    for name in ("scripts/setup_env.sh", "setup.py", *REQUIREMENTS, ENGINE_REQUIREMENTS):
        shutil.copy(ROOT / name, made.path / name)
    made.programs.mkdir()
    for name in PROGRAMS:
        found = shutil.which(name)
        assert found, f"{name} is not in PATH"
        (made.programs / name).symlink_to(found)
    made.python("python3")
    return made


@pytest.fixture(params=["uv", "requirements-cpu.txt"])
def installing(request: pytest.FixtureRequest, checkout: Checkout) -> str:
    """What is installed first: pip fetches uv, or uv is in PATH and installs the pins."""
    if request.param != "uv":
        (checkout.programs / "uv").symlink_to(Path(sys.executable).with_name("uv"))
    return str(request.param)


def test_python_is_refused_when_too_old(checkout: Checkout) -> None:
    for name in PYTHON_NAMES:
        checkout.python(name, "import sys; sys.version_info = (3, 9, 18, 'final', 0)")
    sentence = checkout.fails(2)
    assert "Python 3.11 or 3.12 is needed" in sentence and "(3.9)" in sentence
    assert checkout.environments() == []


def test_python_is_refused_when_none_is_there_or_runs(checkout: Checkout) -> None:
    checkout.program("python3", "exit 127")
    assert "python3 (does not run)" in checkout.fails(2)
    (checkout.programs / "python3").unlink()
    assert "PATH has no Python" in checkout.fails(2)
    assert "MCORE_RL_PYTHON has /no/python (not found)" in checkout.fails(
        2, MCORE_RL_PYTHON="/no/python"
    )


def test_python_is_refused_when_it_cannot_make_environments(checkout: Checkout) -> None:
    checkout.python("python3", "import sys; sys.modules['ensurepip'] = None")
    sentence = checkout.fails(1)
    assert "lacks the modules venv and ensurepip" in sentence
    assert f"python3.{sys.version_info.minor}-venv" in sentence
    assert checkout.environments() == []


def test_disk_is_refused_when_too_small(checkout: Checkout) -> None:
    checkout.program("python3.11", "exit 127")  # a shim, behind which python3 is found
    checkout.little_disk()
    sentence = checkout.fails(1)
    assert "1 MiB free" in sentence and "the cpu stack needs 6 GiB" in sentence
    assert checkout.environments() == []


def test_stack_is_refused_when_unknown(checkout: Checkout) -> None:
    assert 'MCORE_RL_STACK is "tpu"' in checkout.fails(2, MCORE_RL_STACK="tpu")


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_cuda_stack_is_built_beside_the_environment_of_a_machine_without_a_gpu(
    checkout: Checkout,
) -> None:
    checkout.make_complete_venv()
    process = checkout.start(MCORE_RL_STACK="cuda")  # refused by the index
    stdout = process.communicate(timeout=60)[0]
    assert "building .venv-cuda for the cuda stack" in stdout
    assert checkout.environments() == [".venv"] and (checkout.venv / "kept").exists()


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
@pytest.mark.parametrize(("exit_code", "needs"), [(0, "cuda stack needs 16"), (9, "cpu stack")])
def test_stack_is_cuda_where_the_driver_answers(
    exit_code: int, needs: str, checkout: Checkout
) -> None:
    checkout.little_disk()
    checkout.program("nvidia-smi", f"echo 'GPU 0, or an error'; exit {exit_code}")
    assert needs in checkout.fails(1, MCORE_RL_STACK="")


@pytest.mark.parametrize("unreachable", [True, False])
def test_failed_installation_is_explained_and_leaves_the_previous_environment(
    unreachable: bool, installing: str, checkout: Checkout
) -> None:
    checkout.make_complete_venv()
    (checkout.path / REQUIREMENTS[0]).write_text("torch==2.9\nuv==0.13.9\nmegatron-core==0.1\n")
    if unreachable:
        assert f"index cannot be reached to install {installing}: check the" in checkout.fails(1)
    else:
        pin = "uv==0.13.9" if installing == "uv" else "torch==2.9"
        sentence = checkout.fails(1, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(checkout.programs))
        assert f"no wheel of {pin} for Python 3." in sentence
    assert checkout.environments() == [".venv"] and (checkout.venv / "kept").exists()


def test_settings_of_pip_are_those_of_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = http://first/simple\nextra-index-url = http://a/b\n"
        "[install]\nindex-url = http://it's/simple\nno-index = true\nfind-links =\n  /x\n  /y\n"
    )
    settings = ROOT / "scripts" / "setup_env" / "pip_settings.py"
    shell = f'eval "$({sys.executable} {settings})"; echo "${{uv_flags[@]}}"; env'
    here = {"PIP_CONFIG_FILE": f"{tmp_path}/pip.conf", "PIP_CERT": "/ca.pem", "UV_INDEX": "mine"}
    found = subprocess.check_output(["bash", "-c", shell], env=os.environ | here, text=True)
    wanted = "--no-index UV_DEFAULT_INDEX=http://it's/simple UV_INDEX=mine UV_FIND_LINKS=/x,/y"
    assert {*wanted.split(), "SSL_CERT_FILE=/ca.pem"} <= set(found.splitlines())


def test_signal_ends_what_runs_and_leaves_the_previous_environment(
    checkout: Checkout, tmp_path: Path
) -> None:
    checkout.make_complete_venv()
    checkout.outdate()
    running = tmp_path / "running"
    checkout.python(
        "python3",
        making_venv=f"sleep 60 & echo $! > {running}.new; mv {running}.new {running}; wait",
    )
    process = checkout.start()
    wait_for(running.exists)
    process.send_signal(signal.SIGTERM)
    assert "interrupted" in checkout.sentence(process, 128 + signal.SIGTERM)
    wait_for(lambda: has_ended(running.read_text().strip()))
    assert checkout.environments() == [".venv"] and (checkout.venv / "kept").exists()


def test_killed_upgrade_is_undone_by_the_next_call(checkout: Checkout) -> None:
    checkout.make_complete_venv()
    checkout.venv.rename(checkout.path / ".venv.previous")
    (checkout.path / ".venv.new").mkdir()
    checkout.outdate()
    checkout.little_disk()
    checkout.fails(1)
    assert checkout.environments() == [".venv"] and (checkout.venv / "kept").exists()


def test_environment_of_another_hand_is_kept_on_failure(checkout: Checkout) -> None:
    checkout.venv.mkdir()
    (checkout.venv / "kept").touch()
    checkout.python("python3", making_venv="echo 'no, for a reason' >&2; exit 1")
    assert "could not make" in (sentence := checkout.fails(1)) and "for a reason" in sentence
    assert checkout.environments() == [".venv"] and (checkout.venv / "kept").exists()


def test_second_call_waits_for_the_first(checkout: Checkout) -> None:
    state = checkout.path / ".cache" / "setup_env"
    state.mkdir(parents=True)
    (checkout.path / ".venv.new").mkdir()
    with (state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = checkout.start()
        assert process.stdout is not None
        assert "waiting for another setup" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert checkout.environments() == [".venv.new"]


def test_complete_environment_is_returned_at_once_until_its_pins_change(checkout: Checkout) -> None:
    checkout.make_complete_venv()
    checkout.little_disk()
    process = checkout.start()
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (0, "", "")
    assert not (checkout.path / ".cache").exists()
    checkout.outdate()
    assert "the disk" in checkout.fails(1)
    assert (checkout.venv / "kept").exists()


@pytest.mark.parametrize("requirements", REQUIREMENTS)
def test_requirements_pin_what_setup_py_asks_for(requirements: str) -> None:
    lines = (ROOT / requirements).read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    loose = [pin for pin in pins if not re.match(r"[A-Za-z0-9._-]+==[0-9]", pin)]
    assert loose == []
    arguments = {
        keyword.arg: keyword.value
        for keyword in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(keyword, ast.keyword)
    }
    # What benchmarks compare with is not set up; what tests need of the others is.
    extras = ast.literal_eval(arguments["extras_require"])
    assert set(extras) == {"test", "bench", "docs", "wandb"}
    assert {*extras["docs"], *extras["wandb"]} < set(extras["test"])
    asked = {
        re.split("[<>=]", wanted)[0].lower()
        for wanted in [*ast.literal_eval(arguments["install_requires"]), *extras["test"]]
    }
    assert len(asked) > 10
    assert asked - {pin.split("==")[0].lower() for pin in pins} == set()


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("MCORE_RL_STACK") == "cuda", reason="of the CPU stack")
def test_check_of_a_new_environment_passes_in_this_one() -> None:
    script = ROOT / "scripts" / "setup_env" / "check.py"
    check = subprocess.run(
        [sys.executable, "-I", script, ROOT / REQUIREMENTS[0], "cpu", "all"],
        capture_output=True,
        text=True,
    )
    assert check.returncode == 0, check.stderr[-2000:]
