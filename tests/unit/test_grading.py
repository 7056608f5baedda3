"""Printed and returned values are compared with expected ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mcore_rl.sandbox import grading
from mcore_rl.sandbox.code_tests import suite_of
from mcore_rl.sandbox.grading import same_output, same_result
from mcore_rl.sandbox.runner import run_python

PATIENT_SECONDS = 60.0


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("3", "3\n", True),
        (" 1  2 \r\n\n3\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("3.0", "3", False),
        ("0.3333333", "0.33333333", True),
        ("0.334", "0.333", False),
        ("1e3", "1000.0", True),
        ("nan", "1.0", False),
        ("yes", "YES", False),
        ("", "1", False),
        ("1\n2", "1", False),
        ("e", "E", False),
    ],
)
def test_outputs_are_compared_by_words_of_lines(printed: str, expected: str, is_same: bool) -> None:
    assert same_output(printed, expected) is is_same


@pytest.mark.parametrize(
    ("value", "expected", "is_same"),
    [
        ((1, 2), [1, 2], True),
        ([1, (2, 3)], [1, [2, 3]], True),
        ({1: (2,)}, {"1": [2]}, True),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        (3, 4, False),
        ("3", 3, False),
        (frozenset([1]), [1], False),
        (None, None, True),
        (None, 0, False),
        (float("nan"), 1.0, False),
        ([1], [1, 2], False),
        ({1: 2}, [1], False),
    ],
)
def test_results_are_compared_as_json_values(
    value: object, expected: object, is_same: bool
) -> None:
    assert same_result(value, expected) is is_same


def test_large_inputs_and_outputs_are_complete() -> None:
    lines = "".join(f"{number}\n" for number in range(100_000))
    suite = suite_of({"inputs": [lines], "outputs": [lines]})
    code = "import sys\nsys.stdout.write(sys.stdin.read())"
    assert run_python(code, suite, timeout_seconds=PATIENT_SECONDS).all_passed


def test_comparison_of_outputs_stops_at_first_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[list[str]] = []
    same_line: Callable[[list[str], list[str]], bool] = grading.same_line

    def counted(printed: list[str], expected: list[str]) -> bool:
        compared.append(printed)
        return same_line(printed, expected)

    monkeypatch.setattr(grading, "same_line", counted)
    lines = "1\n" * 100_000
    assert same_output(lines, lines) and not compared
    assert not same_output(lines, "1\n2\n") and len(compared) == 1
    assert not same_output("1\n", lines) and not same_output("\n" * 100_000, "1")


BIG = "1" + "0" * 5000


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"inputs": ["5000"], "outputs": [BIG]}, "print(10 ** int(input()))"),
        ({"inputs": [BIG], "outputs": ["0"]}, "print(int(input()) % 10)"),
        ({"inputs": ["\ud800"], "outputs": ["\ud800"]}, "print(input())"),
        (
            {"fn_name": "f", "inputs": [[{"1": 1, "01": 2}]], "outputs": [["01", "1"]]},
            "def f(x): return sorted(x)",
        ),
        (
            {"fn_name": "f", "inputs": [[{"1": 1, "-2": 2}]], "outputs": [[-2, 1]]},
            "def f(x): return sorted(x)",
        ),
        ({"fn_name": "f", "inputs": [["\ud800"]], "outputs": ["\ud800"]}, "def f(x): return x"),
        ("assert f(5000) == '1' + '0' * 5000", "def f(x): return str(10 ** x)"),
        ("assert f(5000) == {10 ** 5000: 1}", "def f(x): return {10 ** x: 1}"),
        (
            "from fractions import Fraction\nassert f(5000) == Fraction(10 ** 5000, 3)",
            "from fractions import Fraction\ndef f(x): return Fraction(10 ** x, 3)",
        ),
        (
            "assert abs(f(3) - 1.5) < 1e-6",
            "from fractions import Fraction\ndef f(x): return Fraction(x, 2)",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_large_numbers_and_lone_surrogates_are_graded(answer: object, code: str) -> None:
    found = run_python(code, suite_of(answer), timeout_seconds=PATIENT_SECONDS)
    assert found.all_passed, found
    wrong = run_python(
        "print(5)\ndef f(*_): return 5", suite_of(answer), timeout_seconds=PATIENT_SECONDS
    )
    assert not wrong.all_passed
