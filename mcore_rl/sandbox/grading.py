"""The grading of a policy's code: requests to its process, and the evaluation of the answers.

The process (`inside`) runs the code and is never trusted: it receives inputs, and its results are
compared here, with expected values that it does not have. It reports whether a step has passed only
if the step must run there as a unit (`assertions.Do`, or an assertion whose expression is one
call). Between such steps, at random places, are probes with known answers: statements that must
raise, expressions of random numbers, and the tests with a stub in place of the code, as what fails
before the code runs must also fail after it. A process that answers a probe wrongly, or ends before
it has answered all, passes no test. A test passes when all its steps have passed.

Pure: `Grading.dialogue` yields requests and receives replies; `runner` transports them.
"""

from __future__ import annotations

import io
import itertools
import math
import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.common.readers import InvalidData, finite_number
from mcore_rl.sandbox.assertions import EQUAL, LEAF, Do, Incomparable, Step
from mcore_rl.sandbox.code_tests import Call, Program, Suite, Text
from mcore_rl.sandbox.code_texts import stubbed_steps
from mcore_rl.sandbox.sent_values import Opaque, decoded

_MAX_DECIMAL = 1 << 4096  # beyond that, Python writes no decimals
_TOLERANCE = 1e-6  # of floats: relative above 1, absolute below
_MAX_KEPT = 1 << 16  # characters of standard output and of standard error, each
_MAX_STUBBED = 64  # steps
_SPACE, _SPACE_BEFORE, _SPACE_OF_STUBS = 0, 1, 2  # of tests, of stubs before the code and after
_NOT_THERE = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError")
_RAISED = 'Traceback (most recent call last):\n  File "<test>", line 1, in <module>\n'

Request = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the process, and its output meanwhile.

    With an `exit_code` the process has ended instead, and `fields` is empty.
    """

    fields: dict[str, Any]
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the request ran to its end."""
        return self.fields.get("ended") is True


Dialogue = Generator[Request, Reply, bool]


class _ProcessEnded(Exception):
    """The process ended during a request."""


class Grading:
    """The state of one run, during and after it."""

    def __init__(self, code: str, suite: Suite, *, stops_early: bool = False) -> None:
        """With `stops_early` the first failed test ends the run."""
        self._code, self._suite, self._stops_early = code, suite, stops_early
        self._random = random.SystemRandom()
        self._has_shown_failure = False
        self.passed = [False] * len(suite.tests)
        self.has_ended = False  # the code ran to its end
        self.why = ""  # why it was not graded to the end
        self.stdout = self.stderr = ""

    def dialogue(self) -> Generator[Request, Reply, None]:
        """Yield each request after the reply to the previous one was sent; see `inside`.

        If a process has ended and another request follows, the request is for a new process.
        """
        try:
            yield from self._graded()
        except _ProcessEnded as ended:
            self.passed = [False] * len(self.passed)  # it has evaded the remaining probes
            self.why = str(ended)

    def _graded(self) -> Generator[Request, Reply, None]:
        tests = self._suite.tests
        stubbed = yield from self._stubbed_steps()
        if not tests or not all(isinstance(test, Program) for test in tests):
            name = "solution" if any(isinstance(test, Call) for test in tests) else "__main__"
            reply = yield from self._asked(
                {"run": self._code, "name": name, "before": self._suite.imports}
            )
            if not reply.has_ended:
                return
        self.has_ended = True
        if self._suite.setup:
            reply = yield from self._asked({"do": self._suite.setup})
            if not reply.has_ended:
                return
        failed: set[int] = set()
        planned = self._plan(stubbed)
        last_steps = {position: number for number, (position, _) in enumerate(planned)}
        for number, (position, step) in enumerate(planned):
            if position is None:
                if not (yield from step):
                    self.passed = [False] * len(tests)
                    self.why = "it answered a probe wrongly"
                    return
                continue
            if position in failed:
                continue
            if (yield from step):
                self.passed[position] = number == last_steps[position]
                continue
            failed.add(position)
            if self._stops_early:
                return

    # Requests -------------------------------------------------------------------------------------

    def _stubbed_steps(self) -> Generator[Request, Reply, list[tuple[str, bool]]]:
        """Run the steps with a stub in place of the code, before any code has run. Return each with
        whether it must also fail later; failures due to a missing module or name do not count."""
        texts = [test for test in self._suite.tests if isinstance(test, Text)]
        steps: list[tuple[str, bool]] = []
        sources = stubbed_steps([test.module for test in texts], self._suite.setup)
        for source in sources[:_MAX_STUBBED]:
            reply = _checked((yield {"do": source, "space": _SPACE_BEFORE}))
            output = _text(reply.fields.get("error")) + reply.stdout
            is_known = not any(name in output for name in _NOT_THERE)
            steps.append((source, is_known and reply.fields.get("ended") is False))
        return steps

    def _plan(self, stubbed: Sequence[tuple[str, bool]]) -> list[tuple[int | None, Dialogue]]:
        """Return the steps of all tests in order, with the position of their test, and probes at
        random places among them. Steps are generators, which run nothing until they are used."""
        planned: list[tuple[int | None, Dialogue]] = []
        text_steps: list[Step] = []
        for position, test in enumerate(self._suite.tests):
            if isinstance(test, Program):
                planned.append((position, self._run_program(test)))
            elif isinstance(test, Call):
                planned.append((position, self._call(test)))
            else:
                steps = test.steps
                text_steps += steps
                planned += [(position, self._run_step(step)) for step in steps]
        for probe in self._probes(text_steps) if text_steps else ():
            planned.insert(self._random.randint(0, len(planned)), (None, probe))
        at = 0
        for source, must_fail in stubbed:
            at = self._random.randint(at, len(planned))
            request = {"do": source, "space": _SPACE_OF_STUBS}
            planned.insert(at, (None, _probe(request, False if must_fail else None)))
            at += 1
        return planned

    def _probes(self, steps: Sequence[Step]) -> list[Dialogue]:
        """Return a probe of each kind: a failing statement, a value, a false assertion."""
        first, last = sorted(self._random.sample(range(2, 2000), 2))
        # It looks like one of the tests, but raises before it does anything.
        sources = [step.source for step in steps if isinstance(step, Do)] or ["pass"]
        source = self._random.choice(sources)
        fails = f"assert {EQUAL}({first} + {last}, {first - last})\n{source}"
        # Only operators: the code may define its own `sum`.
        return [
            _probe({"do": fails}, False),
            _probe({"value": f"{first} * {last} + {first}"}, first * last + first),
            _probe({"value": f"{last} < {first}"}, False),
        ]

    def _asked(self, request: Request) -> Generator[Request, Reply, Reply]:
        """Send a request and keep its output."""
        reply = yield request
        self.stdout = (self.stdout + reply.stdout)[:_MAX_KEPT]
        self.stderr = (self.stderr + reply.stderr + _text(reply.fields.get("error")))[:_MAX_KEPT]
        return _checked(reply)

    def _value(self, request: Request) -> Generator[Request, Reply, Any]:
        """Evaluate an expression. InvalidData if it raises."""
        reply = yield from self._asked(request)
        if "value" not in reply.fields:
            raise InvalidData("it raised")
        return decoded(reply.fields["value"])

    def _run_program(self, test: Program) -> Dialogue:
        """Return whether the code prints what is expected. It may exit with code 0."""
        reply = yield {"run": self._code, "name": "__main__", "stdin": test.stdin}
        has_ended = reply.has_ended or reply.exit_code == 0
        passes = has_ended and same_output(reply.stdout, test.expected)
        self.has_ended &= has_ended
        if not self._has_shown_failure:  # keep the output of the first failure
            self._has_shown_failure = not passes
            self.stdout = reply.stdout[:_MAX_KEPT]
            self.stderr = (reply.stderr + _text(reply.fields.get("error")))[:_MAX_KEPT]
        return passes

    def _call(self, test: Call) -> Dialogue:
        """Return whether a function returns the expected value."""
        try:
            request = {"call": test.function, "arguments": list(test.arguments)}
            # JSON would convert these keys to texts.
            request["integer_keys"] = [
                position
                for position, each in enumerate(test.arguments)
                if isinstance(each, dict) and all(isinstance(key, int) for key in each)
            ]
            value = yield from self._value(request)
            if same_result(value, test.expected):
                return True
            is_wrapped = isinstance(test.expected, list) and len(test.expected) == 1
            return test.may_be_wrapped and is_wrapped and same_result(value, test.expected[0])
        except (InvalidData, ArithmeticError):  # a Decimal that cannot be compared
            return False

    def _run_step(self, step: Step) -> Dialogue:
        """Return whether statements raise nothing, or an assertion holds for values of the
        process."""
        if isinstance(step, Do):
            reply = yield from self._asked({"do": step.source, "space": _SPACE})
            return reply.has_ended
        values = []
        try:
            for number, leaf in enumerate(step.leaves):
                request = {"value": leaf, "keep": LEAF.format(number), "space": _SPACE}
                values.append((yield from self._value(request)))
        except InvalidData:
            return False
        try:
            held = bool(step.holds(values))
        except Incomparable as pair:
            request = {"value": f"not not ({pair})", "space": _SPACE}
            try:
                held = (yield from self._value(request)) is True
            except InvalidData:
                return False
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            self.stderr += f"{_RAISED}{type(error).__name__}: {error}\n"
            return False
        if not held:
            self.stderr += f"{_RAISED}AssertionError\n"
        return held


def _probe(request: Request, right: object) -> Dialogue:
    """Return whether the process answers a probe correctly; its output is not shown."""
    reply = _checked((yield request))
    if "do" in request:
        return right is None or reply.fields.get("ended") is right
    try:
        value = decoded(reply.fields.get("value"))
    except InvalidData:
        return False
    return type(value) is type(right) and value == right


def _checked(reply: Reply) -> Reply:
    if reply.exit_code is not None:
        raise _ProcessEnded(f"its process ended with exit code {reply.exit_code}")
    return reply


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


# Comparisons ----------------------------------------------------------------------------------


def same_output(printed: str, expected: str) -> bool:
    """Return whether a program's output equals the expected output.

    Lines are compared in turn, word by word; blank lines and white space do not count. If the
    expected word is a number with a point or an exponent, the word may differ by 1e-6, relative to
    its size if that is more than 1.
    """
    lines = itertools.zip_longest(_lines(printed), _lines(expected), fillvalue="")
    return all(a == b or same_line(a.split(), b.split()) for a, b in lines)


def _lines(text: str) -> Iterator[str]:
    """Yield the lines that are not blank, one by one: there may be millions."""
    return filter(str.strip, io.StringIO(text, newline="\n"))


def same_line(printed: list[str], expected: list[str]) -> bool:
    """Return whether the words of two lines are equal, numbers up to rounding."""
    return len(printed) == len(expected) and all(map(_same_word, printed, expected))


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if not any(character in expected for character in ".eE") or len(printed) > 400:
        return False
    try:
        return _is_close(float(printed), float(expected))
    except ValueError:
        return False


def same_result(value: Any, expected: Any) -> bool:
    """Return whether a function's result equals the expected JSON value.

    Tuples equal lists, keys of objects are texts, and a float may differ by 1e-6, relative to its
    size if that is more than 1 and a float is expected.
    """
    if isinstance(value, list | tuple):
        return (
            isinstance(expected, list)
            and len(value) == len(expected)
            and all(map(same_result, value, expected))
        )
    if isinstance(value, dict):
        if not isinstance(expected, dict):
            return False
        named = {_key(key): entry for key, entry in value.items()}
        is_same = len(named) == len(value) and named.keys() == expected.keys()
        return is_same and all(same_result(entry, expected[key]) for key, entry in named.items())
    if isinstance(value, float) or isinstance(expected, float):
        a, b = finite_number(value), finite_number(expected)
        if a is None or b is None:
            return bool(value == expected)
        # The size of an int does not count: 500000.5 is not 500000.
        return _is_close(a, b) if isinstance(expected, float) else abs(a - b) <= _TOLERANCE
    return not isinstance(value, Opaque) and bool(value == expected)


def _key(key: Any) -> str:
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return hex(key) if isinstance(key, int) and abs(key) >= _MAX_DECIMAL else str(key)


def _is_close(a: float, b: float) -> bool:
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= _TOLERANCE * max(1.0, abs(b))
