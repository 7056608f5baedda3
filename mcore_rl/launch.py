"""A torchrun that exits with the ranks' exit code: 2, with one sentence, for a user's mistake.

    python -m mcore_rl.launch <torchrun's flags> -m mcore_rl.train <Megatron and --rl-* flags>

torchrun answers every failure with 1, a traceback of its own and a table. Here a user's mistake
ends with the ranks' exit code and nothing but one sentence, which any rank may have left (see
`agreement`): torchrun ends the others after the first exit, before they can report it. Any other
failure keeps the table, followed by what the first failing rank left.

A signal that ends this process, whichever it is, ends the ranks by SIGTERM: on SIGINT each would
unwind its stack, and wait there for the others. What does not end within `SHUTDOWN_SECONDS` is
killed; a second signal shortens that. No process that the ranks started outlives this one, and
nothing is left in their temporary folder, which belongs to this run alone. If this process itself
is killed, the kernel kills the ranks, and `guard` ends what they have started and removes the
folder; the next launcher does so if the guard is gone as well.

On several machines one launcher's failure, or its disappearance, ends the ranks of all others with
the same exit code and a sentence that names the machine: see `companions`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import getpass
import logging
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil
import torch.distributed.run as torchrun
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mcore_rl.common.agreement import (
    COMMAND,
    EXIT_ALARM,
    EXIT_FAILED,
    EXIT_USAGE,
    LAUNCHER,
    check_num_tasks,
    print_error,
)
from mcore_rl.common.companions import Companions, Ended, store_client
from mcore_rl.common.errors import UsageError
from mcore_rl.common.kills import describe_kills, memory_kills, noted_stage
from mcore_rl.common.launch_flags import check_flags, meeting_place
from mcore_rl.common.loopback import stay_on_loopback
from mcore_rl.common.run_output import keep_output_from_raising
from mcore_rl.flags.parser import HELP_RL
from mcore_rl.patches.registry import apply_patch
from mcore_rl.patches.torch import ranks_end_with_launcher

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 10
_LEFTOVER_SECONDS = 3
# For multiprocessing's trackers, which remove a dead rank's shared memory and then end; at once,
# unless the machine is busy.
_TRACKER_SECONDS = 20
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# In addition to SIGTERM, which torchrun may handle.
_OTHER_ENDING_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Shown when a rank failed; noise when a user's mistake or a signal ended the run.
_SHUTDOWN_LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)
# A socket's path may have 107 characters, of which Megatron's writer and vLLM need 55 below it.
_LONGEST_TEMPORARY_FOLDER = 50
_GUARD = str(Path(__file__).parent / "common" / "guard.py")
_PREFIX = "mcore_rl_"
_OWNER = "launcher.lock"  # in the temporary folder, locked by the launcher while it lives
# torchrun sends them to the other ranks after a failure; they carry no information about it.
_SENT_BY_TORCHRUN = (-signal.SIGKILL, -signal.SIGTERM)


def main(tokens: Sequence[str] | None = None) -> int:
    """Run torchrun on `tokens` (default: the command line) in this process; return the exit code.

    To be called at the end of a program: afterwards this process ignores the signals that end it.
    """
    given = sys.argv[1:] if tokens is None else list(tokens)
    keep_output_from_raising()
    if HELP_RL in given:
        return _print_help(given)
    args = torchrun.parse_args(given)
    # torchrun would set it, too, but print a banner.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    try:
        check_flags(args)
        num_nodes = torchrun.parse_min_max_nnodes(args.nnodes)[1]
        if num_nodes == 1:
            # A single machine's name need not resolve to an address at which it can reach itself.
            args.local_addr = args.local_addr or "127.0.0.1"
        check_num_tasks(num_nodes)
        stay_on_loopback(meeting_place(args))
        apply_patch(ranks_end_with_launcher.PATCH)
    except UsageError as error:
        print_error(str(error))
        return EXIT_USAGE
    os.environ[LAUNCHER] = f"{os.getpid()}-{time.time_ns()}"
    os.environ[COMMAND] = shlex.join(sys.orig_argv)
    _handle_signals(args)
    _adopt_orphans()
    companions = _companions(args)
    with (
        _held_back(_SHUTDOWN_LOGGERS) as entries,
        _temporary_folder() as folder,
        _guarded(folder),
    ):
        if args.log_dir is None and args.redirects == "0" and args.tee == "0":
            args.log_dir = folder  # for torchrun's files, unless logs were requested
        ending = _run(args, companions)
        if companions is not None:
            companions.end(ending.exit_code, ending.sentence)
    if ending.with_log:
        for entry in entries:
            logging.getLogger(entry.name).handle(entry)
    if ending.message:
        # Not by a logger: this is the program's answer to its user, without a level or a name.
        print(ending.message, file=sys.stderr, flush=True)
    return ending.exit_code


def _print_help(tokens: Sequence[str]) -> int:
    """Print help on our flags and those of `--rl-import`, without ranks."""
    from mcore_rl.flags.given import import_given_files
    from mcore_rl.flags.pages import help_text  # imports the algorithms, which are not needed here

    try:
        import_given_files(tokens)
        print(help_text(), end="")
    except UsageError as error:
        print_error(str(error))
        return EXIT_USAGE
    return 0


def _companions(args: argparse.Namespace) -> Companions | None:
    """Connect to the launchers of other machines if torchrun itself does not."""
    num_nodes = torchrun.parse_min_max_nnodes(args.nnodes)[1]
    if args.rdzv_backend != "static" or num_nodes == 1:
        return None
    address, _, port = torchrun.get_rdzv_endpoint(args).rpartition(":")
    address = address.strip("[]")

    companions = Companions(
        args.node_rank,
        num_nodes,
        address,
        connect=lambda: store_client(address, int(port)),
        on_failure=lambda: os.kill(os.getpid(), signal.SIGHUP),
    )
    companions.start()
    ranks_end_with_launcher.before_a_rank.append(companions.wait)
    return companions


def exit_code(codes: Collection[int]) -> int:
    """Return the exit code of a run whose failed ranks ended with `codes`, in order of time.

    Negative codes are signals. Ranks that ended by themselves decide, not those that torchrun ended
    as a consequence: the first code other than 2, else 2. If signals ended all of them, it is 128 +
    the signal, with SIGKILL before SIGTERM, since torchrun sends SIGTERM first.
    """
    decisive = [code for code in codes if code not in _SENT_BY_TORCHRUN]
    if not decisive:
        decisive = [max(codes)]
    code = next((code for code in decisive if code != EXIT_USAGE), EXIT_USAGE)
    return code if code > 0 else 128 - code


@dataclass(frozen=True, slots=True)
class _Ending:
    """The end of a run: its exit code and message, and whether to show torchrun's log of it."""

    exit_code: int
    message: str = ""
    with_log: bool = False

    @property
    def sentence(self) -> str:
        """The message's last line, for the launchers of other machines."""
        last = self.message.rpartition("\n")[2]
        return last.removeprefix("mcore_rl: ").removeprefix("error: ")


def _run(args: argparse.Namespace, companions: Companions | None) -> _Ending:
    try:
        return _run_ranks(args, memory_kills())
    except SignalException as stopped:
        if companions is not None and companions.failed is not None:
            return _ending_elsewhere(companions.failed)
        number = stopped.number if isinstance(stopped, _Stopped) else stopped.sigval
        return _Ending(
            128 + number, f"mcore_rl: stopped by {number.name}, all processes have ended"
        )
    finally:
        _end_leftovers()


def _run_ranks(args: argparse.Namespace, kills_before: Mapping[str, int]) -> _Ending:
    try:
        torchrun.run(args)
        return _Ending(0)
    except ChildFailedError as error:
        return _ending_of_failure(error, kills_before)
    except DistNetworkError as error:
        if not (sentence := _port_not_free(args, str(error))):
            raise
        return _Ending(EXIT_USAGE, sentence)


def _ending_elsewhere(ended: Ended) -> _Ending:
    where = f"node {ended.node} ({ended.host})"
    if ended.exit_code is None:
        what = f"the launcher of {where} is gone, or its machine is"
        return _Ending(EXIT_FAILED, f"mcore_rl: error: {what}: all processes here have ended, too")
    if ended.exit_code == EXIT_USAGE:
        return _Ending(EXIT_USAGE, f"mcore_rl: error: {ended.sentence}")
    why = f": {ended.sentence}" if ended.sentence else ""
    what = f"{where} has ended with exit code {ended.exit_code}, and all processes here with it"
    return _Ending(ended.exit_code, f"mcore_rl: error: {what}{why}")


def _ending_of_failure(error: ChildFailedError, kills_before: Mapping[str, int]) -> _Ending:
    in_time = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
    code = exit_code([failure.exitcode for failure in in_time])
    if code == EXIT_ALARM:  # rank 0 has reported the reason
        return _Ending(code)
    if code != EXIT_USAGE:
        last = _of_kills(error, kills_before) or _last_line(error)
        return _Ending(code, error.format_msg() + last, with_log=True)
    for rank, reason in _reasons(error):
        if error.failures[rank].exitcode == EXIT_USAGE:
            return _Ending(code, f"mcore_rl: error: {reason}")
    rank = next(r for r, failure in error.failures.items() if failure.exitcode == EXIT_USAGE)
    return _Ending(
        code, f"mcore_rl: error: rank {rank} ended with exit code {code}; see what it printed"
    )


def _of_kills(error: ChildFailedError, kills_before: Mapping[str, int]) -> str:
    """Return which ranks were killed and whether memory ran out, for below torchrun's table."""
    folder, stages = os.environ["TMPDIR"], {}
    for rank, failure in sorted(error.failures.items()):
        if failure.exitcode == -signal.SIGKILL:
            stages[rank] = noted_stage(folder, failure.pid)
    said = describe_kills(stages, kills_before, memory_kills())
    return said and f"\nmcore_rl: error: {said}"


def _last_line(error: ChildFailedError) -> str:
    """Return why the first rank failed, for below torchrun's table; "" if its output shows it."""
    rank, first = error.get_first_failure()
    if first.exitcode < 0 and not _reason(first):  # others then miss it, and report that
        return f"\nmcore_rl: error: rank {rank}: {first.message}"
    return "".join(f"\nmcore_rl: error: rank {rank}: {text}" for rank, text in _reasons(error)[:1])


def _reasons(error: ChildFailedError) -> list[tuple[int, str]]:
    """Return the reasons that ranks left in their error files, by time in nanoseconds."""
    found = [
        (os.stat(failure.error_file).st_mtime_ns, rank, reason)
        for rank, failure in error.failures.items()
        if (reason := _reason(failure))
    ]
    return [(rank, reason) for _, rank, reason in sorted(found)]


def _reason(failure: ProcessFailure) -> str:
    message = failure.error_file_data.get("message")
    return str(message["message"]) if isinstance(message, Mapping) else ""


def _port_not_free(args: argparse.Namespace, error: str) -> str:
    """Return the message on a port that cannot be listened on; "" for any other error."""
    found = {"EADDRINUSE": "is in use by another program", "EACCES": "is not for this user"}
    for name, what in found.items():
        if name in error:
            port = f"--rdzv-endpoint {args.rdzv_endpoint}"
            if not args.rdzv_endpoint:
                port = f"--master-port {args.master_port} on {args.master_addr}"
            remedy = "give another one, or none on a single machine, where a free one is taken"
            return f"mcore_rl: error: {port} {what}; {remedy}"
    return ""


class _Stopped(SignalException):
    """The signal `number`, which torchrun, forwarding `sigval`, takes for a SIGTERM."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}", sigval=signal.SIGTERM)
        self.number = number


def _handle_signals(args: argparse.Namespace) -> None:
    """Handle the ending signals here; torchrun keeps SIGTERM and those that a user adds."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _Stopped(signal.Signals(number))

    for number in _OTHER_ENDING_SIGNALS:
        signal.signal(number, stop)
    names = {number.name for number in _OTHER_ENDING_SIGNALS}
    kept = [name for name in args.signals_to_handle.split(",") if name.strip() not in names]
    args.signals_to_handle = ",".join(kept)


def _adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that it can end them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


@contextlib.contextmanager
def _guarded(folder: str) -> Iterator[None]:
    """Run a guard process, which ends what is left if this process is killed while inside."""
    guard = subprocess.Popen(
        [sys.executable, "-I", _GUARD, f"{LAUNCHER}={os.environ[LAUNCHER]}", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's signals must not reach it
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()


def _end_leftovers() -> None:
    """End all processes below this one: kill ranks, and give the others time to end by themselves.

    Ranks are left if a second signal interrupted torchrun's waiting for them. The trackers of ended
    ranks are children of this process by then, as ranks are. Wait for them: a killed one would
    leave the shared memory that it is about to remove.
    """
    for number in (signal.SIGTERM, *_OTHER_ENDING_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    this = psutil.Process()
    below = this.children(recursive=True)
    others = [process for process in below if not _is_tracker(process)]
    ranks = [child for child in this.children() if child in others]
    for processes, seconds in (
        (ranks, _LEFTOVER_SECONDS),
        (others, _TRACKER_SECONDS),
        (below, _LEFTOVER_SECONDS),
    ):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=seconds)


def _is_tracker(process: psutil.Process) -> bool:
    """Return whether `process` is multiprocessing's resource tracker, which outlives its users."""
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    return False


@contextlib.contextmanager
def _held_back(names: Sequence[str]) -> Iterator[list[logging.LogRecord]]:
    """Hold back and collect the records of the loggers `names`."""
    entries: list[logging.LogRecord] = []

    def hold(entry: logging.LogRecord) -> bool:
        entries.append(entry)
        return False

    for name in names:
        logging.getLogger(name).addFilter(hold)
    try:
        yield entries
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(hold)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """Create the ranks' TMPDIR and remove it afterwards: a killed rank removes nothing itself.

    Caches that outlive a run stay where they were.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _kernel_cache())
    where = tempfile.gettempdir()
    if len(where) > _LONGEST_TEMPORARY_FOLDER:
        logger.warning(
            "TMPDIR %s is longer than %d characters and leaves no room for the names of sockets: "
            "the ranks use /tmp",
            where,
            _LONGEST_TEMPORARY_FOLDER,
        )
        where = "/tmp"
    _remove_leftovers(Path(where))
    with (
        tempfile.TemporaryDirectory(
            dir=where, prefix=_PREFIX, ignore_cleanup_errors=True
        ) as folder,
        _owned(Path(folder)),
    ):
        os.environ["TMPDIR"] = folder
        yield folder


def _kernel_cache() -> str:
    """Return torch's default folder of compiled kernels; to ask torch costs a second of imports."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Show other launchers, while inside, that this process lives: a dead one holds no lock."""
    partial = folder / f"{_OWNER}.partial"
    with partial.open("w", encoding="utf-8") as file:
        with contextlib.suppress(OSError):  # without file locks the folder is never removed
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(_boot())
            file.flush()
            partial.rename(folder / _OWNER)  # never seen without its lock
        yield


def _remove_leftovers(where: Path) -> None:
    """Remove the temporary folders of this user's killed launchers on this machine.

    Other users write there, too: open nothing before it is known to be in a folder of this user,
    and then neither follow links nor wait.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    for folder in where.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            with open(os.open(folder / _OWNER, flags), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                # On a network file system only one machine may know of a lock.
                if is_file and file.read(len(_boot()) + 1) == _boot().encode():
                    shutil.rmtree(folder, ignore_errors=True)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
