"""A policy's Python: what it may do and what not, and what it is worth."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.rewards import sandbox, sandbox_inside
from mcore_rl.rewards.functions import resolve_reward
from mcore_rl.rewards.sandbox import Ran, code_in, report_of, run_python
from mcore_rl.rewards.specs import check_rewards, parse_rewards
from mcore_rl.rewards.worker import score_sample

PATIENT_SECONDS = 60.0


def ran(code: str, *tests: str, seconds: float = PATIENT_SECONDS, **options: int) -> Ran:
    return run_python(code, tests, timeout_seconds=seconds, **options)


def raised(found: Ran) -> str:
    """The last line of what it raised."""
    assert not found.ended and not found.all_passed and not found.why, found
    return found.stderr.strip().splitlines()[-1]


# What it may --------------------------------------------------------------------------------------


def test_code_runs_and_its_tests_see_what_it_has_defined():
    found = ran("def f(x): return x + 1\nprint('hello')", "assert f(1) == 2", "assert f(1) == 3")
    assert (found.ended, found.passed, found.why) == (True, (True, False), "")
    assert found.stdout == "hello\n" and found.stderr.endswith("AssertionError\n")
    assert not found.all_passed and ran("x = 1", "assert x").all_passed
    assert report_of(found).endswith("AssertionError\ntests passed: 1 of 2")


def test_threads_loops_files_of_its_own_and_much_of_everything_else_work():
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


def test_each_run_has_an_empty_folder_that_is_gone_after_it():
    found = ran("import os; open('f', 'w'); print(os.getcwd(), os.environ['HOME'])")
    folder, home = found.stdout.split()
    assert folder == home and not os.path.exists(folder)
    assert ran("import os; print(os.listdir())").stdout == "[]\n"


# What it may not ----------------------------------------------------------------------------------


@pytest.fixture
def listening() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


CONNECTS = "import socket; socket.create_connection(('127.0.0.1', {port}), 5)"


def test_it_connects_to_nothing(listening):
    code = CONNECTS.format(port=listening)
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0  # it would
    assert raised(ran(code)).startswith("PermissionError")
    assert raised(ran("import socket; socket.socket(socket.AF_UNIX)")).startswith("PermissionError")
    assert "error" in raised(
        ran(f"import urllib.request as r; r.urlopen('http://127.0.0.1:{listening}', timeout=5)")
    )


def test_its_filter_counts_where_it_has_no_network_namespace(listening, tmp_path):
    """And either of the two alone is enough."""
    code = CONNECTS.format(port=listening)
    program = (
        "import ctypes, sys\n"
        "from mcore_rl.rewards import sandbox_inside as inside\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.prctl(38, 1, 0, 0, 0)\n"
        "{cut}\n"
        "try:\n    {code}\n"
        "except OSError as error: print(type(error).__name__)\n"
    )
    for cut in (
        "assert inside._open_nothing(libc) is None",
        "libc.unshare(inside._CLONE_NEWUSER | inside._CLONE_NEWNET)",
    ):
        process = subprocess.run(
            [sys.executable, "-c", program.format(cut=cut, code=code)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        if "unshare" in cut and not has_namespaces():
            continue
        assert process.stdout.split() in (["PermissionError"], ["OSError"]), cut


def has_namespaces() -> bool:
    return subprocess.run(["unshare", "-Urn", "true"], stderr=subprocess.DEVNULL).returncode == 0


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
def test_it_is_kept_from(code, error):
    assert raised(ran(code)).startswith(error)


def has_landlock() -> bool:
    import ctypes

    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1


@pytest.mark.skipif(not has_landlock(), reason="the kernel has no Landlock")
def test_it_reads_and_writes_no_file_of_the_user(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hush")
    for deed in (f"open({str(secret)!r})", f"open({str(secret)!r}, 'w')"):
        assert raised(ran(deed)).startswith("PermissionError")
    for deed in ("unlink", "rmdir", "mkdir", "listdir"):
        assert raised(ran(f"import os; os.{deed}({str(tmp_path / 'secret')!r})")).endswith("'")
    assert raised(ran("open('/proc/1/environ').read()")).startswith("PermissionError")
    assert secret.read_text() == "hush"


def test_it_takes_no_longer_than_it_may():
    assert ran("while True: pass", seconds=2).why == "it took longer than 2 s"
    assert ran("while True: print('x' * 10_000)", seconds=2).why == "it took longer than 2 s"
    masked = "import signal, time; signal.pthread_sigmask(0, range(1, 65)); time.sleep(600)"
    assert ran(masked, seconds=2).why == "it took longer than 2 s"


def test_of_what_it_prints_no_more_is_kept_than_anybody_reads():
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
        # It knows the words, but not what each test is told right by.
        'import os\nfor fd in range(3, 20):\n    try: os.write(fd, b\'{"ran": true}\\n'
        '{"test": 0, "passed": true, "key": ""}\\n{"over": true}\\n\')\n'
        "    except OSError: pass\nos._exit(0)",
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_code_that_leaves_early_passes_no_test(code):
    found = ran(code, "pass")
    assert not found.all_passed and found.passed == (False,)


def test_a_machine_that_cannot_cut_the_network_refuses_by_name(monkeypatch, tmp_path):
    real = Path(sandbox_inside.__file__).read_text()
    assert '"x86_64":' in real
    inside = tmp_path / "inside.py"
    inside.write_text(real.replace('"x86_64":', '"x":').replace('"aarch64":', '"a":'))
    monkeypatch.setattr(sandbox, "_INSIDE", inside)
    with pytest.raises(RuntimeError, match="no filter of system calls is known for"):
        ran("pass")
    with pytest.raises(
        UsageError, match="^--rl-reward gsm8k,python_sandbox cannot be used here: .*; run on Linux"
    ):
        check_rewards(parse_rewards("gsm8k,python_sandbox"))


# As a reward -------------------------------------------------------------------------------------


def test_the_last_block_of_python_is_what_counts():
    text = "First\n```python\na = 1\n```\nno:\n```py\na = 2\n```\n```json\n{}\n```"
    assert code_in(text) == "a = 2\n"
    assert code_in("```\na = 3\n```") == "a = 3\n"
    assert code_in("a = 1") is None and code_in("```python\na = 1") is None


def test_as_a_reward():
    reward = resolve_reward("python_sandbox")
    right, wrong = "```python\ndef f(): return 1\n```", "```python\ndef f(): return 2\n```"
    for answer in ("assert f() == 1", ["assert f() == 1", "assert f() < 2"]):
        assert reward(prompt="", response=right, answer=answer) == 1.0
        assert reward(prompt="", response=wrong, answer=answer) == 0.0
    assert reward(prompt="", response="def f(): return 1", answer="assert f() == 1") == 0.0
    for answer in ("", [], {"a": 1}):
        with pytest.raises(ValueError, match="the answer "):
            reward(prompt="", response=right, answer=answer)
    check_rewards(parse_rewards("python_sandbox"))


def test_its_time_ends_before_that_of_the_reward():
    hangs = "```python\nwhile True: pass\n```"
    old = signal.getsignal(signal.SIGALRM)
    try:
        outcome = score_sample("python_sandbox", "", hangs, "pass", timeout_seconds=3.0)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert (outcome.reward, outcome.kind) == (0.0, None)
