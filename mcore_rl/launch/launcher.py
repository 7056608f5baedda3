"""A torchrun that exits with the ranks' exit code: 2, with one sentence, for a user's mistake.

    python -m mcore_rl.launch <torchrun's flags> -m mcore_rl.train <Megatron and --rl-* flags>

A user's mistake ends with one sentence, which any rank may have left in its error file (see
`agreement`). Any other failure keeps torchrun's table, followed by the first failing rank's reason.

Every signal that ends this process ends the ranks by SIGTERM: on SIGINT each would unwind its
stack, and wait there for the others. Ranks that do not end within `SHUTDOWN_SECONDS` are killed; a
second signal shortens that. No process that the ranks started outlives this one, and nothing is
left in their temporary folder. If this process is killed, the kernel kills the ranks, and `cleanup`
ends what they have started and removes the folder; the next launcher does if that is killed as
well.

On several machines one launcher's failure, or its disappearance, ends the ranks of all others with
the same exit code and a sentence that names the machine: see `peers`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

import psutil
import torch
import torch.distributed.run as torchrun
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from mcore_rl.common.agreement import COMMAND, EXIT_USAGE, LAUNCHER, print_error
from mcore_rl.common.errors import UsageError
from mcore_rl.common.kills import memory_kills
from mcore_rl.common.machine import available_cores, threads_per_rank
from mcore_rl.common.run_output import keep_output_from_raising
from mcore_rl.flags.parser import HELP_RL
from mcore_rl.job.environment import check_num_tasks, use_own_toolkit
from mcore_rl.launch import cleanup, ending
from mcore_rl.launch.flags import check_flags, meeting_place, port_fault
from mcore_rl.launch.folder import temporary_folder
from mcore_rl.launch.peers import Peers, store_client
from mcore_rl.patches.registry import apply_patch
from mcore_rl.patches.torch import ranks_end_with_launcher
from mcore_rl.patches.torch.loopback_stores import stay_on_loopback

SHUTDOWN_SECONDS = 10
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# Their messages are shown if a rank failed; after a user's mistake or a signal they are noise.
_SHUTDOWN_LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)


def main(tokens: Sequence[str] | None = None) -> int:
    """Run torchrun on `tokens` (default: the command line) in this process; return the exit code.

    To be called at the end of a program: afterwards this process ignores the signals that end it.
    """
    given = sys.argv[1:] if tokens is None else list(tokens)
    keep_output_from_raising()
    try:
        if HELP_RL in given:
            _print_help(given)
            return 0
        parser = torchrun.get_args_parser()
        parser.prog = "python -m mcore_rl.launch"
        args = parser.parse_args(given)
        _prepare(args)
    except UsageError as error:
        print_error(str(error))
        return EXIT_USAGE
    peers, withheld = _peers(args), _withheld_log()
    with temporary_folder() as folder:
        if args.log_dir is None and args.redirects == "0" and args.tee == "0":
            args.log_dir = folder  # for torchrun's files, unless logs were requested
        with _no_process_left(folder):
            ended = _run(args, peers, folder, withheld)
        if peers is not None:
            peers.end(ended.exit_code, ended.sentence)
    if ended.table:
        for entry in withheld:
            logging.getLogger("torch.distributed.elastic").handle(entry)
    if ended.message:
        # Not by a logger: this is the program's answer to its user, without a level or a name.
        print(ended.message, file=sys.stderr, flush=True)
    return ended.exit_code


def _print_help(tokens: Sequence[str]) -> None:
    """Print help on our flags and those of `--rl-import`, without ranks."""
    from mcore_rl.flags.pages import help_text  # imports the algorithms, which are not needed here
    from mcore_rl.flags.parsed_flags import import_given_files

    import_given_files(tokens)
    print(help_text(), end="")


def _prepare(args: argparse.Namespace) -> None:
    """Check torchrun's flags, and set what its ranks inherit."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    use_own_toolkit()
    ranks = check_flags(args)
    # torchrun would set it to 1 for several ranks, and print a banner.
    threads = threads_per_rank(
        ranks, has_gpu=torch.cuda.is_available(), num_cores=available_cores()
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    num_nodes = torchrun.parse_min_max_nnodes(args.nnodes)[1]
    if num_nodes == 1:
        # A single machine's name need not resolve to an address at which it can reach itself.
        args.local_addr = args.local_addr or "127.0.0.1"
    check_num_tasks(num_nodes)
    stay_on_loopback(meeting_place(args))
    apply_patch(ranks_end_with_launcher.PATCH)
    os.environ[LAUNCHER] = f"{os.getpid()}-{time.time_ns()}"
    os.environ[COMMAND] = shlex.join(sys.orig_argv)


def _peers(args: argparse.Namespace) -> Peers | None:
    """Return the other machines' launchers, if torchrun itself does not connect them."""
    num_nodes = torchrun.parse_min_max_nnodes(args.nnodes)[1]
    if args.rdzv_backend != "static" or num_nodes == 1:
        return None
    address, _, port = torchrun.get_rdzv_endpoint(args).rpartition(":")
    address = address.strip("[]")
    peers = Peers(args.node_rank, num_nodes, lambda: os.kill(os.getpid(), signal.SIGHUP))
    ranks_end_with_launcher.before_ranks.append(
        lambda: peers.connect(store_client(address, int(port)), address)
    )
    return peers


def _withheld_log() -> list[logging.LogRecord]:
    """Return a list that collects torchrun's messages on ending its ranks, which are not shown."""
    entries: list[logging.LogRecord] = []

    def withhold(entry: logging.LogRecord) -> bool:
        entries.append(entry)
        return False

    for name in _SHUTDOWN_LOGGERS:
        logging.getLogger(name).addFilter(withhold)
    return entries


def _run(
    args: argparse.Namespace,
    peers: Peers | None,
    folder: str,
    messages: Sequence[logging.LogRecord],
) -> ending.Ending:
    """Run torchrun, which logs `messages` on ending its ranks."""
    kills_before, received = memory_kills(), list[signal.Signals]()
    try:
        with _signals_handled(args, received):
            torchrun.run(args)
        return ending.Ending(0)
    except ChildFailedError as error:
        return ending.failed(error, kills_before, folder, messages)
    except DistNetworkError as error:
        if (fault := port_fault(args, str(error))) is None:
            raise
        return ending.Ending(EXIT_USAGE, str(fault))
    except SignalException as stopped:
        if peers is not None and peers.failed is not None:
            return ending.stopped_with(peers.failed)
        return ending.stopped_by(received[0] if received else stopped.sigval)


@contextlib.contextmanager
def _signals_handled(args: argparse.Namespace, received: list[signal.Signals]) -> Iterator[None]:
    """Raise what torchrun takes for a SIGTERM on each signal that ends a process, while inside.

    Afterwards these signals are ignored. Signals that a user adds are left to torchrun.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        received.append(signal.Signals(number))
        raise SignalException(f"stopped by {received[-1].name}", sigval=signal.SIGTERM)

    for number in cleanup.ENDING_SIGNALS:
        signal.signal(number, stop)
    ours = {number.name for number in cleanup.ENDING_SIGNALS} - {"SIGTERM"}
    kept = [name for name in args.signals_to_handle.split(",") if name.strip() not in ours]
    args.signals_to_handle = ",".join(kept)
    try:
        yield
    finally:
        for number in cleanup.ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _no_process_left(folder: str) -> Iterator[None]:
    """End all processes that were started inside, also if this process is killed while inside."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphans become children of this process.
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    guard = subprocess.Popen(
        [sys.executable, "-I", cleanup.__file__, f"{LAUNCHER}={os.environ[LAUNCHER]}", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's signals must not reach it
    )
    try:
        yield
    finally:
        cleanup.end_processes(lambda: [pid for pid in _descendants() if pid != guard.pid])
        guard.kill()
        guard.wait()


def _descendants() -> list[int]:
    """Return the processes below this one, without children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    return [process.pid for process in psutil.Process().children(recursive=True)]
