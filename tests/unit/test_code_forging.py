"""Code that would pass its tests without solving anything, by one line or by many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mcore_rl.rewards.code_tests import suite_of, texts
from mcore_rl.rewards.grading import Grading, Reply
from mcore_rl.rewards.sandbox import run_python

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
    "the comparison": f"_are_equal_as_plain_data = lambda *a: True{F}",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forged_code_passes_assertions(name: str) -> None:
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
def test_no_forged_code_passes_pairs(answer: dict[str, Any], name: str) -> None:
    found = run_python(FORGERIES[name], suite_of(answer), timeout_seconds=PATIENT_SECONDS)
    # One that always answers 2 is right where 2 is.
    assert not found.all_passed and not all(found.passed), found


def test_right_code_passes_them_all() -> None:
    """Else the tests above could not fail."""
    right = "def f(x): return x + 1\n"
    assert run_python(right, TESTS, timeout_seconds=PATIENT_SECONDS).all_passed
    assert run_python(right, suite_of(CALLS), timeout_seconds=PATIENT_SECONDS).all_passed
    program = "print(int(input()) + 1)"
    assert run_python(program, suite_of(PROGRAMS), timeout_seconds=PATIENT_SECONDS).all_passed


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
def test_no_answer_that_is_always_the_same_passes(blanket: dict[str, Any], test: str) -> None:
    grading = Grading("", texts([test]))
    list(asked(grading, lambda request: blanket))
    assert grading.passed == [False]


def test_probes_stand_in_an_order_that_is_drawn() -> None:
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


def test_what_is_expected_of_calls_and_programs_is_not_asked_with() -> None:
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
