"""What a case of bad input is, and how it must end; for test_bad_input*.py.

Each case is a run over two processes, through the real entry point, that differs from a good one in
one thing. Before the ranks leave, none may have started torch.distributed or made a parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.dist.bad_input_folder import Change
from tests.rank_pool import RankPool

WORKER = "tests.dist.bad_input_worker"
CASE_SECONDS = 60

# A run that is in order; `{here}` is the case's folder.
GOOD = {
    "--rl-hf-checkpoint": "{here}/checkpoint",
    "--rl-prompts": "{here}/prompts.jsonl",
    "--rl-eval-prompts": "{here}/eval.jsonl",
    "--rl-reward": "arithmetic",
    "--rl-run-dir": "{here}/run",
    "--rl-cache-dir": "{here}/../cache",
    "--rl-max-prompt-tokens": "64",
    "--rl-max-response-tokens": "64",
    "--tensor-model-parallel-size": "2",
    "--expert-model-parallel-size": "2",
}


@dataclass(frozen=True)
class Case:
    """What is wrong, and what the sentence must contain, in this order; `{here}` as above."""

    name: str
    says: list[str]
    flags: dict[str, str | None] = field(default_factory=dict)  # None: left out of GOOD
    more: str = ""  # further flags
    change: Change | None = None
    entry: str = "mcore_rl.train"
    installed: dict[str, str] = field(default_factory=dict)


def table(**groups: Sequence[Case]) -> list[Any]:
    """The cases of all groups as parameters, each by the names of its group and its own."""
    return [
        pytest.param(case, id=f"{group}-{case.name}")
        for group, cases in groups.items()
        for case in cases
    ]


def assert_ends_all_ranks_with_one_sentence(case: Case, ranks: RankPool, here: Path) -> None:
    """Run `case` in its folder `here`: rank 0 says what is wrong, the other one nothing."""
    if case.change is not None:
        case.change(here)
    first, second = run_case(
        ranks, tokens_of(case, here), here, entry=case.entry, installed=case.installed
    )
    assert_says(first, case.says, here)
    assert second == ""


def tokens_of(case: Case, here: Path) -> list[str]:
    flags = {flag: value for flag, value in {**GOOD, **case.flags}.items() if value is not None}
    tokens = [token for pair in flags.items() for token in pair] + case.more.split()
    return [token.replace("{here}", str(here)) for token in tokens]


def run_case(
    ranks: RankPool,
    tokens: list[str],
    here: Path,
    *,
    entry: str = "mcore_rl.train",
    installed: dict[str, str] | None = None,
    folders: list[Path] | None = None,
    unset: list[str] | None = None,
    world_size: int = 2,
) -> list[str]:
    """Run to the end, which must be that of bad input; what each rank printed on stderr."""
    report = here / "report"
    outcomes = ranks.run_raw(
        f"{WORKER}:start",
        world_size=world_size,
        arguments={
            "entry": entry,
            "tokens": tokens,
            "report": str(report),
            "installed": installed or {},
            "folders": [str(folder) for folder in folders or [here] * world_size],
            "unset": unset or [],
        },
        timeout_seconds=CASE_SECONDS,
    )
    printed = [Path(f"{report}.{rank}.stderr").read_text() for rank in range(world_size)]
    assert [outcome.exit_code for outcome in outcomes] == [2] * world_size, printed
    for rank in range(world_size):
        facts = json.loads(Path(f"{report}.{rank}.json").read_text())
        assert facts == {"is_initialized": False, "num_parameters": 0}
    return printed


def assert_says(sentence: str, parts: list[str], here: Path) -> None:
    """One line that holds `parts` in their order."""
    assert sentence.startswith("mcore_rl: error: ")
    assert sentence.count("\n") == 1 and sentence.endswith("\n")
    wanted = [re.escape(part.replace("{here}", str(here))) for part in parts]
    assert re.search(".*".join(wanted), sentence), sentence
