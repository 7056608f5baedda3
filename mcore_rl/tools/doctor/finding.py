"""Findings of the doctor's checks.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
    VERSIONS,
    PATCHES,
    FLAGS,
    CHECKPOINT,
    BATCHES,
    PLAN,
    PROMPTS,
    REWARD,
    PORTS,
    SHARED_MEMORY,
    LIMITS,
    SPACE,
    NETWORK,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one subject; red stops or spoils a run, yellow may.

    `remedy` says in one sentence what to do; it is empty for green.
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
    """Return a warning: a run starts, and may be slower, smaller or other than intended."""
    return Finding(area, "yellow", found, remedy)


def red(area: str, found: str, remedy: str) -> Finding:
    """Return a failure: a run does not start, or does not end well."""
    return Finding(area, "red", found, remedy)


def refusal(area: str, error: UsageError) -> Finding:
    """Return the finding for a user's mistake that a check of the start has raised."""
    found, remedy = (" ".join(text.split()) for text in (error.fault, error.remedy))
    return red(area, found, remedy or CORRECT)  # an error from a user's code may have no remedy


def counts(findings: Iterable[Finding]) -> dict[Level, int]:
    """Return the number of findings of each level."""
    levels = [finding.level for finding in findings]
    return {level: levels.count(level) for level in LEVELS}


def plural(count: int, word: str) -> str:
    """Format a count: 1 prompt, 2 prompts, 1,000 prompts."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
