"""The sandbox for a policy's Python code: permissions, limits, attacks, and its reward."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.isolation import seccomp, supervisor
from mcore_rl.isolation.client import Supervisor, Unprotected
from mcore_rl.isolation.levels import BUBBLEWRAP, LANDLOCK, LEVELS, SECCOMP
from mcore_rl.launch import cleanup
from mcore_rl.rewards.functions import resolve_reward
from mcore_rl.rewards.pool import check_rewards
from mcore_rl.rewards.worker import score_sample
from mcore_rl.sandbox.code_blocks import code_in
from mcore_rl.sandbox.runner import Ran, report_of, run_python
from tests.reward_specs import rewards_of
from tests.unit.sandbox_attacks import ATTACKS, FILES, HOGS, PRELUDE
from tests.unit.server_engines import until

PATIENT_SECONDS = 60.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[BUBBLEWRAP, LANDLOCK])
def by(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Supervisor]:
    """A supervisor for each level with full protection; it makes its folders in `by.folder`."""
    folder = tmp_path_factory.mktemp("folders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        supervisor = Supervisor(levels=[request.param])
    with supervisor:
        try:
            supervisor.level()
        except Unprotected as error:
            if request.param == BUBBLEWRAP and os.environ.get("CI") and not shutil.which("bwrap"):
                raise
            pytest.skip(str(error))
        supervisor.folder = folder
        yield supervisor


def ran(code: str, *tests: str, seconds: float = PATIENT_SECONDS, **options: Any) -> Ran:
    return run_python(code, tests, timeout_seconds=seconds, **options)


def raised(found: Ran) -> str:
    """The last line of the traceback."""
    assert not found.ended and not found.all_passed and not found.why, found
    return found.stderr.strip().splitlines()[-1]


# Permissions --------------------------------------------------------------------------------------


def test_code_runs_and_its_tests_see_its_definitions():
    found = ran("def f(x): return x + 1\nprint('hello')", "assert f(1) == 2", "assert f(1) == 3")
    assert (found.ended, found.passed, found.why) == (True, (True, False), "")
    assert found.stdout == "hello\n" and found.stderr.endswith("AssertionError\n")
    assert not found.all_passed and ran("x = 1", "assert x").all_passed
    assert report_of(found).endswith("AssertionError\ntests passed: 1 of 2")


def test_threads_event_loops_and_own_files_work():
    assert ran(
        "import asyncio, threading, dataclasses, decimal, json, collections, os\n"
        "@dataclasses.dataclass\nclass A: x: int\n"
        "thread = threading.Thread(target=lambda: open('f', 'w').write('x')); thread.start()\n"
        "thread.join()\n"
        "assert asyncio.run(asyncio.sleep(0, 1)) == 1\n"
        "assert os.listdir() == ['f'] and open('f').read() == 'x'\n",
        "assert A(1).x == 1",
        "x = 'é' * 200_000\nassert len(x) == 200_000",
    ).all_passed


def test_each_run_has_an_empty_folder_that_is_removed():
    found = ran("import os; open('f', 'w'); print(os.getcwd(), os.environ['HOME'])")
    folder, home = found.stdout.split()
    assert folder == home and not os.path.exists(folder)
    assert ran("import os; print(os.listdir())").stdout == "[]\n"


@pytest.fixture
def listening() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


CONNECTS = "import socket; socket.create_connection(('127.0.0.1', {port}), 5)"


def test_network_is_refused(listening):
    code = CONNECTS.format(port=listening)
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0  # outside the sandbox
    assert raised(ran(code)).startswith("PermissionError")
    assert raised(ran("import socket; socket.socket(socket.AF_UNIX)")).startswith("PermissionError")
    assert "error" in raised(
        ran(f"import urllib.request as r; r.urlopen('http://127.0.0.1:{listening}', timeout=5)")
    )


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.fork()", "BlockingIOError"),
        ("import subprocess; subprocess.run(['true'])", "BlockingIOError"),
        ("import multiprocessing as m; m.Process(target=print).start()", "BlockingIOError"),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", "BlockingIOError"),
        ("x = bytearray(2 << 30)", "MemoryError"),
        ("import mmap; mmap.mmap(-1, 8 << 30)", "OSError: [Errno 12]"),
        ("open('f', 'wb').write(b'x' * (65 << 20))", "OSError: [Errno 27]"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_processes_memory_and_large_files_are_refused(code, error):
    assert raised(ran(code)).startswith(error)


# Attacks ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Targets outside the sandbox: a process, files, sockets, shared memory."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret").write_text("hush")
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with (
        victim,
        tempfile.NamedTemporaryFile("w", dir="/dev/shm") as shared,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        shared.write("hush")
        shared.flush()
        abstract.bind("")  # the kernel chooses
        # A short path to a folder with any name.
        descriptor = os.open(folder, os.O_PATH)
        named.bind(f"/proc/self/fd/{descriptor}/socket")
        os.close(descriptor)
        for server in (abstract, named):
            server.listen()
        yield {
            "pid": victim.pid,
            "parent": os.getpid(),
            "folder": str(folder),
            "secret": str(folder / "secret"),
            "path": str(folder / "socket"),
            "shm": shared.name,
            "abstract": abstract.getsockname().decode(),
            "project": str(ROOT),
        }
        victim.kill()


def successful_attacks(
    attacks: dict[str, str], host: dict[str, Any], by: Supervisor | None
) -> set[str]:
    """The attacks that succeed under a supervisor, or in a plain process without one."""
    if platform.machine() != "x86_64":
        attacks = {name: code for name, code in attacks.items() if "call(" not in code}
    code = f"{PRELUDE.replace('HOST', repr(host))}\nrun({attacks!r})"
    if by is None:
        command = [sys.executable, "-c", code]
        return set(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    found = ran(code, by=by)
    assert found.ended, found
    return set(json.loads(found.stdout))


@pytest.mark.parametrize("protection", ATTACKS)
def test_attacks_fail_in_the_sandbox(by, host, protection):
    victim = psutil.Process(host["pid"])

    def state() -> tuple[object, ...]:
        limits = resource.prlimit(victim.pid, resource.RLIMIT_CPU)
        lives = victim.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        found = lives, victim.nice(), tuple(victim.cpu_affinity()), limits
        folder = Path(host["folder"])
        return *found, sorted(os.listdir(folder)), (folder / "secret").read_text()

    before = state()
    assert successful_attacks(ATTACKS[protection], host, by) == set()
    assert state() == before and before[0]


def test_attacks_succeed_without_the_sandbox(host, tmp_path):
    """Control for the test above."""
    signals = ["kill: the trainer", "pidfd_open", "prlimit: look"]
    harmless = {
        "signals": [*signals, "all signals that its user may have pending"],
        "lifetime": ["subreaper"],
        "files": ["read a file", "list a folder", "/dev/shm", "open without access"],
        "network": ["tcp", "unix", "abstract", "netlink"],
        "kernel": ["personality"],
        "memory": [
            *("memfd_create", "shared memory", "private memory", "many descriptors"),
            "memory by a page of the stack",
        ],
    }
    for protection, names in harmless.items():
        attacks = {name: ATTACKS[protection][name] for name in names}
        expected = set(names)
        if platform.machine() != "x86_64":
            expected = {name for name in names if "call(" not in attacks[name]}
        assert successful_attacks(attacks, host, None) == expected


@pytest.mark.parametrize("name", HOGS)
def test_code_that_exceeds_a_limit_is_ended(by, tmp_path, monkeypatch, name):
    found = ran(HOGS[name], "pass", by=by, seconds=PATIENT_SECONDS)
    assert not found.all_passed and "took longer" not in found.why
    reasons = ("its folder held", "threads", "exit code")
    no_space = found.stderr.strip().endswith("[Errno 28] No space left on device")
    assert no_space or any(reason in found.why for reason in reasons)
    written_mib = [int(line) for line in found.stdout.split()]
    assert max(written_mib, default=0) < 1000


def test_many_mappings_do_not_block_the_supervisor(by):
    """Their names repeat that of the folder, for which the supervisor searches."""
    if by.level().name != LANDLOCK:
        pytest.skip("what it has mapped is not looked at")
    code = (
        "import ctypes, os, time\n"
        "name = '/'.join(['tmp', os.path.basename(os.getcwd())] * 20); os.makedirs(name)\n"
        "file = open(f'{name}/x', 'w+b'); file.truncate(4096); map = ctypes.CDLL(None).mmap\n"
        "for n in range(60_000): map(None, ctypes.c_size_t(4096), 1 + 2 * (n % 2), 2,"
        " file.fileno(), ctypes.c_long(0))\n"
        "time.sleep(600)"
    )
    assert "its folder held" in ran(code, by=by).why


def test_code_that_does_not_stop_in_time_is_not_over_its_limit_before_it_is_measured(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(supervisor, "_STOP_SECONDS", 0.05)
    folder, fifo = tmp_path / "folder", tmp_path / "fifo"
    folder.mkdir()
    os.mkfifo(fifo)
    code = (  # vfork: the parent sleeps, and no signal stops it, until its child has opened a file
        "import os, time\n"
        f"actions = [(os.POSIX_SPAWN_OPEN, 0, {str(fifo)!r}, os.O_RDONLY, 0)]\n"
        "os.posix_spawn('/bin/true', ['true'], {}, file_actions=actions)\n"
        "time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_DISK_SLEEP)
        (folder / "file").write_bytes(bytes(3 << 20))
        assert not supervisor._stopped_exceeds(str(folder), child.pid, 1 << 20)
        os.close(os.open(fifo, os.O_WRONLY))
        until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
        assert supervisor._stopped_exceeds(str(folder), child.pid, 1 << 20)
    finally:
        with contextlib.suppress(OSError):  # nothing waits for it
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        child.kill()
        child.wait()


def test_folder_of_a_run_is_removed_with_any_content(by, tmp_path):
    (tmp_path / "file").write_text("mine")
    code = (
        f"import os\nos.symlink({str(tmp_path)!r}, 'link'); os.mkdir('closed', 0)\n"
        "for _ in range(50): os.mkdir('d'); os.chdir('d')"
    )
    before = {*os.listdir(by.folder)}  # of runs that exceeded a limit, which are removed later
    assert ran(code, "pass", by=by).all_passed
    assert {*os.listdir(by.folder)} <= before
    assert (tmp_path / "file").read_text() == "mine"


def test_virtual_environment_does_not_expose_its_project(by, tmp_path):
    """The sandbox is part of the project and reads its own code only."""
    level = by.level().name
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    (tmp_path / ".env").write_text("hush")
    paths = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "project.pth").write_text("\n".join(paths))
    code = "import os, sys; print(sys.prefix); print(open(os.path.join(sys.prefix, '.env')).read())"
    program = (
        "from mcore_rl.isolation.client import Supervisor\n"
        "from mcore_rl.sandbox.runner import run_python\n"
        f"with Supervisor(levels=[{level!r}]) as by:\n"
        f"    print(run_python({code!r}, timeout_seconds=60, by=by))\n"
    )
    process = subprocess.run(
        [str(tmp_path / "bin" / "python"), "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert str(tmp_path) in process.stdout and "Error" in process.stdout
    assert "hush" not in process.stdout


# Its end ------------------------------------------------------------------------------------------

RUNS = """
import sys
from mcore_rl.isolation.client import Supervisor
from mcore_rl.sandbox.runner import run_python

code = (
    "import signal, threading, time; signal.pthread_sigmask(0, range(1, 65))\\n"
    "threading.Thread(target=time.sleep, args=(600,)).start(); time.sleep(600)"
)
with Supervisor(levels=[sys.argv[1]]) as by:
    print(run_python(code, timeout_seconds=600, memory_bytes=int(sys.argv[2]), by=by).why)
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["client", "monitor", "by its mark"])
def test_all_processes_end_with(by, killed):
    level, memory_bytes = by.level().name, (1 << 30) + 4096 * (os.getpid() + hash(killed) % 1000)
    mark = f"MCORE_RL_LAUNCHER=sandbox-{os.getpid()}-{level}"
    environment = os.environ | {"TMPDIR": str(by.folder)} | dict([mark.split("=")])
    command = [sys.executable, "-c", RUNS, level, str(memory_bytes)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as client:
        code: list[psutil.Process] = []
        while not any(each.num_threads() > 1 for each in code):  # it has begun to wait
            assert client.poll() is None
            code = with_text(f'"memory_bytes": {memory_bytes}')
        (supervisor,) = psutil.Process(client.pid).children()
        (monitor,) = supervisor.children()
        everything = [*code, *supervisor.children(recursive=True), supervisor]
        if killed == "client":
            client.kill()
        elif killed == "monitor":
            monitor.kill()
        else:
            cleanup.end_processes(lambda: cleanup.marked(mark))
        _, left = psutil.wait_procs(everything, timeout=PATIENT_SECONDS)
        assert left == []
        client.kill()


def with_text(text: str) -> list[psutil.Process]:
    """Processes whose command contains `text`."""
    processes = psutil.process_iter(["cmdline"])
    return [p for p in processes if any(text in part for part in p.info["cmdline"] or ())]


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "while True: print('x' * 10_000)",
        "import signal, time; signal.pthread_sigmask(0, range(1, 65)); time.sleep(600)",
    ],
)
def test_time_limit_ends_the_code(code):
    assert ran(code, seconds=2).why == "it took longer than 2 s"


def test_output_is_cut():
    flood = ran("for _ in range(1000): print('x' * 10_000)")
    assert flood.ended and len(flood.stdout) == 1 << 16
    assert len(report_of(flood)) < 4200 and "characters left out" in report_of(flood)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit()",
        "raise SystemExit",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.closerange(0, 100)",
        # Forges the messages, but does not know the keys of the tests.
        'import os\nfor fd in range(3, 20):\n    try: os.write(fd, b\'{"ran": true}\\n'
        '{"test": 0, "passed": true, "key": ""}\\n{"over": true}\\n\')\n'
        "    except OSError: pass\nos._exit(0)",
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_code_that_exits_early_passes_no_test(code):
    found = ran(code, "pass")
    assert not found.all_passed and found.passed == (False,)


@pytest.mark.slow
def test_machine_without_a_filter_is_refused():
    program = (
        "import ctypes\n"
        "from mcore_rl.common.errors import UsageError\n"
        "from mcore_rl.rewards.options import RewardOptions\n"
        "from mcore_rl.rewards.pool import check_rewards\n"
        "from mcore_rl.rewards.specs import parse_rewards\n"
        "ctypes.CDLL(None).personality(8)  # PER_LINUX32: uname names a 32-bit machine\n"
        "try:\n    check_rewards(parse_rewards('gsm8k,python_sandbox', RewardOptions()))\n"
        "except UsageError as error: print(error)\n"
    )
    refused = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    assert refused.startswith("--rl-reward gsm8k,python_sandbox cannot be used here: ")
    assert "no filter of system calls is known for" in refused and "; run on Linux" in refused


def test_missing_protection_must_be_accepted():
    with Supervisor(levels=[SECCOMP]) as by, pytest.raises(Unprotected, match="disk, files, mem"):
        by.level()
    with (
        Supervisor(levels=[SECCOMP], accepted=["files"]) as by,
        pytest.raises(Unprotected) as refused,
    ):
        ran("pass", by=by)
    assert "files" not in str(refused.value).split("cannot be protected")[0]
    accepted = sorted(LEVELS[SECCOMP].lacks)
    with Supervisor(levels=[SECCOMP], accepted=accepted) as by:
        assert ran("pass", "assert True", by=by).all_passed
        assert raised(ran("import os; os.kill(1, 0)", by=by)).startswith("PermissionError")


def test_level_lacks_the_protections_it_lists(host):
    reads = {name: FILES[name] for name in ("read a file", "list a folder", "/dev/shm")}
    with Supervisor(levels=[SECCOMP], accepted=sorted(LEVELS[SECCOMP].lacks)) as by:
        assert successful_attacks(reads, host, by) == set(reads)


# A machine without Landlock's system calls and without bubblewrap in PATH.
OLD_MACHINE = """
import ctypes, os, struct, sys
from mcore_rl.common.errors import UsageError
from mcore_rl.rewards.options import RewardOptions
from mcore_rl.rewards.pool import check_rewards
from mcore_rl.rewards.specs import parse_rewards

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
load, equal, give, allow, refuse = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000 | 38
filter = [(load, 0, 0, 0)]
for number in range(444, 447):
    filter += [(equal, 0, 1, number), (give, 0, 0, refuse)]
program = b"".join(struct.pack("=HBBI", *line) for line in [*filter, (give, 0, 0, allow)])
lines = ctypes.create_string_buffer(program, len(program))
header = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(lines))
assert libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0) == 0
os.environ["PATH"] = ""
try:
    check_rewards(parse_rewards("python_sandbox", RewardOptions(sandbox_accept=sys.argv[1])))
except UsageError as error:
    print(error)
"""


@pytest.mark.slow
def test_machine_without_file_protection_is_refused():
    def refusal(accepted: str) -> str:
        command = [sys.executable, "-c", OLD_MACHINE, accepted]
        return subprocess.check_output(command, cwd=ROOT, text=True)

    refused = refusal("network")
    assert refused.startswith("--rl-reward python_sandbox cannot be used here: disk, files, memory")
    assert "bubblewrap" in refused and "--rl-sandbox-accept" in refused
    assert refusal("files,memory,disk") == ""


def test_unknown_protection_cannot_be_accepted():
    with pytest.raises(UsageError, match="^--rl-sandbox-accept file .*files"):
        rewards_of("python_sandbox", sandbox_accept="memory,file")


def test_numbers_of_calls_match_the_kernel_headers():
    folder = Path("/usr/include")
    found = [*folder.glob("x86_64-*/asm/unistd_64.h"), *folder.glob("asm/unistd_64.h")]
    if platform.machine() != "x86_64" or not found:
        pytest.skip("there are no such headers")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", found[0].read_text()))
    calls = [seccomp.ANY_ARGUMENTS, seccomp.OF_FILES, *seccomp.OTHER_ERRORS.values()]
    for call in " ".join([*calls, *seccomp.WITH_CONDITIONS]).split():
        name, number, _ = call.split(":")
        assert numbers.get(name, number) == number, name


# As a reward -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            "First\n```python\na = 1\n```\nno:\n```py\na = 2\n```\n```json\n{}\n```",
            "a = 2\n",  # the last block of Python
        ),
        ("```\na = 3\n```", "a = 3\n"),
        ("a = 1", None),
        ("```python\na = 1", None),
        ("``` \t python \t\nx\n```", "x\n"),
        ("```Python3\nx\n```", "x\n"),
        ("```PY\nx\n```", "x\n"),
        ("```python3.11 title=a.py\nx\n```", "x\n"),
        ("```{python}\nx\n```", "x\n"),
        ("~~~python\nx\n~~~", "x\n"),
        ("```python\r\nx\r\n```\r\n", "x\r\n"),
        ("```python\n```", ""),
        ("so: ```python\nx\n```", "x\n"),
        ("```python\nx```", "x"),
        ("with ```x``` and\n```py\ny\n```", "y\n"),
        ("1. one\n   ```py\n   if x:\n     y\n   ```", "if x:\n  y\n"),
        ("````py\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```py\nx\n```python\ny\n```", "y\n"),
        ("```py\nf('''\n    ```\n''')\n```", "f('''\n    ```\n''')\n"),
        ("```cpp\nx\n```", None),
        ("```pythonic\nx\n```", None),
        ("```python\nx\n~~~", None),
        ("~~~python\nx\n```", None),
    ],
)
def test_code_blocks_are_found_in_any_common_form(text, code):
    assert code_in(text) == code


def test_code_blocks_are_found_in_huge_texts():
    """Backtracking would take hours for these texts."""
    many = 300_000
    for noise in ("```" + " " * many + "x", "\t\r" * many, "`x`\r" * many, "``` ```\r" * many):
        assert code_in(noise) is None
        assert code_in(f"```python\nx = 1\n```\n{noise}") == "x = 1\n"
    assert code_in("```python\n" * 10_000) == ""
    body = f"{' ' * many}\n{'x' * many}\n"
    assert code_in(f"```python\n{body}```") == body


def test_sandbox_as_a_reward():
    reward = resolve_reward("python_sandbox")
    right, wrong = "```python\ndef f(): return 1\n```", "```python\ndef f(): return 2\n```"
    for answer in ("assert f() == 1", ["assert f() == 1", "assert f() < 2"]):
        assert reward(prompt="", response=right, answer=answer) == 1.0
        assert reward(prompt="", response=wrong, answer=answer) == 0.0
    assert reward(prompt="", response="def f(): return 1", answer="assert f() == 1") == 0.0
    for answer in ("", [], {"a": 1}):
        with pytest.raises(ValueError, match="the answer "):
            reward(prompt="", response=right, answer=answer)
    check_rewards(rewards_of("python_sandbox"))


def test_time_limit_of_the_sandbox_is_below_that_of_the_reward():
    hangs = "```python\nwhile True: pass\n```"
    old = signal.getsignal(signal.SIGALRM)
    try:
        sample = ("", hangs, "assert x", "{}")
        outcome = score_sample(resolve_reward("python_sandbox"), sample, 3.0, gives_row=True)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert (outcome.reward, outcome.kind) == (0.0, None)
