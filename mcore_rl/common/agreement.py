"""Ranks agree on a failure before any of them exits, so that no rank waits for a dead one.

Before Megatron starts they exchange one sentence per rank through the launcher's rendezvous store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
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
_CAUSE_SECONDS = 1.0
_has_cause, _cause = threading.Event(), list[str]()


def agreed(check: Callable[[], T], store: Store | None, *, stage: str) -> T:
    """Run `check` on every rank and return its result, if it succeeded on all of them.

    Collective over the world, through `store` (None: one process). `stage` is a new name for each
    call. If `check` raised UsageError anywhere, the first failing rank's sentence is reported (with
    its host, if others succeeded) and every rank exits with code 2. Other exceptions are bugs: they
    are reported to the other ranks, which stop too, and propagate here.
    """
    result: list[T] = []
    failure, bug = "", None
    try:
        result.append(check())
    except UsageError as error:
        # A parser's message about a file may have several lines.
        failure = " ".join(line.strip() for line in str(error).splitlines())
    except Exception as error:
        failure, bug = f"failed while checking its input: {error!r}", error
    failures = _exchange(_with_host(failure), store, stage)
    if not any(failures):
        return result[0]
    if bug is None:
        report(_sentence(failures))
    if len(failures) > 1 and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, once a rank has exited
    _exchange("", store, f"{stage}/leaving")  # no rank exits before all have reported
    if bug is not None:
        raise bug
    _leave()


def agreed_in_world(check: Callable[[], T]) -> T:
    """Do what `agreed` does once torch.distributed runs. Collective over its world."""
    from mcore_rl.common import objects

    result: list[T] = []
    failure = ""
    try:
        result.append(check())
    except UsageError as error:
        failure = str(error)
    failures = objects.all_gather(_with_host(failure))
    if not any(failures):
        return result[0]
    report(_sentence(failures))
    leave_together(EXIT_USAGE)


def from_rank(rank: int, text: str, store: Store | None, *, stage: str) -> str:
    """Return one rank's `text` on all ranks. Collective, after `agreed` with the same `stage`."""
    if store is None or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return text
    if int(os.environ["RANK"]) == rank:
        store.set(f"mcore_rl/{stage}/text", text)
    return store.get(f"mcore_rl/{stage}/text").decode()


def check_alike(facts: Mapping[str, str], store: Store | None) -> None:
    """Refuse ranks on which one of `facts`, by name, differs from rank 0. Collective.

    Flags or packages may differ between machines by mistake, which would show much later or never.
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


def _exchange(text: str, store: Store | None, key: str) -> list[str]:
    """Return each rank's text, by rank. Rank 0, which may host the store, returns last."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if store is None or world_size == 1:
        return [text]
    from torch.distributed.elastic.utils.store import synchronize

    rank = int(os.environ["RANK"])
    seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]  # not in torch's stubs
    texts = synchronize(store, text.encode(), rank, world_size, f"mcore_rl/{key}/", seconds)
    return [each.decode() for each in texts]


def _with_host(failure: str) -> str:
    return failure and f"{socket.gethostname()}\n{failure}"


def _sentence(failures: list[str]) -> str:
    """Return the first failing rank's text, with rank and host unless all ranks failed."""
    failing = [rank for rank, text in enumerate(failures) if text]
    host, _, text = failures[failing[0]].partition("\n")
    if len(failing) == len(failures):
        return text
    return f"on rank {failing[0]} (host {host}): {text}"


def leave_with(error: UsageError) -> NoReturn:
    """Report a mistake that every rank finds by itself, and end this process with exit code 2."""
    report(str(error))
    _leave()


def leave_together(exit_code: int) -> NoReturn:
    """End all ranks with this code, after all of them have arrived here. Collective."""
    from mcore_rl.common import objects

    objects.barrier()
    _leave(exit_code)


def report(sentence: str) -> None:
    """Report the sentence once on stderr, whichever of the failing ranks ends first.

    The first rank to exit makes the launcher end the others, so each rank writes the sentence into
    its error file of torchrun: `mcore_rl.launch` prints it once, torchrun shows it in its table.
    """
    if leave_reason(sentence) and LAUNCHER in os.environ:
        return
    rank, world_size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    is_valid = rank.isdecimal() and not (world_size.isdecimal() and int(rank) >= int(world_size))
    # Rank 0 prints for all; a process with an invalid rank prints for itself.
    if not is_valid or int(rank) == 0:
        print_error(sentence)


def leave_cause(reason: str) -> None:
    """Do what `leave_reason` does; later failures of this rank follow from it, and are not left."""
    leave_reason(reason)
    _cause.append(reason)
    _has_cause.set()


def known_cause() -> str | None:
    """Return the reason of `leave_cause`, after waiting for it for a second."""
    return _cause[0] if _has_cause.wait(_CAUSE_SECONDS) else None


def leave_reason(reason: str) -> bool:
    """Write why this rank fails into the error file that torchrun gave it; False if not written."""
    if _has_cause.is_set():
        return True
    if not (name := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return False
    content = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
    # torch's `record` writes in place. torchrun may end this rank in between, and raises on a
    # partial file.
    partial = Path(f"{name}.partial")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps({"message": content}), encoding="utf-8")
        partial.replace(name)
        return True
    return False


def print_error(sentence: str) -> None:
    """Print a sentence in the format of all entry points."""
    # Not a logger: the sentence must reach stderr however the caller has configured logging.
    print(f"mcore_rl: error: {sentence}", file=patient_stderr(), flush=True)


def _leave(exit_code: int = EXIT_USAGE) -> NoReturn:
    patient_stdout().flush()
    patient_stderr().flush()
    # Without destructors: other libraries' exit handlers may wait for other ranks.
    os._exit(exit_code)
