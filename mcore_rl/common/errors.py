"""What a user can fix: the exception that says so, and a parser of flags that raises it.

Also the exception that ends a run as asked.

Everything else that is raised is a fault of the program or of the machine, and keeps its traceback.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

CORRECT = "correct it or drop the flag"  # where the constraint says what is right


class UsageError(ValueError):
    """A flag, file or layout that a user can correct: what was found, where, and what to do.

    `flag` is the flag as typed, with its value where it has one (or what a user has typed or set in
    its place: an argument, a variable of the environment), and empty where nothing single is at
    fault; `found` goes on from it with the constraint, or puts it elsewhere, as {flag}; `remedy` is
    what to do. `str()` makes one sentence of them. The entry points print that without a traceback
    and end every rank with exit code 2, before any model is built.
    """

    def __init__(self, found: str, *, flag: str = "", remedy: str = "", of: str = "") -> None:
        super().__init__(found)
        self.found, self.flag, self.remedy = found, flag, remedy
        self.of = of  # whose flag it is, where the actor's is not meant

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
        """What argparse says of one argument."""
        flag = error.argument_name or ""
        return cls(f": {error.message}" if flag else error.message, flag=flag, remedy=remedy)

    def of_role(self, whose: str) -> UsageError:
        """The same, said of a role: "the critic"."""
        return UsageError(self.found, flag=self.flag, remedy=self.remedy, of=whose)

    def __str__(self) -> str:
        return f"{self.fault}; {self.remedy}" if self.remedy else self.fault


def not_held(place: object, what: str, why: object) -> UsageError:
    """A file, or a folder, of a checkpoint that does not hold `what` it should."""
    return UsageError(
        f": {place} does not hold {what} ({why})", flag="--load", remedy="load another checkpoint"
    )


class CommandParser(argparse.ArgumentParser):
    """Takes no abbreviated flags; its errors are UsageErrors of one sentence."""

    def __init__(self, **options: object) -> None:
        # So that an error that is about one argument comes with it.
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
    """The run has ended before its last step on all ranks alike: everything is saved, and said.

    `exit_code` is what its processes are to end with, and do where nobody catches it.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code
