"""Exceptions: UsageError for mistakes that a user can fix, RunStopped for the end of a run on
request.

Any other exception is a fault of the program or of the machine, and keeps its traceback.
"""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path
from typing import Any, NoReturn

CORRECT = "correct it or drop the flag"  # the remedy where the constraint says what is valid


class UsageError(ValueError):
    """A flag, file or layout that a user can correct: the fault, its place and the remedy.

    `flag` is the flag as typed, with its value if it has one, or the argument or environment
    variable in its place; it is empty if no single one is at fault. `found` follows it with the
    constraint, or places it elsewhere as {flag}. `remedy` is what to do. `str()` joins them into
    one sentence. The entry points print it without a traceback and end every rank with exit code
    2, before any model is built.
    """

    def __init__(self, found: str, *, flag: str = "", remedy: str = "", of: str = "") -> None:
        super().__init__(found)
        self.found, self.flag, self.remedy = found, flag, remedy
        self.of = of  # the role whose flag it is, if not the actor

    @property
    def fault(self) -> str:
        """The sentence without its remedy."""
        whose = f"of {self.of}: " if self.of else ""
        if not self.flag or "{flag}" in self.found:
            return f"{whose}{self.found.replace('{flag}', self.flag)}"
        glue = "" if self.found.startswith((":", ",")) else " "
        return f"{whose}{self.flag}{glue}{self.found}"

    @property
    def flag_name(self) -> str:
        """The flag without its value, and without its other names."""
        return self.flag.split(" ")[0].split("/")[0]

    @classmethod
    def of_argument(cls, error: argparse.ArgumentError, *, remedy: str) -> UsageError:
        """Convert argparse's error about one argument."""
        flag = error.argument_name or ""
        return cls(f": {error.message}" if flag else error.message, flag=flag, remedy=remedy)

    def of_role(self, whose: str) -> UsageError:
        """Return the same error for a role, such as "the critic"."""
        return UsageError(self.found, flag=self.flag, remedy=self.remedy, of=whose)

    def __str__(self) -> str:
        return f"{self.fault}; {self.remedy}" if self.remedy else self.fault


def as_flag(dest: str, value: object = None) -> str:
    """Return a flag by its destination, as typed: ("min_lr", 0.1) -> "--min-lr 0.1"."""
    flag = f"--{dest.replace('_', '-')}"
    return flag if value is None else f"{flag} {value}"


def not_held(place: object, what: str, why: object) -> UsageError:
    """Return the error for a file or folder of a checkpoint that does not hold `what`."""
    return UsageError(
        f": {place} does not hold {what} ({why})", flag="--load", remedy="load another checkpoint"
    )


def unreadable(path: object, error: OSError, flag: str) -> UsageError:
    """Return the error for a file of the folder given as `flag` that the user may not read."""
    return UsageError(
        f": {path} cannot be read ({error.strerror})", flag=flag, remedy="correct its permissions"
    )


def check_length(path: Path, flag: str) -> None:
    """Raise UsageError for a path that is too long for its file system."""
    try:
        os.lstat(path)
    except OSError as error:  # pathlib's is_dir and others would raise it
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(
                "is longer than its file system allows", flag=flag, remedy="choose a shorter name"
            ) from error


def check_output_file(file: Path, flag: str) -> None:
    """Raise UsageError unless `file` can be a file of a folder that exists."""
    check_length(file, flag)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise UsageError(
            "must name a file in a folder that exists", flag=flag, remedy="name another"
        )


class CommandParser(argparse.ArgumentParser):
    """Takes no abbreviated flags; its errors are UsageErrors of one sentence."""

    def __init__(self, **options: object) -> None:
        # exit_on_error: an ArgumentError then carries the argument that it is about.
        options |= {"allow_abbrev": False, "exit_on_error": False}
        super().__init__(**options)  # type: ignore[arg-type]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        try:
            return super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            raise UsageError.of_argument(error, remedy=self._remedy) from error

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=self._remedy)

    @property
    def _remedy(self) -> str:
        return f"see {self.prog} --help"


class RunStopped(SystemExit):
    """The run has ended before its last step on all ranks, with everything saved and reported."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code
