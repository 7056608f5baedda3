"""The doctor's request, the findings of its checks, and the report that collects them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from mcore_rl.common.errors import CORRECT, UsageError

Level = Literal["green", "yellow", "red"]
LEVELS: tuple[Level, ...] = ("green", "yellow", "red")

VERSIONS = "versions"
PATCHES = "patches"
FLAGS = "flags"
CHECKPOINT = "checkpoint"
BATCHES = "batches"
PLAN = "plan"
PROMPTS = "prompts"
REWARD = "reward"
PORTS = "ports"
SHARED_MEMORY = "shared memory"
LIMITS = "limits"
SPACE = "space"
NETWORK = "network"
# In the order of the output.
AREAS = (
    *(VERSIONS, PATCHES, FLAGS, CHECKPOINT, BATCHES, PLAN, PROMPTS, REWARD),
    *(PORTS, SHARED_MEMORY, LIMITS, SPACE, NETWORK),
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
    """One sentence about one subject. Red: a run fails. Yellow: it may be slow or unintended.

    `remedy` says in one sentence what to do; it is empty for green. For example
    Finding("ports", "red", "MASTER_PORT=65536 is not a port", "set it to a number up to 65535").
    """

    area: str
    level: Level
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.area in AREAS, f"{self.area} is not an area"
        assert bool(self.remedy) == (self.level != "green"), f"{self.level}, {self.remedy!r}"


def green(area: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(area, "green", found)


def yellow(area: str, found: str, remedy: str) -> Finding:
    """Return a warning: a run starts, but may be slow, small or unintended."""
    return Finding(area, "yellow", found, remedy)


def red(area: str, found: str, remedy: str) -> Finding:
    """Return a failure: a run does not start, or does not end well."""
    return Finding(area, "red", found, remedy)


def refusal(area: str, error: UsageError) -> Finding:
    """Return the finding for a user's mistake that a check of the start has raised."""
    found, remedy = (" ".join(text.split()) for text in (error.fault, error.remedy))
    return red(area, found, remedy or CORRECT)  # an error from a user's code may have no remedy


@dataclass(slots=True)
class Report:
    """The findings so far."""

    findings: list[Finding] = field(default_factory=list)

    @contextlib.contextmanager
    def catching(self, area: str) -> Iterator[None]:
        """Make an exception a finding, so that it does not hide the results of other checks: a
        user's mistake, or a check that fails because the machine is broken in an unforeseen way."""
        try:
            yield
        except UsageError as error:
            self.findings.append(refusal(area, error))
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            remedy = "correct the cause that the error names"
            self.findings.append(red(area, f"this check failed: {text}", remedy))

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
    levels = [finding.level for finding in findings]
    return {level: levels.count(level) for level in LEVELS}


def plural(count: int, word: str) -> str:
    """Format a count: 1 prompt, 2 prompts, 1,000 prompts."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
