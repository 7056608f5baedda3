"""The end of a run: the launcher's exit code, and what it prints."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mcore_rl.common.agreement import EXIT_ALARM, EXIT_FAILED, EXIT_USAGE
from mcore_rl.common.kills import describe_kills, memory_kills, noted_stage
from mcore_rl.launch.peers import NodeExit

# torchrun sends them to the other ranks after a failure; they carry no information about it.
_SENT_BY_TORCHRUN = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Ending:
    """For example `Ending(2, "--lr -1 is not a positive number; choose for example 1e-06")`.

    `sentence` is for the user and for the launchers of other machines. torchrun's `table` of the
    failed ranks is printed above it.
    """

    exit_code: int
    sentence: str = ""
    table: str = ""
    prefix: str = "mcore_rl: error: "

    @property
    def message(self) -> str:
        """The text for standard error."""
        sentence = self.sentence and self.prefix + self.sentence
        return "\n".join(text for text in (self.table, sentence) if text)


def exit_code(codes: Collection[int]) -> int:
    """Return the exit code of a run whose failed ranks ended with `codes`, in order of time.

    Negative codes are signals. Ranks that ended by themselves decide, not those that torchrun ended
    as a consequence: the first code other than 2, else 2. If signals ended all of them, it is 128 +
    the signal, with SIGKILL before SIGTERM, since torchrun sends SIGTERM first.
    """
    decisive = [code for code in codes if code not in _SENT_BY_TORCHRUN] or [max(codes)]
    code = next((code for code in decisive if code != EXIT_USAGE), EXIT_USAGE)
    return code if code > 0 else 128 - code


def stopped_by(number: signal.Signals) -> Ending:
    """Return the ending of a run that a signal to the launcher has ended."""
    sentence = f"stopped by {number.name}, all processes have ended"
    return Ending(128 + number, sentence, prefix="mcore_rl: ")


def stopped_with(peer: NodeExit) -> Ending:
    """Return the ending of a run that another machine's launcher has ended."""
    where = f"node {peer.node} ({peer.host})"
    if peer.exit_code is None:
        what = f"the launcher of {where} is gone, or its machine is"
        return Ending(EXIT_FAILED, f"{what}: all processes here have ended, too")
    if peer.exit_code == EXIT_USAGE:
        return Ending(EXIT_USAGE, peer.sentence)
    why = f": {peer.sentence}" if peer.sentence else ""
    what = f"{where} has ended with exit code {peer.exit_code}, and all processes here with it"
    return Ending(peer.exit_code, what + why)


def failed(
    error: ChildFailedError,
    kills_before: Mapping[str, int],
    folder: str,
    messages: Collection[logging.LogRecord] = (),
) -> Ending:
    """Return the ending of a run with failed ranks, whose temporary folder is `folder`. `messages`
    are those of torchrun on ending its ranks."""
    in_time = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
    code = exit_code([failure.exitcode for failure in in_time])
    if code == EXIT_ALARM:  # rank 0 has reported the reason
        return Ending(code)
    if code == EXIT_USAGE:
        return Ending(code, _mistake(error))
    sentence = _kills(error, kills_before, folder, messages) or _first_reason(error)
    return Ending(code, sentence, error.format_msg())


def _mistake(error: ChildFailedError) -> str:
    """Return a user's mistake, which any of the ranks may have left: the others were ended."""
    mistaken = [rank for rank, each in error.failures.items() if each.exitcode == EXIT_USAGE]
    found = [reason for rank, reason in _reasons(error).items() if rank in mistaken]
    no_reason = f"rank {mistaken[0]} ended with exit code {EXIT_USAGE}; see what it printed"
    return found[0] if found else no_reason


def _kills(
    error: ChildFailedError,
    before: Mapping[str, int],
    folder: str,
    messages: Collection[logging.LogRecord],
) -> str:
    """Return which ranks were killed and whether memory ran out; "" if neither has happened."""
    # By torchrun, because they did not end by SIGTERM: their exit codes do not say it.
    outlived = [entry.args for entry in messages if str(entry.msg).startswith("Unable to shutdown")]
    by_torchrun = {args[0] for args in outlived if isinstance(args, tuple)}
    stages = {
        rank: noted_stage(folder, failure.pid)
        for rank, failure in sorted(error.failures.items())
        if failure.exitcode == -signal.SIGKILL and failure.pid not in by_torchrun
    }
    return describe_kills(stages, before, memory_kills())


def _first_reason(error: ChildFailedError) -> str:
    """Return why the first rank failed; "" if its output shows it."""
    rank, first = error.get_first_failure()
    reasons = _reasons(error)
    if first.exitcode < 0 and rank not in reasons:  # others then miss it, and report that
        return f"rank {rank}: {first.message}"
    return next((f"rank {rank}: {reason}" for rank, reason in reasons.items()), "")


def _reasons(error: ChildFailedError) -> dict[int, str]:
    """Return the reasons that ranks left in their error files, by rank, the first one first.

    torchrun's own timestamps are in seconds, within which others fail as a consequence.
    """
    reasons = [
        (os.stat(failure.error_file).st_mtime_ns, rank, reason)
        for rank, failure in error.failures.items()
        if (reason := _reason(failure))
    ]
    return {rank: reason for _, rank, reason in sorted(reasons)}


def _reason(failure: ProcessFailure) -> str:
    message = failure.error_file_data.get("message")
    return str(message["message"]) if isinstance(message, Mapping) else ""
