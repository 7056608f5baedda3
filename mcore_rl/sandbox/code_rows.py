"""The check of a prompts file's tests before a run: all are read, a few are run."""

from __future__ import annotations

import builtins
import itertools
import json
from collections.abc import Iterator, Sequence

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.data.prompts import PromptDataset
from mcore_rl.isolation.client import Supervisor
from mcore_rl.sandbox.code_tests import Suite, is_blank, suite_of
from mcore_rl.sandbox.runner import run_python

NUM_RUN = 4  # rows whose tests are run on code that does nothing
_MOST_NAMED = 10
_REMEDY = (
    "correct or remove these rows; the forms of tests are in docs/using/rewards.md, and "
    "--rl-answer-column names their column"
)


def check_code_rows(
    rows: PromptDataset | Sequence[Prompt],
    flag: str,
    *,
    may_be_blank: bool = False,
    accepted: Sequence[str] = (),
) -> None:
    """Raise UsageError, with `flag`, for rows whose tests cannot be read or cannot fail.

    All rows are read. The tests of `NUM_RUN` rows, spread over the file, are run on code that does
    nothing, which must not pass. With `may_be_blank` an empty answer means no tests. `accepted`
    lists protections that the sandbox may lack.
    """
    faults: dict[int, str] = {}
    num_read = 0
    for row in _with_tests(rows, may_be_blank):
        num_read += 1
        try:
            _suite(row)
        except ValueError as error:
            faults[row.index] = str(error)
    if not faults:
        every = max(1, -(-num_read // NUM_RUN))
        with Supervisor(accepted=accepted) as by:
            for row in itertools.islice(_with_tests(rows, may_be_blank), 0, None, every):
                if passing := _passing_nothing(_suite(row), by):
                    faults[row.index] = f"{passing} passes the tests of the answer"
    if not faults:
        return
    first, *others = faults
    more = ""
    if others:
        named = ", ".join(str(index + 1) for index in others[:_MOST_NAMED])
        dots = ", ..." if len(others) > _MOST_NAMED else ""
        more = f" ({len(others):,} more such rows: {named}{dots})"
    raise UsageError(f", row {first + 1}: {faults[first]}{more}", flag=flag, remedy=_REMEDY)


def _with_tests(rows: PromptDataset | Sequence[Prompt], may_be_blank: bool) -> Iterator[Prompt]:
    for position in range(len(rows)):
        if not (may_be_blank and is_blank(rows[position].answer)):
            yield rows[position]


def _suite(row: Prompt) -> Suite:
    return suite_of(row.answer, prompt=row.text, row=json.loads(row.row))


def _passing_nothing(suite: Suite, by: Supervisor) -> str | None:
    """Name code that does nothing but passes a suite; None, as it should be, if there is none.
    RuntimeError: code cannot be run here."""
    for what, code in nothings(suite.names).items():
        if run_python(code, suite, stops_early=True, by=by).all_passed:
            return what
    return None


def nothings(names: frozenset[str]) -> dict[str, str]:
    """Return code that does nothing: none at all, and functions of these names that return None."""
    codes = {"empty code": "pass\n"}
    if names := names - vars(builtins).keys():  # tests use builtins as such
        codes["code whose functions return None"] = "".join(
            f"def {name}(*_, **__): pass\n" for name in sorted(names)
        )
    return codes
