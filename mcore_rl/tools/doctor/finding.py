"""The doctor's request, the findings of its checks, and the report that collects them."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from mcore_rl.common.errors import CORRECT, UsageError

Level = Literal["green", "yellow", "red"]
LEVELS: tuple[Level, ...] = get_args(Level)
# In the order of the output.
AREAS = (
    *("versions", "patches", "flags", "checkpoint", "batches", "plan", "prompts", "reward"),
    *("ports", "shared memory", "limits", "space", "network"),
)


@dataclass(frozen=True, slots=True)
class Request:
    """Input of the doctor. Without a job it checks the installation and the machine only."""

    tokens: tuple[str, ...] = ()  # the job's flags
    world_size: int | None = None  # None: of this machine, a rank for each GPU that is visible
    gpu_memory_bytes: int | None = None  # of a device, instead of the detected size
    gpu_memory_source: str = ""  # the flag that gave it
    gpu_reserved_bytes: int = 0
    host_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one subject. Green: no problem. Yellow: a run starts, but may be slow or
    unintended. Red: it does not start, or does not end well.

    `remedy` says in one sentence what to do; it is empty for green. For example
    Finding("red", "ports", "MASTER_PORT=65536 is not a port", "set it to a number up to 65535").
    """

    level: Level
    area: str
    found: str
    remedy: str = ""


green, yellow, red = (functools.partial(Finding, level) for level in LEVELS)


def refusal(area: str, error: UsageError) -> Finding:
    """Return the finding for a user's mistake that a check of the start has raised."""
    found, remedy = (" ".join(text.split()) for text in (error.fault, error.remedy))
    return red(area, found, remedy or CORRECT)  # an error from a user's code may have no remedy


class Report(logging.Handler):
    """The findings so far. While a check runs, what mcore_rl warns of in its log is a finding."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.findings: list[Finding] = []
        self._warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning: "[Servers] a fault; a remedy"."""
        self._warnings.append(re.sub(r"^\[\w+\] ", "", record.getMessage()))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Receive the warnings of mcore_rl, which are not logged elsewhere meanwhile."""
        logger = logging.getLogger("mcore_rl")
        before, logger.propagate = logger.propagate, False
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.propagate = before

    def settle(self, area: str, error: Exception | None = None) -> None:
        """Add what a check has warned of, and how it ended."""
        for text in dict.fromkeys(self._warnings):
            found, semicolon, remedy = text.rpartition("; ")
            if not semicolon:
                found, remedy = text, "make sure that this is meant"
            self.findings.append(yellow(area, found, remedy))
        self._warnings.clear()
        if isinstance(error, UsageError):
            self.findings.append(refusal(area, error))
        elif error is not None:
            what = f"this check failed: {type(error).__name__}: {' '.join(str(error).split())}"
            self.findings.append(red(area, what, "correct the cause that the error names"))

    @contextlib.contextmanager
    def catching(self, area: str) -> Iterator[None]:
        """Make an exception a finding, so that it does not hide the results of other checks: a
        user's mistake, or a check that fails because the machine is broken in an unforeseen way."""
        error: Exception | None = None
        with self.listening():
            try:
                yield
            except Exception as raised:
                error = raised
        self.settle(area, error)

    def add(self, area: str, check: Callable[[], Iterable[Finding]]) -> None:
        """Run a check and keep its findings."""
        with self.catching(area):
            self.findings += check()

    def has_red(self, area: str) -> bool:
        """Return whether an area has a failure."""
        return any(each.level == "red" for each in self.findings if each.area == area)

    def sorted(self) -> list[Finding]:
        """Return the findings in the order of `AREAS`."""
        return sorted(self.findings, key=lambda finding: AREAS.index(finding.area))


def counts(findings: Iterable[Finding]) -> dict[Level, int]:
    """Return the number of findings of each level."""
    counted = Counter(finding.level for finding in findings)
    return {level: counted[level] for level in LEVELS}


def plural(count: int, word: str) -> str:
    """Format a count: 1 prompt, 2 prompts, 1,000 prompts."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
