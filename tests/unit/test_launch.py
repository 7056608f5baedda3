"""The launcher, run on ranks of a few lines of Python."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from mcore_rl.common.exits import describe_exit
from mcore_rl.common.kills import THE_GROUP, THE_MACHINE, describe_kills, memory_kills
from mcore_rl.common.machine import available_cores
from mcore_rl.launch.ending import exit_code
from mcore_rl.launch.folder import lock_of
from tests.rank_pool import free_port

SENTENCE = "mcore_rl: error: --some-flag 3 must be 4; change it"


class Launcher:
    """Starts launchers on a program given as text, and reads what the ranks wrote."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder = folder
        self.temporary = temporary  # the launcher's TMPDIR
        self._started: list[subprocess.Popen[str]] = []

    def start(self, program: str, num_ranks: int, *flags: str) -> subprocess.Popen[str]:
        """`program` has `rank`, `folder` and `here(name)`, which writes a file <name>.<rank>;
        `all_here(name)` also waits until all ranks have called it."""
        script = self.folder / "program.py"
        prelude = """
            import os, signal, sys, time
            from pathlib import Path
            rank, folder = int(os.environ["RANK"]), Path(__file__).parent

            def here(name, text=""):
                (folder / f".{rank}").write_text(text)
                (folder / f".{rank}").rename(folder / f"{name}.{rank}")

            def all_here(name, text=""):
                here(name, text)
                ranks = range(int(os.environ["WORLD_SIZE"]))
                while not all((folder / f"{name}.{other}").exists() for other in ranks):
                    time.sleep(0.01)
        """
        script.write_text(textwrap.dedent(prelude) + textwrap.dedent(program))
        process = subprocess.Popen(
            [sys.executable, "-m", "mcore_rl.launch", "--nproc-per-node", str(num_ranks)]
            + [*flags, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )
        self._started.append(process)
        return process

    def run(self, program: str, num_ranks: int = 3, *flags: str) -> tuple[int, str]:
        """The exit code and stderr."""
        process = self.start(program, num_ranks, *flags)
        _, stderr = process.communicate(timeout=120)
        return process.returncode, stderr

    def wait_for(self, name: str, num_ranks: int) -> list[int]:
        """Wait until all ranks have called `here(name, pid)`; return their pids."""
        files = [self.folder / f"{name}.{rank}" for rank in range(num_ranks)]
        wait_until(lambda: all(file.exists() for file in files))
        return [int(file.read_text()) for file in files]

    def segments(self, num_ranks: int) -> list[Path]:
        """The shared memory whose names ranks have written."""
        names = [self.folder / f"name.{rank}" for rank in range(num_ranks)]
        return [Path("/dev/shm") / name.read_text() for name in names]

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.communicate()


def all_gone(pids: Iterable[int]) -> bool:
    return not any(map(psutil.pid_exists, pids))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for 60 s"
        time.sleep(0.05)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with tempfile.TemporaryDirectory() as temporary:  # the names of pytest's are too long
        launcher = Launcher(tmp_path, Path(temporary))
        yield launcher
        launcher.end()


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([2, 2, 2], 2),
        ([2, -15, -15], 2),
        ([-15, 2], 2),
        ([2, -9], 2),
        ([3, -15], 3),
        ([2, 1], 1),
        ([1, 3], 1),
        ([-11, -15], 139),
        ([-9, -15, -15], 137),
        ([-15, -9], 137),
        ([-15, -15], 143),
    ],
)
def test_exit_code_follows_failed_ranks(codes: Sequence[int], expected: int) -> None:
    assert exit_code(codes) == expected


def test_launch_is_silent_when_all_ranks_succeed(launcher: Launcher) -> None:
    assert launcher.run("here('done')") == (0, "")
    assert sorted(path.suffix for path in launcher.folder.glob("done.*")) == [".0", ".1", ".2"]


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 2])
def test_launch_prints_one_sentence_for_usage_error(launcher: Launcher, slow: int) -> None:
    # One of the ranks is slow to leave, so that torchrun ends it with SIGTERM: the first one, too.
    code, stderr = launcher.run(
        f"""
        from mcore_rl.common.agreement import leave_with
        from mcore_rl.common.errors import UsageError
        all_here("pid", str(os.getpid()))
        if rank == {slow}:
            time.sleep(60)
        leave_with(UsageError({SENTENCE.removeprefix("mcore_rl: error: ")!r}))
        """
    )
    assert code == 2
    assert stderr == SENTENCE + "\n"
    assert all_gone(launcher.wait_for("pid", 3))


@pytest.mark.slow
def test_launch_keeps_failure_table_of_torchrun(launcher: Launcher) -> None:
    code, stderr = launcher.run(
        """
        if rank == 1:
            sys.exit(3)
        time.sleep(60)
        """
    )
    assert code == 3
    assert "program.py FAILED" in stderr
    assert re.search(r"(?s)Root Cause.* rank +: 1 ", stderr)
    assert "Sending process" in stderr
    assert "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_launch_ends_ranks_on_signal_and_waits(launcher: Launcher, number: signal.Signals) -> None:
    process = launcher.start(
        """
        def leave(number, frame):
            time.sleep(0.5)
            here("left", str(number))
            sys.exit(0)

        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(ending, leave)
        here("pid", str(os.getpid()))
        time.sleep(60)
        """,
        2,
    )
    pids = launcher.wait_for("pid", 2)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert stderr == f"mcore_rl: stopped by {number.name}, all processes have ended\n"
    assert launcher.wait_for("left", 2) == [signal.SIGTERM, signal.SIGTERM]
    assert all_gone(pids)


@pytest.mark.slow
def test_launch_removes_shared_memory_after_signal(launcher: Launcher) -> None:
    process = launcher.start(
        """
        from multiprocessing import shared_memory
        memory = shared_memory.SharedMemory(create=True, size=4096)
        (folder / f"name.{rank}").write_text(memory.name)
        here("pid", str(os.getpid()))
        time.sleep(60)
        """,
        2,
    )
    launcher.wait_for("pid", 2)
    segments = launcher.segments(2)
    assert all(segment.exists() for segment in segments)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert not any(segment.exists() for segment in segments)


@pytest.mark.slow
def test_launch_ends_processes_that_ranks_leave(launcher: Launcher) -> None:
    program = """
        import subprocess
        code = "import time; time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        all_here("child", str(child.pid))
        os._exit(2)
    """
    expected = r"mcore_rl: error: rank [01] ended with exit code 2; see what it printed\n"
    code, stderr = launcher.run(program, 2)
    assert code == 2
    assert re.fullmatch(expected, stderr)
    assert all_gone(launcher.wait_for("child", 2))


@pytest.mark.slow
def test_launch_leaves_no_process_after_second_signal(launcher: Launcher) -> None:
    # Ranks that nothing but SIGKILL ends, each with a process of its own.
    process = launcher.start(
        """
        import subprocess
        for ignored in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        here("child", str(child.pid))
        here("pid", str(os.getpid()))
        time.sleep(60)
        """,
        2,
        "--shutdown-timeout=60",
    )
    pids = launcher.wait_for("pid", 2) + launcher.wait_for("child", 2)
    started = time.monotonic()
    while process.poll() is None:  # torchrun sends SIGTERM, once more, then gives up
        process.send_signal(signal.SIGINT)
        time.sleep(1)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert stderr == "mcore_rl: stopped by SIGINT, all processes have ended\n"
    assert time.monotonic() - started < 40
    assert all_gone(pids)


@pytest.mark.slow
def test_launch_kills_ranks_after_shutdown_timeout(launcher: Launcher) -> None:
    process = launcher.start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        here("pid", str(os.getpid()))
        time.sleep(60)
        """,
        2,
        "--shutdown-timeout=1",
    )
    pids = launcher.wait_for("pid", 2)
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert all_gone(pids)


@pytest.mark.slow
def test_two_launches_get_different_ports(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    launchers = []
    for folder in folders:
        folder.mkdir()
        launchers.append(Launcher(folder, folder))
    program = """
        here("port", os.environ["MASTER_PORT"])
        while not (folder / "leave").exists():
            time.sleep(0.01)
    """
    try:
        processes = [launcher.start(program, 2) for launcher in launchers]
        ports = [launcher.wait_for("port", 2) for launcher in launchers]
        for folder in folders:
            (folder / "leave").touch()
        assert [process.wait(timeout=60) for process in processes] == [0, 0]
    finally:
        for launcher in launchers:
            launcher.end()
    assert ports[0][0] == ports[0][1] != ports[1][0] == ports[1][1]


@pytest.mark.slow
def test_launch_on_two_machines_ends_both_with_same_code(launcher: Launcher) -> None:
    program = f"""
        from mcore_rl.common.agreement import leave_with
        from mcore_rl.common.errors import UsageError
        all_here("ready")
        leave_with(UsageError({SENTENCE.removeprefix("mcore_rl: error: ")!r}))
    """
    port = free_port()
    flags = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    processes = [launcher.start(program, 2, *flags, f"--node-rank={rank}") for rank in (0, 1)]
    outputs = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert outputs == [SENTENCE + "\n"] * 2  # each machine has its own output


FAILS_ON = {
    "the launcher of node 0": ("os.kill(os.getppid(), signal.SIGKILL)", 0),
    "the launcher of node 2": ("os.kill(os.getppid(), signal.SIGKILL)", 2),
    "a rank of node 2": ("leave_reason('a bug'); sys.exit(7)", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FAILS_ON)
def test_launch_ends_after_failure_of_other_machine(launcher: Launcher, what: str) -> None:
    """The other ranks wait forever, as in a collective."""
    action, node = FAILS_ON[what]
    program = f"""
        from mcore_rl.common.agreement import leave_reason
        all_here("ready")
        if rank == {node}:
            {action}
        time.sleep(1000)
    """
    flags = ("--nnodes=3", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    processes = [launcher.start(program, 1, *flags, f"--node-rank={n}") for n in range(3)]
    outputs = [process.communicate(timeout=120)[1] for process in processes]
    fails = processes.pop(node)
    last_lines = outputs.pop(node).splitlines()
    host = socket.gethostname()
    if "launcher" in what:
        assert fails.returncode == -signal.SIGKILL
        # Node 0 is known by the address at which all meet.
        name = "127.0.0.1" if node == 0 else host
        expected, code = f"the launcher of node {node} ({name}) is gone, or its machine is", 1
        expected += ": all processes here have ended, too"
    else:
        assert (fails.returncode, last_lines[-1]) == (7, "mcore_rl: error: rank 2: a bug")
        expected, code = f"node 2 ({host}) has ended with exit code 7, and all processes", 7
        expected += " here with it: rank 2: a bug"
    assert [process.returncode for process in processes] == [code, code]
    assert outputs == [f"mcore_rl: error: {expected}\n"] * 2


def test_launch_names_port_in_use(launcher: Launcher) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, stderr = launcher.run("here('started')", 2, f"--master-port={port}")
    assert (code, stderr) == (
        2,
        f"mcore_rl: error: --master-port {port} on 127.0.0.1 is in use by another program; give "
        "another one, or none on a single machine, where a free one is taken\n",
    )
    assert not list(launcher.folder.glob("started.*"))


@pytest.mark.slow
def test_launch_prints_reason_of_first_failed_rank_last(launcher: Launcher) -> None:
    code, stderr = launcher.run(
        """
        from mcore_rl.common.agreement import leave_reason
        if rank == 1:
            leave_reason("OSError: the disk is full")
            time.sleep(0.1)
            here("failed")
            sys.exit(1)
        while not (folder / "failed.1").exists():
            time.sleep(0.01)
        leave_reason("RuntimeError: rank 1 is gone")
        sys.exit(1)
        """
    )
    assert code == 1
    assert "program.py FAILED" in stderr
    assert stderr.splitlines()[-1] == "mcore_rl: error: rank 1: OSError: the disk is full"


@pytest.mark.slow
def test_launch_uses_tmp_if_tmpdir_is_too_long(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.temporary = tmp_path / ("long" * 12)
    launcher.temporary.mkdir()
    program = """
        import tempfile
        here("folder", tempfile.gettempdir())
    """
    code, stderr = launcher.run(program, 1)
    assert code == 0
    assert Path((launcher.folder / "folder.0").read_text()).parent == Path("/tmp")
    assert f"TMPDIR {launcher.temporary} is longer than 50 characters" in stderr


@pytest.mark.slow
def test_launch_leaves_no_files_in_temporary_folder(launcher: Launcher) -> None:
    program = """
        import tempfile
        handle, path = tempfile.mkstemp()
        here("path", path)
        here("kept", os.environ["TORCHINDUCTOR_CACHE_DIR"])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    code, _ = launcher.run(program, 1)
    assert code == 128 + signal.SIGKILL
    path = Path((launcher.folder / "path.0").read_text())
    assert path.parent.parent == launcher.temporary and not path.exists()
    # What may be found again by the next run is not in what goes away.
    assert not Path((launcher.folder / "kept.0").read_text()).is_relative_to(path.parent)
    assert {entry.name for entry in launcher.folder.iterdir()} == {"program.py", "path.0", "kept.0"}
    assert not any(launcher.temporary.iterdir())


@pytest.mark.slow
def test_killed_launch_leaves_nothing(launcher: Launcher) -> None:
    """Ranks, their processes, shared memory and the folder."""
    program = """
        import subprocess
        from multiprocessing import shared_memory
        memory = shared_memory.SharedMemory(create=True, size=4096)
        (folder / f"name.{rank}").write_text(memory.name)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = "import time; time.sleep(300)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        here("child", str(child.pid))
        here("tmp", os.environ["TMPDIR"])
        here("pid", str(os.getpid()))
        time.sleep(300)
    """
    process = launcher.start(program, 2)
    pids = launcher.wait_for("pid", 2) + launcher.wait_for("child", 2)
    left = Path((launcher.folder / "tmp.0").read_text())
    segments = launcher.segments(2)
    assert left.is_dir() and all(segment.exists() for segment in segments)
    process.kill()
    process.communicate()  # returns when all have closed their ends
    wait_until(lambda: all_gone(pids))
    wait_until(lambda: not any(segment.exists() for segment in segments))
    wait_until(lambda: not any(launcher.temporary.iterdir()))


@pytest.mark.slow
def test_ranks_of_killed_launch_end(launcher: Launcher) -> None:
    """Even if its guard was killed first; the next launcher then removes the folder."""
    process = launcher.start("here('pid', str(os.getpid()))\ntime.sleep(300)", 1)
    (pid,) = launcher.wait_for("pid", 1)
    (guard,) = [c for c in psutil.Process(process.pid).children() if c.pid != pid]
    assert Path(guard.cmdline()[2]).name == "cleanup.py"
    (foreign := launcher.temporary / "mcore_rl_of_another_program").mkdir()
    (left,) = [entry for entry in launcher.temporary.iterdir() if entry != foreign]
    # A launcher that lives keeps its folder while others start.
    other = Launcher(launcher.folder / "other", launcher.temporary)
    other.folder.mkdir()
    assert other.run("here('done')", 1) == (0, "")
    assert left.is_dir()
    guard.kill()
    process.kill()
    process.communicate()
    wait_until(lambda: not psutil.pid_exists(pid))
    assert left.is_dir()
    assert other.run("here('done')", 1) == (0, "")
    assert list(launcher.temporary.iterdir()) == [foreign]


def last_line_of_killed_rank(launcher: Launcher, action: str) -> str:
    """Rank 1 of 2 ends by SIGKILL in the stage "checkpoint"; the launcher's last line."""
    program = f"""
        from mcore_rl.common.kills import note_stage
        note_stage("checkpoint")
        all_here("up")
        if rank == 1:
            {action}
        time.sleep(600)
    """
    code, stderr = launcher.run(program, 2)
    assert code == 128 + signal.SIGKILL
    last = stderr.splitlines()[-1]
    assert "rank 1 (in stage checkpoint)" in last
    return last


def test_launch_reports_kill_without_memory_counter(launcher: Launcher) -> None:
    last = last_line_of_killed_rank(launcher, "os.kill(os.getpid(), signal.SIGKILL)")
    assert "no out-of-memory counter rose" in last


@pytest.mark.slow
def test_launch_does_not_report_its_own_kill_of_stopped_rank(launcher: Launcher) -> None:
    program = """
        from mcore_rl.common.agreement import leave_reason
        all_here("up")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)
        leave_reason("rank 1 gave no answer")
        os._exit(1)
    """
    code, stderr = launcher.run(program, 2)
    assert code == 1
    assert stderr.splitlines()[-1] == "mcore_rl: error: rank 0: rank 1 gave no answer"


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 1 GiB (cgroup v1 or v2), for processes that enter it by themselves."""
    base = next(
        (path for path in map(Path, ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")) if path.is_dir()),
        None,
    )
    group = (base or Path("/nowhere")) / f"mcore_rl_test_{os.getpid()}"
    try:
        group.mkdir()
        limits = [group / name for name in ("memory.limit_in_bytes", "memory.max")]
        next(limit for limit in limits if limit.exists()).write_text(str(1 << 30))
    except (OSError, StopIteration):
        pytest.skip("no control group of memory can be made here (root and a writable cgroup)")
    yield group
    for _ in range(100):  # until the last process has left it
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


@pytest.mark.slow
def test_launch_reports_kill_by_lack_of_memory(launcher: Launcher, small_group: Path) -> None:
    enter = f'Path("{small_group}/cgroup.procs").write_text(str(os.getpid()))'
    last = last_line_of_killed_rank(
        launcher, f'{enter}; held = [b"x" * (1 << 20) for _ in range(4096)]'
    )
    assert "memory ran out" in last and "mcore-rl plan" in last


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (  # version 2, seen from the machine
            {
                "proc/self/cgroup": "0::/slurm/job_7\n",
                "sys/fs/cgroup/slurm/job_7/memory.events": "low 0\noom 3\noom_kill 2\n",
                "proc/vmstat": "nr_free_pages 7\noom_kill 5\n",
            },
            {THE_GROUP: 2, THE_MACHINE: 5},
        ),
        (  # version 2, in a container: the path is the one outside
            {
                "proc/self/cgroup": "0::/docker/abc\n",
                "sys/fs/cgroup/memory.events": "oom_kill 1\n",
                "proc/vmstat": "oom_kill 5\n",
            },
            {THE_GROUP: 1, THE_MACHINE: 5},
        ),
        (  # version 1, beside an empty version 2
            {
                "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 4\n",
            },
            {THE_GROUP: 4},
        ),
        ({}, {}),
        ({"proc/vmstat": "oom_kill many\n", "proc/self/cgroup": "7:cpu:/\n"}, {}),
    ],
)
def test_memory_kills_are_read_from_kernel_counters(
    files: dict[str, str], expected: dict[str, int], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_kills(tmp_path) == expected


def test_kills_are_described_by_risen_counter() -> None:
    before, after = {THE_GROUP: 1, THE_MACHINE: 5}, {THE_GROUP: 2, THE_MACHINE: 7}
    assert f"{THE_GROUP} rose by 1" in describe_kills({3: "train"}, before, after)
    assert f"{THE_MACHINE} rose by 2" in describe_kills({}, before, {**after, THE_GROUP: 1})
    assert "no out-of-memory counter" in describe_kills({3: ""}, before, before)
    assert "SIGKILL ended rank 3; " in (unknown := describe_kills({3: ""}, {}, {}))
    assert "memory may have run out" in unknown
    assert describe_kills({}, before, before) == describe_kills({}, {}, {}) == ""


@pytest.mark.parametrize(
    ("code", "described"),
    [(7, "exit code 7"), (-11, "SIGSEGV"), (-40, "signal 40"), (-9, "SIGKILL, which the kernel")],
)
def test_exit_is_described_by_code_or_signal(code: int, described: str) -> None:
    assert describe_exit(code).startswith(described)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["pipe", "lock is a pipe", "lock is a link", "lock is a device"])
def test_launch_ignores_foreign_files_in_temporary_folder(
    launcher: Launcher, what: str, tmp_path: Path
) -> None:
    other = launcher.temporary / "mcore_rl_other"
    if what == "pipe":
        os.mkfifo(other)
    else:
        other.mkdir()
        lock = lock_of(other)
        if what == "lock is a pipe":
            os.mkfifo(lock)
        else:
            lock.symlink_to("/dev/zero" if what == "lock is a device" else tmp_path / "victim")
    (tmp_path / "victim").touch()
    code, err = launcher.run("here('ran')", 1)
    assert (code, err) == (0, "")
    assert other.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "flags"),
    [
        ("SLURM_STEP_NUM_TASKS", "8", ()),
        ("SLURM_STEP_NUM_TASKS", "16", ("--nnodes", "2")),
        ("OMPI_COMM_WORLD_SIZE", "2", ()),
    ],
)
def test_launch_is_refused_if_started_more_than_once_per_node(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, name: str, count: str, flags: Sequence[str]
) -> None:
    monkeypatch.setenv(name, count)
    code, err = launcher.run("here('ran')", 1, *flags)
    assert code == 2
    assert f"{name} {count}" in err and "--ntasks-per-node=1" in err
    assert not list(launcher.folder.glob("ran.*"))


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "/opt/cuda"])
def test_ranks_get_the_compiler_of_the_packages_unless_another_is_named(
    given: str | None, tmp_path: Path
) -> None:
    """FlashInfer looks for nvcc in CUDA_HOME and for ninja in PATH."""
    toolkit, ninja = tmp_path / "nvidia" / "cu13", tmp_path / "ninja"
    (toolkit / "bin").mkdir(parents=True)
    for file in (toolkit / "bin" / "nvcc", ninja):
        file.touch(mode=0o755)
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, shutil\nprint(os.environ['CUDA_HOME'], shutil.which('ninja'), flush=True)"
    )
    program = f"""
        import sys, sysconfig
        from mcore_rl.launch.launcher import main
        find = sysconfig.get_path
        own = ("purelib", "scripts")
        sysconfig.get_path = lambda name, *a: {str(tmp_path)!r} if name in own else find(name, *a)
        sys.exit(main(["--nproc-per-node", "1", {str(rank)!r}]))
    """
    environment = {
        **os.environ,
        "PATH": str(tmp_path / "none"),
        **({"CUDA_HOME": given} if given else {}),
    }
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout.split() == [given or str(toolkit), str(ninja)], ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "given"), [(1, None), (2, None), (1, "3")])
def test_ranks_share_the_cores_unless_threads_are_given(
    num_ranks: int, given: str | None, tmp_path: Path
) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text("import os\nprint(os.environ['OMP_NUM_THREADS'], flush=True)")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run(
        [sys.executable, "-m", "mcore_rl.launch", "--nproc-per-node", str(num_ranks), str(rank)],
        env=environment | ({"OMP_NUM_THREADS": given} if given else {}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    threads = 1 if torch.cuda.is_available() else max(1, available_cores() // num_ranks)
    assert ended.stdout.split() == [given or str(threads)] * num_ranks, ended.stderr


def test_a_process_that_ends_at_once_has_done_what_python_does_at_the_end(tmp_path: Path) -> None:
    """It waits for other threads, but not for idle ones of an executor, calls the exit handlers,
    and writes what is in its buffers; what modules hold is not torn down."""
    script = textwrap.dedent(
        """
        import atexit, concurrent.futures, threading, time
        from mcore_rl.common.exits import end_at_once

        class Held:
            def __del__(self):
                print("torn down")

        held = Held()
        atexit.register(print, "exit handler")
        idle = concurrent.futures.ThreadPoolExecutor(1)
        idle.submit(time.time).result()
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        print("main")
        end_at_once(7)
        """
    )
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 7
    assert ended.stdout.split("\n") == ["main", "thread", "exit handler", ""]
