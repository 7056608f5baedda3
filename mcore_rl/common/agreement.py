"""Ranks agree on a failure before any of them exits, so that no rank waits for a dead one.

Before Megatron runs there are no process groups, only the launcher's rendezvous store. It is
enough to exchange one sentence per rank.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from mcore_rl.common.errors import UsageError
from mcore_rl.common.run_output import patient_stderr, patient_stdout

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

EXIT_FAILED = 1  # the run cannot continue; also Python's code for an unhandled exception
EXIT_USAGE = 2
EXIT_ALARM = os.EX_TEMPFAIL  # 75: ended by --rl-on-alarm stop, with everything saved
# `mcore_rl.launch` sets it for its descendants, whose error files it prints.
LAUNCHER = "MCORE_RL_LAUNCHER"
COMMAND = "MCORE_RL_COMMAND"  # the command that the user started it with
# Variables that a launcher sets, with their smallest and largest values.
_MOST_RANKS = (1 << 31) - 1
_NUMBERS = {
    "RANK": (0, _MOST_RANKS - 1),
    "WORLD_SIZE": (1, _MOST_RANKS),
    "LOCAL_RANK": (0, _MOST_RANKS - 1),
    "LOCAL_WORLD_SIZE": (1, _MOST_RANKS),
    "GROUP_WORLD_SIZE": (1, _MOST_RANKS),
    "MASTER_PORT": (0, 65535),
}
_REMEDY = "start with mcore_rl.launch or torchrun, or set what they set"
# Variables with the number of tasks that a command was started as, and the program that sets them.
_TASK_COUNTS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "FLUX_JOB_SIZE": "flux run",
}


def open_store() -> Store | None:
    """Return this job's rendezvous store, or None in a single process without a launcher.

    Ends this process with exit code 2 if a launcher sets only some of RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT, sets one to an invalid number or address, or starts more tasks than belong to
    one run, and if the store cannot be reached. Variables that are blank are unset. Without a store
    the ranks cannot agree, but all of them have the same variables.
    """
    for name in (*_NUMBERS, "MASTER_ADDR"):
        if not os.environ.get(name, name).strip():
            del os.environ[name]  # torch and Megatron would parse it as a number
    present = [name for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)]
    if not present or (present == ["WORLD_SIZE"] and os.environ["WORLD_SIZE"].strip() == "1"):
        try:
            # MASTER_PORT is not read here; a Kubernetes service may have set it.
            _check_numbers("LOCAL_RANK", "LOCAL_WORLD_SIZE")
            check_num_tasks(1)
        except UsageError as error:
            leave_with(error)
        return None
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        leave_with(
            UsageError(
                f"the environment has {' and '.join(present)} but lacks {' and '.join(missing)}",
                remedy=_REMEDY,
            )
        )
    try:
        _check_numbers(*_NUMBERS)
        _check_place()
        # Under torchrun the tasks are its agents; otherwise they are the ranks.
        check_num_tasks(int(os.environ.get("GROUP_WORLD_SIZE") or os.environ["WORLD_SIZE"]))
    except UsageError as error:
        leave_with(error)
    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    # Imported late: it imports torch, which the errors above do not need.
    from mcore_rl.common.loopback import stay_on_loopback

    try:
        stay_on_loopback(os.environ["MASTER_ADDR"])
    except UsageError as error:
        leave_with(error)
    try:
        store: Store = next(iter(rendezvous("env://", timeout=timedelta(minutes=10))))[0]
    except DistError as error:
        leave_with(
            UsageError(
                f"is not where the ranks of a job can meet ({str(error).splitlines()[0]})",
                flag=f"MASTER_ADDR {os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']},",
                remedy="give the address of rank 0's machine and a free port there, and start all "
                "WORLD_SIZE ranks",
            )
        )
    return store


def _check_numbers(*names: str) -> None:
    """Raise UsageError for a variable of `names` that is not a number in its range."""
    for name in names:
        least, most = _NUMBERS[name]
        text = os.environ.get(name, str(least)).strip()
        if not (text.isdecimal() and len(text) <= 10 and least <= int(text) <= most):
            raise UsageError(
                f"is not a number from {least} to {most}",
                flag=f"{name} '{text[:20]}'",
                remedy=_REMEDY,
            )


def _check_place() -> None:
    """Raise UsageError for a rank outside the world or an invalid MASTER_ADDR."""
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if int(rank) >= int(world_size):
        raise UsageError(
            f"is not below WORLD_SIZE {world_size}: ranks count from 0",
            flag=f"RANK {rank}",
            remedy=_REMEDY,
        )
    address = os.environ["MASTER_ADDR"]
    try:
        is_address = bool(ipaddress.ip_address(address))
    except ValueError:
        is_address = bool(re.fullmatch(r"[\w.-]+", address))
    if not is_address:  # torch would look it up for ten minutes
        raise UsageError(
            "is not a host name or an IP address",
            flag=f"MASTER_ADDR '{address}'",
            remedy="drop brackets, blanks and the port, which is MASTER_PORT",
        )


def check_num_tasks(most: int) -> None:
    """Raise UsageError if srun, mpirun or the like starts this command as more than `most` tasks.

    Such tasks do not know each other: each would be a separate run.
    """
    for name, program in _TASK_COUNTS.items():
        count = os.environ.get(name, "").strip()
        if count.isdecimal() and int(count) > most:
            raise UsageError(
                f"says that {program} starts this command as {count} tasks, but only {most} "
                f"{'belongs' if most == 1 else 'belong'} to one run",
                flag=f"{name} {count}",
                remedy="start one `python -m mcore_rl.launch --nnodes NODES --nproc-per-node "
                "DEVICES ...` a node (srun --ntasks-per-node=1), set RANK, WORLD_SIZE, LOCAL_RANK, "
                f"MASTER_ADDR and MASTER_PORT for each task, or unset {name} if these are to be "
                "independent runs",
            )


def agreed(check: Callable[[], T], store: Store | None, *, stage: str) -> T:
    """Run `check` on every rank and return its result, if it succeeded on all of them.

    Collective over the world, through `store` (None: one process). If it raised UsageError
    anywhere, the first failing rank's sentence is printed (with its host, if others succeeded) and
    every rank exits with code 2. Other exceptions are bugs: they are reported to the other ranks,
    which stop too, and propagate here.
    """
    from torch.distributed import PrefixStore

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    result: list[T] = []
    failure, bug = "", None
    try:
        result.append(check())
    except UsageError as error:
        # A parser's message about a file may have several lines.
        failure = " ".join(line.strip() for line in str(error).splitlines())
    except Exception as error:  # a bug: reported to the other ranks, then raised here
        failure = f"failed while checking its input: {error!r}"
        bug = error
    failures, scoped = [failure], None
    if store is not None and world_size > 1:
        scoped = PrefixStore(f"mcore_rl/{stage}", store)
        scoped.set(str(rank), failure and f"{socket.gethostname()}\n{failure}")
        # get() blocks until the key is set, so this is also the barrier.
        failures = [scoped.get(str(other)).decode() for other in range(world_size)]
    if not any(failures):
        if scoped is not None:
            _wait_until_all_have_read(scoped, rank, world_size)
        return result[0]
    if bug is None:
        _tell(_sentence(failures) if scoped is not None else failure)
    if scoped is not None:
        _leave_after_the_others(scoped, rank, world_size)
    if bug is not None:
        raise bug
    _leave()


def from_rank(rank: int, text: str, store: Store | None, *, stage: str) -> str:
    """Return one rank's `text` on all ranks. Collective, after `agreed` with the same `stage`."""
    from torch.distributed import PrefixStore

    if store is None or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return text
    scoped = PrefixStore(f"mcore_rl/{stage}", store)
    if int(os.environ["RANK"]) == rank:
        scoped.set("said", text)
    return scoped.get("said").decode()


def check_alike(facts: Mapping[str, str], store: Store | None) -> None:
    """Refuse ranks on which one of `facts`, by name, differs from rank 0. Collective.

    The flags typed or packages installed on each machine may differ by mistake. This would show
    much later, in shapes that do not match, or not at all.
    """
    first = json.loads(from_rank(0, json.dumps(facts), store, stage="facts"))

    def check() -> None:
        for name in sorted({*first, *facts}):
            mine, other = facts.get(name, "not given"), first.get(name, "not given")
            if mine != other:
                raise UsageError(
                    f"is {mine} here and {other} on rank 0",
                    flag=name,
                    remedy="start all machines with the same flags and the same packages",
                )

    agreed(check, store, stage="alike")


def agreed_in_world(check: Callable[[], T]) -> T:
    """Do what `agreed` does once torch.distributed runs. Collective over its world."""
    from mcore_rl.common import objects

    result: list[T] = []
    failure = ""
    try:
        result.append(check())
    except UsageError as error:
        failure = f"{socket.gethostname()}\n{error}"
    failures = objects.all_gather(failure)
    if not any(failures):
        return result[0]
    _tell(_sentence(failures))
    leave_together(EXIT_USAGE)


def _sentence(failures: list[str]) -> str:
    """Return the first failing rank's text, with rank and host unless all ranks failed."""
    failing = [rank for rank, text in enumerate(failures) if text]
    host, _, text = failures[failing[0]].partition("\n")
    if len(failing) == len(failures):
        return text
    return f"on rank {failing[0]} (host {host}): {text}"


def leave_with(error: UsageError) -> NoReturn:
    """Report a mistake that every rank finds by itself, and end this process with exit code 2."""
    _tell(str(error))
    _leave()


def leave_together(exit_code: int) -> NoReturn:
    """End all ranks with this code, after all of them have arrived here. Collective."""
    from mcore_rl.common import objects

    objects.barrier()
    patient_stdout().flush()
    patient_stderr().flush()
    os._exit(exit_code)


def _tell(sentence: str) -> None:
    """Report the sentence on stderr, whichever of the failing ranks ends first.

    The first rank to exit makes the launcher end the others, perhaps rank 0 before it has printed.
    So each rank writes the sentence into the error file that torchrun reads once a rank has failed:
    `mcore_rl.launch` prints it once, and torchrun shows it in its table, below rank 0's output.
    """
    if leave_reason(sentence) and LAUNCHER in os.environ:
        return
    rank, world_size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    # Rank 0 prints for all; a process with an invalid rank prints for itself.
    if (
        not rank.isdecimal()
        or int(rank) == 0
        or (world_size.isdecimal() and int(rank) >= int(world_size))
    ):
        print_error(sentence)


def leave_reason(reason: str) -> bool:
    """Write why this rank fails into the error file that torchrun gave it; False if not written."""
    if not (name := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return False
    said = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
    partial = Path(f"{name}.partial")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps({"message": said}), encoding="utf-8")
        partial.replace(name)  # torchrun fails on a partial file, and may end this rank any time
        return True
    return False


def print_error(sentence: str) -> None:
    """Print a sentence in the format of all entry points."""
    # Not a logger: the sentence must reach stderr however the caller has configured logging.
    print(f"mcore_rl: error: {sentence}", file=patient_stderr(), flush=True)


def _leave() -> NoReturn:
    patient_stdout().flush()
    # Without destructors: other libraries' exit handlers may wait for other ranks.
    os._exit(EXIT_USAGE)


def _wait_until_all_have_read(store: Store, rank: int, world_size: int) -> None:
    """Hold rank 0, which may host the store, until no rank needs these answers any more."""
    if rank == 0:
        for other in range(1, world_size):
            store.get(f"read/{other}")
    else:
        store.set(f"read/{rank}", "1")


def _leave_after_the_others(store: Store, rank: int, world_size: int) -> None:
    """Return when this rank may end: the sentence is printed and, on rank 0, no rank needs it.

    Rank 0 may host the store, and the launcher ends all ranks once one is gone. So no rank exits
    before rank 0 has printed, rank 0 exits last, and SIGTERM from the launcher is ignored in
    between.
    """
    if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 0:
        store.set("printed", "1")
        for other in range(1, world_size):
            store.get(f"left/{other}")
    else:
        store.get("printed")
        store.set(f"left/{rank}", "1")  # waits for no reply, so rank 0 may exit right after
