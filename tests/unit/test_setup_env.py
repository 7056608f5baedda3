"""scripts/setup_env.sh, run in a copy of its files, with injected failures.

PATH holds only the programs of the script and those of a test, so that no other Python, disk or
driver of this machine takes part. The tests run in the environment of a real installation, which
is not repeated here.
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
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import lives
from tests.python_versions import supported_pythons

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ("scripts/requirements-cpu.txt", "scripts/requirements-cuda.txt")
ENGINE_REQUIREMENTS = "scripts/requirements-te.txt"
PROGRAMS = """awk basename bash cut date df dirname flock grep mkdir mv rm sed sha256sum sleep tac
tail timeout uname""".split()
without_gpu = pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU"
)
PYTHON_NAMES = (*(f"python{version}" for version in supported_pythons()), "python3", "python")


@dataclass(frozen=True)
class Checkout:
    """A copy of the checkout, and its only directory of PATH."""

    path: Path
    programs: Path

    @property
    def venv(self) -> Path:
        return self.path / ".venv"

    def program(self, name: str, script: str) -> None:
        """Put a shell script in PATH, or replace the program of this name."""
        file = self.programs / name
        file.unlink(missing_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def python(self, name: str, before: str = "pass", making_venv: str = "") -> None:
        """Put this Python in PATH: `before` runs first in `-c`, `making_venv` replaces `-m`."""
        instead = f'if [ "$1" = -m ]; then {making_venv}; fi\n' if making_venv else ""
        self.program(
            name,
            f'if [ "$1" = -c ]; then code=$2; set -- -c "{before}\n$code"; fi\n'
            f'{instead}exec "{sys.executable}" "$@"',
        )

    def little_disk(self) -> None:
        self.program("df", "echo Filesystem; echo '/dev/full 99 98 1024 99% /'")

    def make_complete_venv(self) -> None:
        """A `.venv` with the script's stamp, and a file to recognize it by."""
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

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
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
            [shutil.which("bash") or "bash", "scripts/setup_env.sh", *arguments],
            cwd=self.path,
            env=defaults | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fails(self, exit_code: int, **environment: str) -> str:
        return self.sentence(self.start(**environment), exit_code)

    def sentence(self, process: subprocess.Popen[str], exit_code: int) -> str:
        """The only sentence on stderr once the script has ended."""
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == exit_code, stdout + stderr
        sentences = [line for line in stderr.splitlines() if not line.startswith("  | ")]
        assert len(sentences) == 1, stderr
        assert re.fullmatch(r"setup_env: .*\.", sentences[0]), stderr
        assert stderr.rstrip().endswith(sentences[0]), stderr
        return sentences[0]

    def environments(self) -> list[str]:
        return sorted(path.name for path in self.path.glob(".venv*"))

    def assert_unchanged(self) -> None:
        """The environment of `make_complete_venv` is the only one."""
        assert self.environments() == [".venv"] and (self.venv / "kept").exists()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited for 120 s"
        time.sleep(0.05)


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


@pytest.fixture(scope="session")
def made_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment to copy, because making one takes seconds."""
    folder = tmp_path_factory.mktemp("venv") / "made"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.fixture(params=["uv", "requirements-cpu.txt"])
def installing(request: pytest.FixtureRequest, checkout: Checkout, made_venv: Path) -> str:
    """What is installed first: uv by pip, or the pins if uv is in PATH."""
    copying = f'mkdir -p "${{4%/*}}" && exec {shutil.which("cp")} -a {made_venv} "$4"'
    checkout.python("python3", making_venv=copying)
    if request.param != "uv":
        (checkout.programs / "uv").symlink_to(Path(sys.executable).with_name("uv"))
    return str(request.param)


def make_old(checkout: Checkout) -> None:
    for name in PYTHON_NAMES:
        checkout.python(name, "import sys; sys.version_info = (3, 9, 18, 'final', 0)")


def make_small(checkout: Checkout) -> None:
    checkout.program("python3.11", "exit 127")  # a shim, so that python3 is used
    checkout.little_disk()


@pytest.mark.parametrize(
    ("prepare", "environment", "exit_code", "words"),
    [
        (make_old, {}, 2, ["Python 3.11 to 3.13 is needed", "(3.9)"]),
        (lambda c: c.program("python3", "exit 127"), {}, 2, ["python3 (does not run)"]),
        (lambda c: (c.programs / "python3").unlink(), {}, 2, ["PATH has no Python"]),
        (
            lambda c: None,
            {"MCORE_RL_PYTHON": "/no/python"},
            2,
            ["MCORE_RL_PYTHON has /no/python (not found)"],
        ),
        (
            lambda c: c.python("python3", "import sys; sys.modules['ensurepip'] = None"),
            {},
            1,
            ["lacks the modules venv and ensurepip", f"python3.{sys.version_info.minor}-venv"],
        ),
        (make_small, {}, 1, ["1 MiB free", "the cpu stack needs 6 GiB"]),
        (lambda c: None, {"MCORE_RL_STACK": "tpu"}, 2, ['MCORE_RL_STACK is "tpu"']),
    ],
)
def test_unsuitable_machine_or_setting_is_refused(prepare, environment, exit_code, words, checkout):
    prepare(checkout)
    sentence = checkout.fails(exit_code, **environment)
    assert [word for word in words if word not in sentence] == []
    assert checkout.environments() == []


def make_changed_package(checkout: Checkout, check: str) -> None:
    """A `.venv` whose mcore_rl is to be installed again, with `check` in the place of check.py."""
    checkout.make_complete_venv()
    (checkout.path / "setup.py").write_text((checkout.path / "setup.py").read_text() + "# new\n")
    (checkout.venv / "bin" / "uv").symlink_to(checkout.programs / "true")
    (checkout.path / "scripts" / "setup_env" / "check.py").write_text(check)
    checkout.program("true", "exit 0")


SEEN_BY_EACH_OTHER = """
import pathlib, sys, time
mine, other = sys.argv[-2:]
pathlib.Path(mine).touch()
while not pathlib.Path(other).exists():
    time.sleep(0.05)
"""


@pytest.mark.parametrize("exit_code", [0, 3])
def test_program_runs_beside_the_check_of_a_new_environment(
    exit_code: int, checkout: Checkout
) -> None:
    check = SEEN_BY_EACH_OTHER.replace("sys.argv[-2:]", "'checked', 'ran'")
    make_changed_package(checkout, check)
    program = SEEN_BY_EACH_OTHER + f"sys.exit({exit_code})"
    process = checkout.start("-c", program, "ran", "checked")
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (exit_code, ""), stdout
    (checkout.path / "ran").unlink()  # what is current is not checked again
    (checkout.path / "checked").write_text("once")
    assert checkout.start("-c", program, "ran", "checked").wait(120) == exit_code
    assert (checkout.path / "checked").read_text() == "once"


def test_program_ends_with_a_check_that_fails(checkout: Checkout) -> None:
    check = (
        "import pathlib, time\nwhile not pathlib.Path('ran').exists(): time.sleep(0.05)\nopen(0)()"
    )
    make_changed_package(checkout, check)
    program = "import os, time; open('ran', 'w').write(str(os.getpid())); time.sleep(600)"
    sentence = checkout.sentence(checkout.start("-c", program), 1)
    assert "was installed but does not work: TypeError" in sentence
    assert not lives(int((checkout.path / "ran").read_text()))


@pytest.mark.parametrize("minor", range(10, 15))
def test_only_pythons_of_setup_py_are_used(minor: int, checkout: Checkout) -> None:
    checkout.python("python3", f"import sys; sys.version_info = (3, {minor}, 0, 'final', 0)")
    checkout.little_disk()
    if f"3.{minor}" in supported_pythons():
        assert "1 MiB free" in checkout.fails(1)
    else:
        assert f"(3.{minor})" in checkout.fails(2)


def test_classifiers_name_the_pythons_of_setup_py() -> None:
    pattern = r"Python :: (3\.\d+)"
    assert re.findall(pattern, (ROOT / "setup.py").read_text()) == supported_pythons()


@pytest.mark.slow
@without_gpu
def test_cuda_stack_is_built_beside_the_environment_of_a_machine_without_a_gpu(checkout):
    checkout.make_complete_venv()
    process = checkout.start(MCORE_RL_STACK="cuda")  # refused by the index
    stdout = process.communicate(timeout=300)[0]
    assert "building .venv-cuda for the cuda stack" in stdout
    checkout.assert_unchanged()


@without_gpu
@pytest.mark.parametrize(("exit_code", "needs"), [(0, "cuda stack needs 16"), (9, "cpu stack")])
def test_stack_is_cuda_where_the_driver_answers(exit_code, needs, checkout):
    checkout.little_disk()
    checkout.program("nvidia-smi", f"echo 'GPU 0, or an error'; exit {exit_code}")
    assert needs in checkout.fails(1, MCORE_RL_STACK="")


@pytest.mark.slow
@pytest.mark.parametrize("unreachable", [True, False])
def test_failed_installation_is_explained_and_keeps_the_previous_environment(
    unreachable, installing, checkout
):
    checkout.make_complete_venv()
    (checkout.path / REQUIREMENTS[0]).write_text("torch==2.9\nuv==0.13.9\nmegatron-core==0.1\n")
    if unreachable:
        assert f"index cannot be reached to install {installing}: check the" in checkout.fails(1)
    else:
        pin = "uv==0.13.9" if installing == "uv" else "torch==2.9"
        sentence = checkout.fails(1, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(checkout.programs))
        assert f"no wheel of {pin} for Python 3." in sentence
    checkout.assert_unchanged()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accepted", "fails"),
    [
        ("", "no wheel of torch==2.9+cpu for Python 3."),
        ("1", "installing megatron-core==0.1 failed"),  # what comes after torch
    ],
)
def test_torch_for_cuda_is_installed_where_it_is_accepted(
    accepted: str, fails: str, checkout: Checkout, made_venv: Path
) -> None:
    copying = f'mkdir -p "${{4%/*}}" && exec {shutil.which("cp")} -a {made_venv} "$4"'
    checkout.python("python3", making_venv=copying)
    (checkout.programs / "uv").symlink_to(Path(sys.executable).with_name("uv"))
    make_wheel(checkout.path, "torch", "2.9")
    (checkout.path / REQUIREMENTS[0]).write_text("torch==2.9+cpu\nmegatron-core==0.1\n")
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout.path)}
    assert fails in checkout.fails(1, **environment, MCORE_RL_ACCEPT_CUDA_TORCH=accepted)


def make_wheel(folder: Path, package: str, version: str) -> None:
    """An empty one."""
    record = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        wheel.writestr(f"{record}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{record}/WHEEL", tags)
        wheel.writestr(f"{record}/RECORD", "")


def test_settings_of_pip_apply_to_uv(tmp_path, monkeypatch):
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


def test_signal_ends_the_setup_and_keeps_the_previous_environment(checkout, tmp_path):
    checkout.make_complete_venv()
    checkout.outdate()
    running = tmp_path / "running"
    noted = f"echo $! > {running}.new; mv {running}.new {running}"
    checkout.python("python3", making_venv=f"sleep 60 & {noted}; wait")
    process = checkout.start()
    wait_for(running.exists)
    process.send_signal(signal.SIGTERM)
    assert "interrupted" in checkout.sentence(process, 128 + signal.SIGTERM)
    wait_for(lambda: not lives(int(running.read_text())))
    checkout.assert_unchanged()


def test_killed_upgrade_is_undone_by_the_next_call(checkout):
    checkout.make_complete_venv()
    checkout.venv.rename(checkout.path / ".venv.previous")
    (checkout.path / ".venv.new").mkdir()
    checkout.outdate()
    checkout.little_disk()
    checkout.fails(1)
    checkout.assert_unchanged()


def test_foreign_environment_is_kept_on_failure(checkout):
    checkout.venv.mkdir()
    (checkout.venv / "kept").touch()
    checkout.python("python3", making_venv="echo 'no, for a reason' >&2; exit 1")
    sentence = checkout.fails(1)
    assert "could not make" in sentence and "for a reason" in sentence
    checkout.assert_unchanged()


def test_second_call_waits_for_the_first(checkout):
    state = checkout.path / ".cache" / "setup_env"
    state.mkdir(parents=True)
    (checkout.path / ".venv.new").mkdir()
    with (state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = checkout.start()
        assert process.stdout is not None
        assert "waiting for another setup" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert checkout.environments() == [".venv.new"]


def test_complete_environment_is_returned_at_once_until_its_pins_change(checkout):
    checkout.make_complete_venv()
    checkout.little_disk()
    process = checkout.start()
    assert (*process.communicate(timeout=300), process.returncode) == ("", "", 0)
    assert not (checkout.path / ".cache").exists()
    checkout.outdate()
    assert "the disk" in checkout.fails(1)
    assert (checkout.venv / "kept").exists()


@pytest.mark.parametrize("requirements", REQUIREMENTS)
def test_requirements_pin_the_dependencies_of_setup_py(requirements):
    lines = (ROOT / requirements).read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    loose = [pin for pin in pins if not re.match(r"[A-Za-z0-9._-]+==[0-9]", pin)]
    assert loose == []
    arguments = {
        keyword.arg: keyword.value
        for keyword in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(keyword, ast.keyword)
    }
    # The libraries that benchmarks compare with are not pinned.
    extras = ast.literal_eval(arguments["extras_require"])
    assert set(extras) == {"test", "bench", "docs", "smollm2", "wandb"}
    assert {*extras["docs"], *extras["smollm2"], *extras["wandb"]} < set(extras["test"])
    asked = {
        re.split("[<>=]", wanted)[0].lower()
        for wanted in [*ast.literal_eval(arguments["install_requires"]), *extras["test"]]
    }
    assert len(asked) > 10
    assert asked - {pin.split("==")[0].lower() for pin in pins} == set()


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("MCORE_RL_STACK") == "cuda", reason="of the CPU stack")
def test_check_of_a_new_environment_passes_in_this_one():
    script = ROOT / "scripts" / "setup_env" / "check.py"
    check = subprocess.run(
        [sys.executable, "-I", script, ROOT / REQUIREMENTS[0], "cpu", "all"],
        capture_output=True,
        text=True,
    )
    assert check.returncode == 0, check.stderr[-2000:]
