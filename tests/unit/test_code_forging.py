"""Code that tries to pass its tests without solving anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mcore_rl.sandbox.code_tests import suite_of, texts
from mcore_rl.sandbox.grading import Grading, Reply
from mcore_rl.sandbox.runner import run_python

PATIENT_SECONDS = 60.0
# These never end: a pass would come at once.
ENDLESS = {"a trace that skips lines", "its pipes, at once", "its pipes, flooded"}
ENDLESS_SECONDS = 5.0
# An assertion that is compared outside, one that is not, and a runner of its own.
TESTS = [
    "assert f(1) == 2",
    "for a, b in [(1, 2), (2, 3)]:\n    assert f(a) == b",
    "import unittest\nclass T(unittest.TestCase):\n"
    "    def test_f(self):\n        self.assertEqual(f(1), 2)\n",
    "assert all(f(each) == each + 1 for each in (1, 2))",
]
CALLS = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 3]}
PROGRAMS = {"inputs": ["1", "2"], "outputs": ["2", "3"]}

EQUAL = (
    "class E:\n"
    "    def __eq__(self, other): return True\n"
    "    def __ne__(self, other): return False\n"
    "    def __hash__(self): return 0\n"
    "    def __bool__(self): return True\n"
)
ANSWERS = """
import json, os, threading
def go():
    while True:
        for fd in range(3, 12):
            try:
                lines = os.read(fd, 1 << 16).splitlines()
            except OSError:
                continue
            for line in lines:
                try:
                    answer = {'token': json.loads(line)['token'], 'ended': True, 'value': True}
                except (ValueError, LookupError):
                    continue
                for out in range(3, 12):
                    try:
                        os.write(out, json.dumps(answer).encode() + b'\\n')
                    except OSError:
                        pass
"""
OBJECTS = (
    "import gc\nfor each in gc.get_objects():\n    if type(each).__name__ == 'Program':\n        "
)
F = "\ndef f(x): return 0\n"
FORGERIES = {
    "honest and wrong": F,
    "nothing": "pass",
    "exec": f"import builtins; builtins.exec = lambda *a, **k: None{F}",
    "compile": "import builtins\nold = builtins.compile\n"
    f"builtins.compile = lambda *a, **k: old('', 'x', 'exec'){F}",
    "json.dumps": "import json\nold = json.dumps\n"
    f"json.dumps = lambda x, **k: old({{**x, 'ended': True, 'value': 2}}){F}",
    "the encoder": "import json\nold = json.JSONEncoder.iterencode\njson.JSONEncoder.iterencode = "
    f"lambda s, x, **k: old(s, {{**x, 'ended': True, 'value': 2}}, **k){F}",
    "sys.exit": "import sys; sys.exit(0)",
    "os._exit": "import os; os._exit(0)",
    "os._exit later": "import os\ndef f(x): os._exit(0)",
    "an exception that exits": "def f(x): raise SystemExit(0)",
    "AssertionError": f"import builtins; builtins.AssertionError = type('A', (), {{}}){F}",
    "all and isinstance": "import builtins\nbuiltins.all = builtins.isinstance = lambda *a: True"
    + F,
    "equal to everything": f"{EQUAL}def f(x): return E()",
    "an int that is equal to everything": "class I(int):\n"
    "    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef f(x): return I(0)",
    "a list that is equal to everything": f"{EQUAL}class L(list, E): pass\ndef f(x): return L()",
    "a trace that skips lines": "import sys\n"
    "def trace(frame, event, arg):\n"
    "    if frame.f_code.co_filename == '<test>' and event == 'line':\n"
    "        try: frame.f_lineno += 1\n"
    "        except ValueError: pass\n"
    "    return trace\n"
    "def f(x):\n"
    "    sys.settrace(trace); sys._getframe(1).f_trace = trace\n    return 0",
    "its objects, believed": f"{OBJECTS}type(each).answer = "
    f"lambda s, r: {{'ended': True, 'value': 2}}{F}",
    "its objects, running nothing": f"{OBJECTS}type(each)._execute = lambda *a, **k: None{F}",
    "its module": f"import __main__; __main__._serve = __main__.Program = None{F}",
    "its globals": "import sys\nframe = sys._getframe(1)\nwhile frame:\n"
    "    frame.f_globals['exec'] = frame.f_globals['compile'] = lambda *a, **k: ''\n"
    f"    frame = frame.f_back{F}",
    "its pipes, in a thread": f"{ANSWERS}threading.Thread(target=go, daemon=True).start(){F}",
    "its pipes, at once": f"{ANSWERS}go()",
    "its pipes, ahead": "import os\nfor fd in range(3, 12):\n"
    f"    try: os.write(fd, b'{{\"ended\": true}}\\n' * 9)\n    except OSError: pass{F}",
    "its pipes, flooded": "import os\nfor fd in range(3, 12):\n"
    f"    try:\n        while True: os.write(fd, b'x' * 65536)\n    except OSError: pass{F}",
    "alarms": "import signal\ndef leave(*_): raise SystemExit(0)\n"
    f"signal.signal(signal.SIGALRM, leave); signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01){F}",
    "atexit": f"import atexit, os; atexit.register(os._exit, 0){F}",
    "traceback": f"import traceback; traceback.format_exception = lambda *a: 1 / 0{F}",
    "import hooks": "import sys\nclass Hook:\n    def find_spec(self, *_): raise SystemExit(0)\n"
    f"sys.meta_path.insert(0, Hook()){F}",
    "unittest": "import unittest\nunittest.TestResult.wasSuccessful = lambda self: True\n"
    f"unittest.TestCase.run = lambda self, result=None: result{F}",
    "unittest, debugged": f"import unittest\nunittest.TestCase.debug = lambda self: None{F}",
    "unittest's stop": "import unittest.case\ndef f(x): raise unittest.case._ShouldStop",
    "unittest's skip": "import unittest\ndef f(x): raise unittest.SkipTest",
    "the comparison": f"_are_equal_as_plain_data = lambda *a: True{F}",
}


TABLE = "for a, b in [(1, 2), (2, 3)]:\n    assert f(a) == b"
UNITTEST = TESTS[2]
# One that passes, and what shadows or patches that which its test is made of.
OF_ONE_TEST = {
    "a name of the test's": (TABLE, "def f(x): return b"),
    "an expected value by its name": (
        "wanted = 2\nassert f(1) == wanted",
        "def f(x): return wanted",
    ),
    "the comparison, by the module": (
        TABLE,
        "def f(x):\n    globals()['_are_equal_as_plain_data'] = lambda *a: True\n    return 2",
    ),
    "range": ("for a in range(5):\n    assert f(a) == a + 1", f"range = lambda *a: (){F}"),
    "zip": ("for a, b in zip([1], [2]):\n    assert f(a) == b", f"zip = lambda *a: (){F}"),
    "all": (TESTS[3], f"all = lambda *a: True{F}"),
    "isinstance": ("assert isinstance(f(1), str)", f"isinstance = lambda *a: True{F}"),
    "len": ("assert len(f(1)) == 2", f"len = lambda *a: 2{F}"),
    "assertTrue": (UNITTEST, f"import unittest\nunittest.TestCase.assertTrue = lambda *a: None{F}"),
    "wasSuccessful": (
        UNITTEST,
        f"import unittest\nunittest.TestResult.wasSuccessful = lambda *a: True{F}",
    ),
    "one of two methods, skipped": (
        f"{UNITTEST}    def test_g(self):\n        self.assertEqual(f(5), 6)\n",
        "import unittest\ndef f(x):\n    if x == 1: return 2\n    raise unittest.SkipTest",
    ),
    "numpy": (
        "import numpy as np\nassert np.allclose(f(1), 2)",
        f"import numpy\nnumpy.allclose = lambda *a, **k: True{F}",
    ),
}


@pytest.mark.parametrize("name", OF_ONE_TEST)
def test_code_cannot_replace_parts_of_its_test(name: str) -> None:
    test, code = OF_ONE_TEST[name]
    assert not run_python(code, [test], timeout_seconds=PATIENT_SECONDS).all_passed
    right = "def f(x): return str(x)" if name == "isinstance" else "def f(x): return x + 1"
    right = "def f(x): return [x, x]" if name == "len" else right
    assert run_python(right, [test], timeout_seconds=PATIENT_SECONDS).all_passed


def test_handlers_and_timers_of_code_do_not_outlast_a_request() -> None:
    code = """
import signal
def leave(*_): raise SystemExit(0)
def f(x):
    signal.signal(signal.SIGALRM, leave)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 3600)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGUSR2})
    return x + 1
f(0)
"""
    state = (
        "[signal.getsignal(each) for each in (signal.SIGALRM, signal.SIGUSR1)] == [0, 0]",
        "signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()",
    )
    test = "\n".join(["import signal", *(f"assert {e}" for e in state), "assert f(1) == 2"] * 2)
    assert run_python(code, [test], timeout_seconds=PATIENT_SECONDS).all_passed
    # Of a signal that is pending when the answer is ready, the handler does not run either.
    blocked = code.replace("return", "signal.raise_signal(signal.SIGALRM)\n    return")
    assert run_python(blocked, [test], timeout_seconds=PATIENT_SECONDS).all_passed


RIGHT = {
    "a parameter by the name of the code": (
        "def f(x): return x + 1",
        "def run(f):\n    assert all(f(a) == a + 1 for a in (1, 2))\nrun(f)",
    ),
    "the code as a module": ("def f(x): return x + 1", "from solution import f\nassert f(1) == 2"),
    "a loop until it ends": (
        "def f(x): return x - 1",
        "x = 5\nwhile f(x):\n    x = f(x)\nassert x == 1",
    ),
    "a function by the name of a builtin": ("def sum(a, b): return a * b", "assert sum(2, 3) == 6"),
    "a counter of the code's": (
        "n = 0\ndef f():\n    global n\n    n += 1",
        "f()\nassert n == 1\nf()\nassert n == 2",
    ),
    "a module that it imports": ("import math\ndef f(x): return x", "assert math.isclose(f(1), 1)"),
    "what must be raised": (
        "def f(x): raise ValueError",
        "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
    ),
    "a test that ends its process": (
        "def f(x): return x + 1",
        "import os\nif f(1) != 2:\n    os._exit(1)\nassert f(2) == 3",
    ),
    "a class": (
        "class A:\n    def __init__(self): self.x = []\n    def add(self, x): self.x.append(x)",
        "a = A()\na.add(1)\nassert a.x == [1]\na.add(2)\nassert len(a.x) == 2",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_correct_code_passes_isolated_tests(name: str) -> None:
    code, test = RIGHT[name]
    found = run_python(code, [test], timeout_seconds=PATIENT_SECONDS)
    assert found.all_passed, found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ENDLESS)) for n in FORGERIES]
)
def test_forged_code_fails_assertions(name: str) -> None:
    seconds = ENDLESS_SECONDS if name in ENDLESS else PATIENT_SECONDS
    found = run_python(FORGERIES[name], TESTS, timeout_seconds=seconds)
    assert not any(found.passed) and not found.all_passed, found


@pytest.mark.parametrize("answer", [CALLS, PROGRAMS], ids=["calls", "programs"])
@pytest.mark.parametrize(
    "name",
    [
        "equal to everything",
        "its objects, believed",
        "its pipes, in a thread",
        "os._exit",
        "the encoder",
    ],
)
def test_forged_code_fails_pairs(answer: dict[str, Any], name: str) -> None:
    found = run_python(FORGERIES[name], suite_of(answer), timeout_seconds=PATIENT_SECONDS)
    # One that always answers 2 is right where 2 is.
    assert not found.all_passed and not all(found.passed), found


def test_correct_code_passes_every_test_form() -> None:
    """Without this, the tests above could not fail."""
    right = "def f(x): return x + 1\n"
    assert run_python(right, TESTS, timeout_seconds=PATIENT_SECONDS).all_passed
    assert run_python(right, suite_of(CALLS), timeout_seconds=PATIENT_SECONDS).all_passed
    program = "print(int(input()) + 1)"
    assert run_python(program, suite_of(PROGRAMS), timeout_seconds=PATIENT_SECONDS).all_passed


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"decimal": "sNaN"}, 3),
        ({"fraction": ["1e99999999"]}, 3),
        ({"fraction": ["1e99999999", 1]}, 3),
        ({"dict": [[{"int": hex(1 << 20_000)}, 1]]}, {"a": 1}),
        ({"dict": [[1, 0], ["1", 2]]}, {"1": 2}),
        (500_000.5, 500_000),
        ({"opaque": True}, True),
    ],
)
def test_malformed_values_of_calls_fail(value: Any, expected: Any) -> None:
    for of_call in (expected, [expected]):  # APPS wraps them
        grading = Grading("", suite_of({"fn_name": "f", "inputs": [[1]], "outputs": [of_call]}))
        list(asked(grading, lambda request: {"ended": True, "value": value}))
        assert grading.passed == [False]


# What is asked, without a process -----------------------------------------------------------------


def asked(grading: Grading, answers: Any) -> Iterator[dict[str, Any]]:
    """The requests of a grading whose every answer `answers(request)` gives."""
    dialogue = grading.dialogue()
    request = next(dialogue, None)
    while request is not None:
        yield request
        try:
            request = dialogue.send(Reply(answers(request)))
        except StopIteration:
            return


@pytest.mark.parametrize("exit_code", [0, 142, -14])
def test_process_that_ends_between_the_steps_of_a_test_passes_none(exit_code: int) -> None:
    """Until then it answers everything correctly."""
    names = {"f": int, "_settled": lambda value, *_: value}
    for last in ("f(2)", "f(3)"):
        grading = Grading("", texts(["assert f(1) == 1\nassert f(2) == 2", "assert f(3) == 3"]))
        dialogue = grading.dialogue()
        request = next(dialogue)
        while last not in request.get("value", ""):
            value = eval(request["value"], names) if "value" in request else None
            fails = request.get("do", "").startswith("assert")
            request = dialogue.send(Reply({"ended": not fails, "value": value}))
        with pytest.raises(StopIteration):
            dialogue.send(Reply({}, exit_code=exit_code))
        assert grading.passed == [False, False] and str(exit_code) in grading.why


@pytest.mark.parametrize(
    "blanket",
    [
        {"ended": True},
        {"ended": False},
        {"ended": True, "value": True},
        {"ended": True, "value": False},
        {"ended": True, "value": 2},
        {"ended": True, "value": None},
        {"ended": True, "value": {"opaque": True}},
        {"ended": True, "value": {"tuple": 5}},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("test", TESTS)
def test_constant_answers_fail(blanket: dict[str, Any], test: str) -> None:
    grading = Grading("", texts([test]))
    list(asked(grading, lambda request: blanket))
    assert grading.passed == [False]


def test_probes_are_in_random_order() -> None:
    orders = set()
    for _ in range(200):
        grading = Grading("", texts(TESTS[1:2] * 3))
        real = {"run", "for a, b"}
        requests = asked(grading, lambda request: {"ended": "run" in request})
        kinds = [
            next((kind for kind in real if kind in request or kind in str(request)[:16]), "probe")
            for request in requests
        ]
        orders.add(tuple(kinds))
    assert len(orders) > 3


def test_requests_do_not_contain_the_expected_result() -> None:
    for answer in (
        {"fn_name": "f", "inputs": [[1]], "outputs": ["a secret"]},
        {"inputs": ["1"], "outputs": ["a secret"]},
        "assert f(1) == 'a secret'",
        {
            "test": "def check(candidate):\n    assert candidate(1) == 'a secret'",
            "entry_point": "f",
        },
    ):
        grading = Grading("", suite_of(answer))
        requests = list(asked(grading, lambda request: {"ended": True, "value": 1}))
        assert requests and "a secret" not in str(requests)
