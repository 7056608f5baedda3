"""A UsageError holds its fault, flag and remedy in fields; its text joins them."""

from __future__ import annotations

import argparse
import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.flags import classes

ROOT = Path(__file__).parents[2]

# Files, and functions in them, whose refusals are of no flag, and why.
WITHOUT_FLAG = {
    # Of what is installed, or of how the program was started.
    "patches/registry.py": "a patch and a package",
    "patches/megatron/cpu_torch.py": "a patch and a package",
    "patches/megatron/__init__.py": "the order of a fork's imports",
    "patches/torch/checkpoint_reading.py": "a file of a checkpoint, whoever names it",
    "mcore_rl/flags/packages.py": "packages",
    "mcore_rl/common/megatron_version.py": "packages",
    "mcore_rl/common/platform.py": "a package",
    "mcore_rl/common/spawning.py": "the user's script",
    "mcore_rl/job/environment.py::open_store": "several variables of the environment",
    # Of a call: nobody has typed a flag.
    "mcore_rl/flags/derived.py::check_fits_machine": "a fork's parsed arguments",
    "mcore_rl/job/reading.py::check_fork_fits": "a fork's parsed arguments",
    "mcore_rl/hybrid_engine/vllm/startup.py": "fields of EngineConfig",
    "mcore_rl/hybrid_engine/vllm/reload.py": "a choice of vLLM's",
    # Of several flags at once, of which none is wrong by itself.
    "mcore_rl/planner/checks.py": "all that takes memory",
    "mcore_rl/job/validation.py": "what Megatron says in its own words",
    "mcore_rl/model/layout.py::TrainLayout": "any of five degrees",
    "mcore_rl/model/layout.py::pipeline_layers": "three flags that make the chunks",
    "mcore_rl/megatron/hf_checkpoint.py::_require_finite": "a tensor of one of several checkpoints",
    # What argparse says of no argument: what is missing, for example.
    "mcore_rl/flags/parsed_flags.py::parse_known": "no argument",
    "mcore_rl/common/errors.py::CommandParser": "no argument",
}


class Refusal(NamedTuple):
    """A call of UsageError, and what stands in it."""

    place: str  # file::outermost function or class
    line: int
    found: str  # with {...} for what is put in
    keywords: dict[str, ast.expr]


def refusals(source: str, file: str) -> Iterator[Refusal]:
    for outer in ast.parse(source).body:
        place = f"{file}::{getattr(outer, 'name', '')}"
        for node in ast.walk(outer):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "UsageError":
                continue
            found = text_of(node.args[0]) if node.args else ""
            keywords = {each.arg or "**": each.value for each in node.keywords}
            yield Refusal(place, node.lineno, found, keywords)


def text_of(found: ast.expr) -> str:
    if isinstance(found, ast.Constant):
        return str(found.value)
    if isinstance(found, ast.JoinedStr):
        parts = [
            p if isinstance(p, ast.Constant) else f"{{{ast.unparse(p)}}}" for p in found.values
        ]
        return "".join(p if isinstance(p, str) else str(p.value) for p in parts)
    return f"{{{ast.unparse(found)}}}"


def faults(refusal: Refusal) -> list[str]:
    """What a refusal leaves in its sentence that has a field."""
    told = []
    if "remedy" not in refusal.keywords:
        told.append("no remedy")
    elif isinstance(remedy := refusal.keywords["remedy"], ast.Constant) and not remedy.value:
        told.append("an empty remedy")
    if ";" in refusal.found:
        told.append("its remedy, or a second sentence, in `found`")
    first = refusal.found.split(" ")[0]
    if first.startswith("--") or (first.startswith("{") and "flag" in first and first != "{flag}"):
        told.append("its flag at the beginning of `found`")
    if "flag" not in refusal.keywords:
        file, place = refusal.place.split("::")[0], refusal.place
        if not {file, place} & WITHOUT_FLAG.keys():
            told.append("no flag")
    return told


def in_the_sources() -> list[Refusal]:
    files = [f for root in ("mcore_rl", "patches") for f in sorted((ROOT / root).rglob("*.py"))]
    return [
        refusal
        for file in files
        for refusal in refusals(file.read_text(), str(file.relative_to(ROOT)))
        # Which is the class itself, made anew of its own fields.
        if refusal.place != "mcore_rl/common/errors.py::UsageError"
    ]


def test_every_refusal_has_its_flag_and_its_remedy_in_fields() -> None:
    every = in_the_sources()
    assert len(every) > 250, "the sources were not found"
    told = [f"{r.place}:{r.line}: {', '.join(bad)}" for r in every if (bad := faults(r))]
    assert told == []


def test_list_of_refusals_without_a_flag_is_minimal() -> None:
    bare = [r for r in in_the_sources() if "flag" not in r.keywords]
    places = {name for r in bare for name in (r.place, r.place.split("::")[0])}
    assert WITHOUT_FLAG.keys() - places == set()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("UsageError('--lr 0 is too low; raise it')", ["no remedy", "its remedy, or", "its flag"]),
        ("UsageError(f'{flag} is too low', flag=flag, remedy='raise it')", ["its flag"]),
        ("UsageError('is too low', flag=flag, remedy='')", ["an empty remedy"]),
        ("UsageError('the rate is too low', remedy='raise it')", ["no flag"]),
        ("UsageError('unknown flag {flag}', flag=flag, remedy='raise it')", []),
        ("UsageError(f'is below {low}', flag=f'--lr {lr}', remedy='raise it')", []),
    ],
)
def test_a_refusal_that_keeps_a_field_in_its_sentence_is_noticed(
    call: str, told: list[str]
) -> None:
    (refusal,) = refusals(f"def check():\n    raise {call}", "mcore_rl/x.py")
    found = faults(refusal)
    assert all(any(bad.startswith(word) for bad in found) for word in told), found
    assert bool(found) == bool(told)


def test_tables_of_reasons_separate_reason_and_remedy() -> None:
    pairs = [*classes.REFUSED.values(), *classes.REFUSED_OTHERWISE.values()]
    pairs += [pair for _, pair in classes.REFUSED_VALUES.values()]
    pairs += [classes.OWN_RL_REASON]
    for why, remedy in pairs:
        assert remedy and ";" not in why and not why.startswith("--"), why


def test_the_sentence_is_made_of_the_fields() -> None:
    error = UsageError("is too low", flag="--lr 0", remedy="raise it")
    assert str(error) == "--lr 0 is too low; raise it"
    assert str(error.of_role("the critic")) == "of the critic: --lr 0 is too low; raise it"
    error = UsageError("rank 1 is in {flag} twice", flag="--rl-critic-ranks 1,1", remedy="drop one")
    assert error.fault == "rank 1 is in --rl-critic-ranks 1,1 twice"
    assert (error.flag_name, error.remedy) == ("--rl-critic-ranks", "drop one")


def test_the_fields_reach_another_process() -> None:
    error = UsageError("is too low", flag="--lr 0", remedy="raise it").of_role("the critic")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.found, copy.flag, copy.remedy, copy.of) == (
        "is too low",
        "--lr 0",
        "raise it",
        "the critic",
    )


def test_argparse_error_names_its_argument() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-o", "--output", type=int)
    with pytest.raises(argparse.ArgumentError) as refused:
        parser.parse_args(["--output", "x"])
    error = UsageError.of_argument(refused.value, remedy="see --help")
    assert (error.flag, error.remedy) == ("-o/--output", "see --help")
    assert str(error) == "-o/--output: invalid int value: 'x'; see --help"
