"""What a case of bad input is, and how it must end; for test_bad_input*.py.

A case differs from a good command line in one thing. `assert_refused` asks the checks of an entry
point for its sentence, in this process, then follows its advice, and the same checks must accept
the result. tests/dist/test_bad_input.py shows, once for each place where a mistake is found, that a
start on several ranks ends with that sentence.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from mcore_rl.common.agreement import agreed
from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import WITHOUT_CUDA
from mcore_rl.job.facts import Source
from mcore_rl.job.inputs import check_data
from mcore_rl.job.resolver import resolve
from mcore_rl.spec import JobSpec
from mcore_rl.verify import check_prompts_given
from tests.bad_input_folder import Change

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# A run that is in order; `{here}` is the case's folder, `{examples}` that of the repository.
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
    advice: tuple[str, ...] = ()  # ways to follow the remedy, besides those of `_ways_out`
    repair: Change = lambda here: None  # before the advice is followed


def parse_cases(
    text: str,
    changes: Mapping[str, Change] | None = None,
    repairs: Mapping[str, Change] | None = None,
) -> list[Case]:
    """The cases of a text: a line `name: flags`, then what the sentence must contain.

    Lines indented by 2 continue the flags, lines indented by 4 say the parts of the sentence,
    separated by ` ... `; `without --flag` leaves a flag of GOOD out. `changes` and `repairs` are by
    name. Behind `=> ` come ways to follow the advice, separated by ` | `: `drop --flag`,
    `--flag value`, `world 3` for the number of ranks, `again` for the good folder and GOOD's flags.
    """
    cases = []
    for block in re.split(r"\n(?=\S)", text.strip()):
        name, rest = block.split(":", 1)
        lines = rest.split("\n")
        given = " ".join(line for line in lines if not line.startswith("    ")).split()
        sentence = " ".join(line.strip() for line in lines if line.startswith("    "))
        sentence, _, advice = sentence.partition(" => ")
        flags: dict[str, str | None] = {}
        more = []
        while given:
            token = given.pop(0)
            if token == "without":
                flags[given.pop(0)] = None
            elif token in GOOD:
                flags[token] = given.pop(0)
            else:
                more.append(token)
        case = Case(name, sentence.split(" ... "), flags, " ".join(more), (changes or {}).get(name))
        ways = tuple(advice.split(" | ")) if advice else ()
        case = replace(case, advice=ways, repair=(repairs or {}).get(name, case.repair))
        cases.append(case)
    assert not {*(changes or ()), *(repairs or ())} - {case.name for case in cases}
    return cases


def table(**groups: Sequence[Case]) -> list[Any]:
    """The cases of all groups as parameters, each by the names of its group and its own."""
    return [
        pytest.param(case, id=f"{group}-{case.name}")
        for group, cases in groups.items()
        for case in cases
    ]


def tokens_of(case: Case, here: Path) -> list[str]:
    flags = {flag: value for flag, value in {**GOOD, **case.flags}.items() if value is not None}
    tokens = [token for pair in flags.items() for token in pair] + case.more.split()
    return [_placed(token, here) for token in tokens]


def _placed(text: str, here: Path) -> str:
    return text.replace("{here}", str(here)).replace("{examples}", str(EXAMPLES))


_AGAIN = "again"
_ORDINARY = re.compile(
    "copy|give the folder|give a JSONL|give a .jsonl|use the published|run scripts"
)


def _ways_out(case: Case, error: UsageError) -> list[str]:
    """The ways to follow the advice of `error`: those of the case, and what it says to drop."""
    found = list(case.advice)
    named = re.findall(r"--[a-z0-9-]*[a-z0-9]", error.fault)
    if re.search(r"\bdrop one\b", error.remedy):  # each will do
        found += [f"drop {flag}" for flag in dict.fromkeys(named)]
    elif error.flag and re.search(r"\bdrop (it|this|the flag)\b(?! and the)", error.remedy):
        found.append(f"drop {error.flag_name}")
    if not found and _ORDINARY.match(error.remedy):
        found.append(_AGAIN)
    assert found, f"no way to follow '{error.remedy}' is tried: add it to the case behind =>"
    return found


def _without(tokens: Sequence[str], flag: str) -> list[str]:
    """`tokens` without a flag and its values."""
    kept, is_left_out = [], False
    for token in tokens:
        if token.startswith("--"):
            is_left_out = token.split("=")[0] == flag
        if not is_left_out:
            kept.append(token)
    return kept


def _follow(way: str, tokens: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`tokens` changed as `way` says."""
    words = way.split()
    while words:
        word = words.pop(0)
        if word == "drop":
            assert tokens != (tokens := _without(tokens, words.pop(0))), f"nothing to {way}"
        elif word == "world":
            monkeypatch.setenv("WORLD_SIZE", words.pop(0))
        else:
            values = []
            while words and not words[0].startswith("--") and words[0] not in ("drop", "world"):
                values.append(words.pop(0))
            tokens = [*_without(tokens, word), word, *values]
    return tokens


def _assert_advice_helps(
    case: Case, error: UsageError, here: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks that raised `error` accept what follows from each way to follow the advice."""
    case.repair(here)
    of_flags = any(
        frame.name == resolved.__name__ for frame in traceback.extract_tb(error.__traceback__)
    )
    repeated = resolved if of_flags else check
    for way in _ways_out(case, error):
        of_way = case
        with monkeypatch.context() as patched:
            if way == _AGAIN:
                shutil.copytree(good, here, dirs_exist_ok=True)
                of_way, way = replace(case, flags={}, installed={}), ""
            way = _placed(way, here)
            _install(of_way, patched)
            tokens = _follow(way, tokens_of(of_way, here), patched)
            try:
                repeated(tokens, case.entry)
            except UsageError as again:
                pytest.fail(f"'{error}', but after '{way or _AGAIN}': {again}")


def _install(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: case.installed.get(name) or version(name)
    )


class ParameterCounter:
    """Counts the parameters that modules of this process get from now on."""

    def __init__(self) -> None:
        self.count = 0
        self.hook = torch.nn.modules.module.register_module_parameter_registration_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


def resolved(tokens: Sequence[str], entry: str) -> JobSpec:
    """The first part of `check`: flags and checkpoints, without prompts and rewards."""
    scores_only = entry == "mcore_rl.verify"
    return resolve(Source(tokens=tokens, platform=WITHOUT_CUDA, scores_only=scores_only))


def check(tokens: Sequence[str], entry: str = "mcore_rl.train") -> JobSpec:
    """All that `python -m <entry> <tokens>` checks on a rank before Megatron starts."""
    checked = resolved(tokens, entry)
    (check_prompts_given if entry == "mcore_rl.verify" else check_data)(checked)
    return checked


def assert_refused(
    case: Case, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first of two ranks, in its folder `here`, says what is wrong with `case` in one sentence
    and ends with code 2, before a process group or a parameter is made; and its advice helps."""
    good = here.with_name("good")
    shutil.copytree(here, good)
    if case.change is not None:
        case.change(here)
    monkeypatch.chdir(here)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    errors: list[UsageError] = []

    def checked() -> JobSpec:
        try:
            return check(tokens_of(case, here), case.entry)
        except UsageError as error:
            errors.append(error)
            raise

    parameters = ParameterCounter()
    try:
        with monkeypatch.context() as patched:
            _install(case, patched)
            code, said = _ending(checked, patched, capfd)
    finally:
        parameters.hook.remove()
    assert (code, parameters.count, dist.is_initialized()) == (2, 0, False)
    assert_says(said, case.says, here)
    _assert_advice_helps(case, errors[0], here, good, monkeypatch)


def _ending(
    check: Callable[[], JobSpec],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> tuple[int, str]:
    """Exit code and stderr of a rank that finds this at its start, without leaving by it."""

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    capfd.readouterr()
    with monkeypatch.context() as patched, pytest.raises(SystemExit) as left:
        patched.setattr(os, "_exit", leave)
        agreed(check, None, stage="input")
    return left.value.code, capfd.readouterr().err


def assert_says(sentence: str, parts: list[str], here: Path) -> None:
    """One line that holds `parts` in their order."""
    assert sentence.startswith("mcore_rl: error: ")
    assert sentence.count("\n") == 1 and sentence.endswith("\n")
    wanted = [re.escape(part.replace("{here}", str(here))) for part in parts]
    assert re.search(".*".join(wanted), sentence), sentence
