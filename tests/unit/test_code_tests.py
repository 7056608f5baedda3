"""The forms of tests that data sets have, and answers that check nothing."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.rewards.functions import python_sandbox
from mcore_rl.sandbox import runner
from mcore_rl.sandbox.assertions import Check, Do
from mcore_rl.sandbox.code_rows import check_code_rows
from mcore_rl.sandbox.code_tests import Call, Program, Suite, Text, is_blank, suite_of
from mcore_rl.sandbox.runner import run_python

PATIENT_SECONDS = 60.0
ADD = "def add(a, b):\n    return a + b\n"
METHOD = (
    "class Solution:\n    def add(self, a: int, b: int) -> Optional[int]:\n        return a + b\n"
)
SUM = "print(sum(map(int, input().split())))\n"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n"
UNITTEST = (
    "import unittest\n"
    "class TestAdd(unittest.TestCase):\n"
    "    def setUp(self):\n        self.one = 1\n"
    "    def test_add(self):\n        self.assertEqual(add(self.one, 2), 3)\n"
    "if __name__ == '__main__':\n    unittest.main()\n"
)
UNITTEST_OF_BASE = (
    "import unittest\n"
    "class Base(unittest.IsolatedAsyncioTestCase):\n"
    "    def verify(self, a, b, c):\n        assert add(a, b) == c\n"
    "class TestAdd(Base):\n"
    "    async def test_add(self):\n        self.verify(1, 2, 3)\n"
)


def case_of(method: str) -> str:
    """A unittest.TestCase with one method."""
    lines = "\n".join("    " + line for line in method.split("\n"))
    return f"import unittest\nclass T(unittest.TestCase):\n{lines}\nunittest.main()"


def leaves_of(suite: Suite) -> list[tuple[str, ...]]:
    """What the process of the code is asked for, of each assertion."""
    texts = [test for test in suite.tests if isinstance(test, Text)]
    return [step.leaves for text in texts for step in text.steps if isinstance(step, Check)]


PAIRS = {"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3, [4]]}
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(PAIRS)))).decode()
NAMED = [{"input": "a = 1, b = 2", "output": "3"}, {"input": "a = 'x', b = \"y\"", "output": "xy"}]
FUNCTIONAL = [{"input": "1\n2", "output": "3", "testtype": "functional"}]

# Name, answer, columns of the row, code that is right.
FORMS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("APPS and TACO, a program", PAIRS, {}, SUM),
    (
        "MBPP, a module that only the tests import",
        ["import math\nassert add(1, 2) == 3", "assert add(2, 2) == 4"],
        {},
        "def add(a, b):\n    return math.floor(a + b)\n",
    ),
    (
        "LeetCode, imports before the code",
        {"import_prefix": "from typing import *", "test": CHECK, "entry_point": "Solution().add"},
        {},
        METHOD,
    ),
    ("as JSON text", json.dumps(PAIRS), {}, SUM),
    ("as JSON text of JSON text", json.dumps(json.dumps(PAIRS)), {}, SUM),
    ("lists of lines", {"inputs": [["1 2"]], "outputs": [["3"]]}, {}, SUM),
    ("one pair", {"input": "1 2", "output": "3"}, {}, SUM),
    ("a list of pairs as JSON texts", [json.dumps({"input": "1 2", "output": "3"})], {}, SUM),
    ("LiveCodeBench", [{"input": "1 2", "output": "3", "testtype": "stdin"}], {}, SUM),
    ("DeepCoder", [{"type": "stdin_stdout", "input": "1 2", "output": "3"}], {"fn_name": "x"}, SUM),
    ("a function", CALLS, {}, ADD),
    ("a method of Solution", CALLS, {}, METHOD),
    ("arguments as JSON a line", {**CALLS, "inputs": ["1\n2"], "outputs": ["3"]}, {}, ADD),
    ("LiveCodeBench's functions", FUNCTIONAL, {"metadata": '{"func_name": "add"}'}, METHOD),
    ("its name in a column", json.dumps(FUNCTIONAL), {"fn_name": "add"}, ADD),
    (
        "DeepCoder's functions",
        [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}],
        {},
        ADD,
    ),
    ("LeetCodeDataset's input_output", NAMED, {"entry_point": "Solution().add"}, METHOD),
    ("the same in an object", {"input_output": NAMED, "entry_point": "add"}, {}, ADD),
    ("the same as JSON text", json.dumps(NAMED), {"entry_point": "add"}, ADD),
    (
        "the same beside a test",
        {"test": CHECK, "input_output": [{"input": "?", "output": "?"}], "entry_point": "add"},
        {},
        ADD,
    ),
    (
        "one assignment a line, in JSON",
        [{"input": "a = [null, true]\nb = ['x']", "output": '[null, true, "x"]'}],
        {"entry_point": "add"},
        ADD,
    ),
    (
        "pairs with an entry point",
        {"inputs": [[1, 2], [2, 2]], "outputs": [3, 4], "entry_point": "add"},
        {},
        ADD,
    ),
    ("HumanEval", {"test": CHECK, "entry_point": "add"}, {}, ADD),
    ("HumanEval's columns", CHECK, {"entry_point": "add"}, ADD),
    (
        "LeetCodeDataset",
        {"test": CHECK, "entry_point": "Solution().add"},
        {},
        ADD + "Optional=list\n" + METHOD,
    ),
    ("a check that is called", f"{CHECK}\ncheck(add)", {}, ADD),
    (
        "MBPP",
        {
            "test_list": ["assert add(1, 2) == three", "assert add(1, ONE) == 2"],
            "test_setup_code": "three = 3",
            "test_imports": ["from os import EX_USAGE", "ONE = EX_USAGE - 63"],
            "challenge_test_list": [],
        },
        {},
        ADD,
    ),
    (
        "MBPP's columns",
        ["assert add(1, 2) == three"],
        {"test_list": ["assert add(1, 2) == three"], "test_setup_code": "three = 3"},
        ADD,
    ),
    ("a text", "total = add(1, 2)\nassert total == 3", {}, ADD),
    ("a list of texts", ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], {}, ADD),
    ("a list of lines", ["total = add(1, 2)", "assert total == 3"], {}, ADD),
    (
        "a function named as a builtin",
        "assert sum(10, 15) == 25",
        {},
        "def sum(a, b): return a + b",
    ),
    ("unittest", UNITTEST, {}, ADD),
    ("pytest", "from solution import add\ndef test_add():\n    assert add(1, 2) == 3\n", {}, ADD),
    (
        "pytest's classes",
        "class TestAdd:\n    def test_it(self):\n        assert add(1, 2) == 3",
        {},
        ADD,
    ),
    ("under __main__", "if __name__ == '__main__':\n    assert add(1, 2) == 3", {}, ADD),
    ("a loop", "for a in range(3):\n    assert add(a, 1) == a + 1", {}, ADD),
    ("pairs as JSON texts", {key: json.dumps(PAIRS[key]) for key in PAIRS}, {}, SUM),
    ("pairs with a type", {**PAIRS, "type": "stdin_stdout"}, {}, SUM),
    ("tests as JSON text", {"tests": json.dumps(["assert add(1, 2) == 3"])}, {}, ADD),
    ("test_list as JSON text", {"test_list": json.dumps(["assert add(1, 2) == 3"])}, {}, ADD),
    ("test_cases", {"test_cases": [{"input": "1 2", "output": "3"}]}, {}, SUM),
    (
        "LiveCodeBench's rows",
        {"public_test_cases": json.dumps(FUNCTIONAL), "metadata": '{"func_name": "add"}'},
        {},
        METHOD,
    ),
    (
        "CodeContests",
        {
            "public_tests": {"input": ["1 2"], "output": ["3"]},
            "private_tests": {"input": [], "output": []},
        },
        {},
        SUM,
    ),
    ("unittest with a base of its own", UNITTEST_OF_BASE, {}, ADD),
    (
        "unittest, run by its text runner",
        UNITTEST.replace("unittest.main()", "unittest.TextTestRunner().run(SUITE)").replace(
            "SUITE", "unittest.defaultTestLoader.loadTestsFromTestCase(TestAdd)"
        ),
        {},
        ADD,
    ),
    (
        "pytest's setup",
        "class TestAdd:\n"
        "    @classmethod\n    def setup_class(cls):\n        cls.one = 1\n"
        "    def setup_method(self, method):\n        self.two = self.one + 1\n"
        "    def test_it(self):\n        assert add(self.one, self.two) == 3",
        {},
        ADD,
    ),
    (
        "lists and flags that are filled",
        "cases, ok = [], True\nfound = []\ncases.append((1, 2, 3))\n"
        "for a, b, c in cases:\n    found.append(add(a, b) == c)\nassert all(found)",
        {},
        ADD,
    ),
    ("exit codes", "if add(1, 2) != 3:\n    raise SystemExit(1)", {}, ADD),
]
WRONG = {ADD: "def add(a, b):\n    return a - b\n", SUM: "print(1)\n"}


@pytest.mark.parametrize(
    ("answer", "row", "right"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS]
)
def test_public_forms_reward_correct_code_only(
    answer: Any, row: dict[str, Any], right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CODE_SECONDS", PATIENT_SECONDS)  # the cores may be busy

    def paid(code: str) -> float:
        response = f"So:\n```python\n{code}```\n"
        return python_sandbox(prompt="Add.", response=response, answer=answer, row=row)

    assert paid(right) == 1.0
    assert paid(WRONG.get(right, "pass\n")) == 0.0


def test_checked_function_is_the_last_one_of_the_prompt() -> None:
    prompt = "def helper():\n    pass\n\ndef add(a, b):\n    '''Their sum.'''\n"
    assert leaves_of(suite_of(CHECK, prompt=prompt))[0] == ("_settled(candidate(1, 2), candidate)",)
    assert suite_of(CHECK, prompt=prompt).names == {"add"}


@pytest.mark.parametrize(
    "answer",
    [
        5,
        None,
        True,
        "",
        " \n",
        [],
        {},
        [1, 2],
        ["", " "],
        {"a": 1},
        "5",
        "null",
        "[1, 2]",
        '"text"',
        "def f(:",
        "pass",
        "# assert f(1) == 2",
        "print(f(1))",
        "f(1)",
        "f(1) == 2",
        ["f(1) == 2", "f(2) == 3"],
        "x = f(1) == 2",
        "assert True",
        "assert 1 + 1 == 2",
        "x = 1\nassert x == 1",
        "assert len([1]) == 1",
        "assert (f(1) == 2, 'it is not 2')",
        "assert f(1) == 2 or True",
        "assert f(1) == f(1)",
        "assert [f(1) == 2]",
        "assert (f(each) == 2 for each in (1, 2))",
        "assert lambda: f(1) == 2",
        "def helper():\n    assert f(1) == 2",
        "def helper():\n    assert f(1) == 2\ndef other():\n    helper()",
        "class Helper:\n    def test(self):\n        assert f(1) == 2",
        "def check(candidate):\n    return\n    assert candidate(1) == 2\ncheck(f)",
        "if False:\n    assert f(1) == 2",
        "if __name__ != '__main__':\n    assert f(1) == 2",
        "while 0:\n    assert f(1) == 2",
        "try:\n    assert f(1) == 2\nexcept:\n    pass",
        "try:\n    assert f(1) == 2\nexcept (ValueError, AssertionError):\n    print(1)",
        "import contextlib\nwith contextlib.suppress(Exception):\n    assert f(1) == 2",
        CHECK,
        {"test": CHECK},
        {"test": CHECK, "entry_point": "__import__('os').abort(1)"},
        "import pytest\n@pytest.mark.parametrize('a', [1])\ndef test_f(a):\n    assert f(a) == 2",
        "import unittest\nclass T(unittest.TestCase):\n    pass\nunittest.main()",
        case_of("def test_f(self):\n    f(1)"),
        case_of("def test_f(self):\n    self.assertTrue('f(1)', f(1))"),
        case_of("def test_f(self):\n    f(1)\n    self.assertEqual(1, 1)"),
        case_of("def check_f(self):\n    self.assertEqual(f(1), 2)"),
        case_of("async def test_f(self):\n    self.assertEqual(f(1), 2)"),
        case_of("@unittest.skip('slow')\ndef test_f(self):\n    self.assertEqual(f(1), 2)"),
        case_of("@unittest.expectedFailure\ndef test_f(self):\n    self.assertEqual(f(1), 2)"),
        "class TestF:\n    def helper(self):\n        assert f(1) == 2\n"
        "    def test_f(self):\n        f(1)",
        "class TestF:\n    @pytest.mark.skip\n    def test_f(self):\n        assert f(1) == 2",
        "for a, b in []:\n    assert f(a) == b",
        "inputs = []\nresults = []\nfor a, b in zip(inputs, results):\n    assert f(a) == b",
        "for a in range(0):\n    assert f(a) == 2",
        "assert all(f(a) == b for a, b in [])",
        "ok = True\nf(1)\nassert ok",
        "def t():\n    try:\n        assert f(1) == 2\n    finally:\n        return\nt()",
        "def t():\n    yield\n    assert f(1) == 2\nt()",
        "async def t():\n    assert f(1) == 2\nt()",
        {"inputs": "[]", "outputs": "[]"},
        {"inputs": '["1", "2"]', "outputs": '["1"]'},
        {"test_list": [], "test_setup_code": "x = 1"},
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []},
        {"inputs": ["1", "2"], "outputs": ["1"]},
        {"inputs": ["1"]},
        {"inputs": ["1"], "outputs": [""]},
        {"inputs": ["1"], "outputs": ["\n"]},
        {"inputs": [{"a": 1}], "outputs": ["1"]},
        {"fn_name": "f", "inputs": [[1]], "outputs": [None]},
        {"fn_name": "f(1)", "inputs": [[1]], "outputs": [2]},
        {"fn_name": "f", "inputs": ["one"], "outputs": ["2"]},
        FUNCTIONAL,
        json.dumps({"inputs": [], "outputs": []}),
    ],
    ids=str,
)
def test_an_answer_that_checks_nothing_is_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match="^the answer "):
        suite_of(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
        "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError",
        "try:\n    assert f(1) == 2\nexcept Exception:\n    raise SystemExit(1) from None",
        "import numpy as np\nnp.testing.assert_allclose(f(1), 2)",
        "def test_it():\n    import pytest\n    with pytest.raises(ValueError):\n        f(-1)",
        "def same(a, b):\n    assert a == b\nfor a in range(3):\n    same(f(a), a)",
        "def same(a, b):\n    if a != b:\n        exit(1)\nlist(map(same, [f(1)], [2]))",
        "assert callable(globals()['f'])",
    ],
)
def test_an_answer_that_can_fail_is_not_refused(answer: str) -> None:
    assert suite_of(answer).tests


def test_packed_tests_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="base64 of zlib.*unpack the column into JSON text"):
        suite_of({"public_test_cases": json.dumps([PAIRS]), "private_test_cases": PACKED})


def test_arguments_of_other_types_than_plain_data_are_refused() -> None:
    row = {"entry_point": "Solution().f", "starter_code": "def f(self, a: Optional[ListNode]):"}
    with pytest.raises(ValueError, match="ListNode objects"):
        suite_of([{"input": "a = [1]", "output": "[1]"}], row=row)


def test_blank_answers_differ_from_wrong_ones() -> None:
    assert all(map(is_blank, ("", " \n", [], {}, None)))
    assert not any(map(is_blank, ("5", ["x"], {"a": 1})))


def test_splittable_assertions_do_not_reveal_the_expected_value() -> None:
    suite = suite_of(
        "assert f(1) == 2, 'no'\n"
        "assert f(2) in (7, 8) and not f(3)\n"
        "assert abs(f(4) - 2.5) < 1e-6\n"
        "assert math.isclose(f(5), 2.5, rel_tol=1e-3)\n"
        "assert 10**9 + 7 == f(6)\n"
        "assert set(f(7)) == set([1]) \n"
        "assert f(8) is None\n"
        "assert f(9) == g(9)\n"
    )
    assert leaves_of(suite) == [
        *[(f"_settled(f({number}), f)",) for number in (1, 2)],
        ("not not f(3)",),  # its own type decides
        *[(f"_settled(f({number}), f)",) for number in (4, 5, 6)],
        ("_settled(set(_settled(f(7), f)), set)",),
        ("_settled(f(8), f)",),
        ("_settled(f(9), f)", "_settled(g(9), g)"),
    ]
    (text,) = suite_of("for a in (1, 2):\n    assert f(a) == 3").tests
    assert isinstance(text, Text)
    (step,) = text.steps
    assert isinstance(step, Do)


def test_pairs_are_programs_and_calls_as_they_are_written() -> None:
    assert suite_of(PAIRS).tests == (Program("1 2\n", "3\n"), Program("2 2\n", "4\n"))
    assert suite_of({"inputs": [[1, "b"]], "outputs": [["x\n", "y"]]}).tests == (
        Program("1\nb\n", "x\ny\n"),
    )
    (call,) = suite_of({"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [[[3]]]}).tests
    assert isinstance(call, Call)
    assert (call.arguments, call.expected, call.may_be_wrapped) == (({1: 2},), [[3]], True)


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nprint(sum(map(int, sys.stdin.readline().split())))\nsys.exit()",
        "print(sum(map(int, open(0).read().split())))\nquit()",
        "import os\nos.write(1, b'%d' % sum(map(int, os.read(0, 99).split())))\nos._exit(0)",
        "import threading, sys\n"
        "def main():\n    sys.stdout.write(str(sum(map(int, sys.stdin.buffer.read().split()))))\n"
        "threading.Thread(target=main).start()",
        "import atexit, io, sys\n"
        "sys.stdout = io.StringIO()\n"
        "atexit.register(lambda text: sys.__stdout__.write(text.getvalue()), sys.stdout)\n"
        "print(sum(map(int, input().split())))",
        "def main():\n    print(sum(map(int, input().split())))\n"
        "if __name__ == '__main__':\n    main()",
    ],
)
def test_programs_may_use_any_form_of_input_output_and_exit(code: str) -> None:
    found = run_python(code, suite_of(PAIRS), timeout_seconds=PATIENT_SECONDS)
    assert found.all_passed, found


def test_program_that_fails_after_correct_output_does_not_pass() -> None:
    for end in ("raise SystemExit(1)", "import os; os._exit(1)", "1 / 0"):
        code = f"print(sum(map(int, input().split())), flush=True)\n{end}"
        found = run_python(code, suite_of(PAIRS), timeout_seconds=PATIENT_SECONDS)
        assert found.passed == (False, False)


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("import collections\ndef f(): return collections.Counter('aab')", "{'a': 2, 'b': 1}"),
        ("import collections\ndef f(): return collections.namedtuple('P', 'x')(1)", "(1,)"),
        ("def f(): return {1, 2}", "set([2, 1])"),
        ("def f(): return 2 ** 20000", "2 ** 20000"),
        ("def f(): return b'\\xff'", "b'\\xff'"),
        ("def f(): return 1j", "1j"),
        ("def f(): return float('inf')", "float('inf')"),
        ("def f(): return '\\ud800'", "'\\ud800'"),
        ("from fractions import Fraction\ndef f(): return Fraction(1, 2)", "0.5"),
        ("from decimal import Decimal\ndef f(): return Decimal('1.5')", "1.5"),
        ("import numpy\ndef f(): return numpy.int64(3)", "3"),
        ("import numpy\ndef f(): return [numpy.float32(0.5)]", "[0.5]"),
        (
            "class V:\n    def __eq__(self, other): return type(other) is V\ndef f(): return V()",
            "V()",
        ),
    ],
)
def test_values_are_compared_as_python_does(code: str, test: str) -> None:
    texts = [f"assert f() == {test}", f"for _ in '1':\n    assert f() == {test}"]
    found = run_python(code, texts, timeout_seconds=PATIENT_SECONDS)
    assert found.all_passed, found
    wrong = run_python("def f(): return 5", texts, timeout_seconds=PATIENT_SECONDS)
    assert wrong.passed == (False, False)


# Files of prompts ---------------------------------------------------------------------------------


def rows(*answers: Any) -> list[Any]:
    return [
        SimpleNamespace(index=2 * number, text="f?", row="{}", answer=answer)
        for number, answer in enumerate(answers)
    ]


def refusal(*answers: Any, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        check_code_rows(rows(*answers), "--rl-prompts some.jsonl", **options)
    return caught.value


def test_rows_without_assertions_are_refused_with_their_number() -> None:
    good = "assert f(1) == 2"
    found = refusal(good, "5", good, "assert True")
    assert found.flag == "--rl-prompts some.jsonl" and "--rl-answer-column" in found.remedy
    assert found.found.startswith(", row 3: the answer asserts nothing")
    assert "(1 more such rows: 7)" in found.found
    assert ", row 1: " in refusal("").found
    check_code_rows(rows(good, ""), "--rl-prompts some.jsonl", may_be_blank=True)


@pytest.mark.parametrize(
    ("test", "who"),
    [
        ("try:\n    f(1)\n    assert False\nexcept NameError:\n    pass", "empty code"),
        ("assert f(1) is None", "functions return None"),
        ("assert callable(f)", "functions return None"),
        ({"fn_name": "f", "inputs": [["a"]], "outputs": [[None]]}, "no result"),
    ],
)
def test_rows_whose_tests_pass_empty_code_are_refused(test: Any, who: str) -> None:
    assert who in refusal(test).found
