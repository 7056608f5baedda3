"""Grades a policy's code: what its process is asked, in turn, and what is made of the answers.

The process (`sandbox_inside`) runs the code and is never believed: it gets inputs, and what it
returns is compared here, with expected values that it does not have. Only of a step that has to
run there as a whole (`assertions.Do`, or an assertion whose expression is one call) does it say
itself whether it has passed. Between such steps are probes, at random places, whose right answer
is known here: statements that must raise, expressions of random numbers, and the tests with a stub
in the place of the code: what fails before the code runs must fail after it too. A process that
answers one of them wrongly has passed nothing.

Pure: `Grading.dialogue` yields requests and is sent replies; who carries them is `sandbox`.
"""

from __future__ import annotations

import io
import itertools
import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from mcore_rl.common.readers import InvalidData, finite_number
from mcore_rl.rewards.assertions import EQUAL, LEAF, Check, Do, Incomparable, Opaque, Step
from mcore_rl.rewards.code_tests import Call, Program, Suite, Text
from mcore_rl.rewards.code_texts import stubbed_steps

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
    """An answer of the process, and what it has written meanwhile.

    `exit_code` says that it has ended instead, and `fields` are then empty.
    """

    fields: dict[str, Any]
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether what was asked for ran to its end."""
        return self.fields.get("ended") is True


Dialogue = Generator[Request, Reply, bool]


class ProcessEnded(Exception):
    """The process ended while something was asked of it."""


class Grading:
    """What is known of one run, while it goes on and after it."""

    def __init__(self, code: str, suite: Suite, *, stops_early: bool = False) -> None:
        """With `stops_early` nothing more is run once one test has failed."""
        self._code, self._suite, self._stops_early = code, suite, stops_early
        self._random = random.SystemRandom()
        self._has_shown_failure = False
        self.passed = [False] * len(suite.tests)
        self.has_ended = False  # the code, to its end
        self.why = ""  # it was not graded to the end
        self.stdout = self.stderr = ""

    def dialogue(self) -> Generator[Request, Reply, None]:
        """Yields each request once the reply to the one before was sent; see `sandbox_inside`.

        Where a process has ended and another request comes, it is for a new one.
        """
        try:
            yield from self._graded()
        except ProcessEnded as ended:
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
        for position, step in self._plan(stubbed):
            if position is None:
                if not (yield from step(self)):
                    self.passed = [False] * len(tests)
                    self.why = "it answered a probe wrongly"
                    return
                continue
            if position in failed:
                continue
            if not (yield from step(self)):
                failed.add(position)
                self.passed[position] = False
                if self._stops_early:
                    return
            else:
                self.passed[position] = True

    # What is asked --------------------------------------------------------------------------------

    def _stubbed_steps(self) -> Generator[Request, Reply, list[tuple[str, bool]]]:
        """Steps with a stub in the place of the code, while no code has run; and whether each must
        fail later too. A module or a name that is not there yet says nothing."""
        texts = [test for test in self._suite.tests if isinstance(test, Text)]
        found: list[tuple[str, bool]] = []
        for source in stubbed_steps([test.module for test in texts], self._suite.setup)[
            :_MAX_STUBBED
        ]:
            reply = yield {"do": source, "space": _SPACE_BEFORE}
            if reply.exit_code is not None:
                raise ProcessEnded(f"its process ended with exit code {reply.exit_code}")
            told = _text(reply.fields.get("error")) + reply.stdout
            is_known = not any(name in told for name in _NOT_THERE)
            found.append((source, is_known and reply.fields.get("ended") is False))
        return found

    def _plan(
        self, stubbed: Sequence[tuple[str, bool]]
    ) -> list[tuple[int | None, Callable[[Grading], Dialogue]]]:
        """The steps of all tests in order, with probes at random places among them."""
        planned: list[tuple[int | None, Callable[[Grading], Dialogue]]] = []
        believed: list[Step] = []
        for position, test in enumerate(self._suite.tests):
            if isinstance(test, Text):
                steps = test.steps
                believed += steps
                planned += [(position, _step(step)) for step in steps]
            else:
                planned.append((position, _test(test)))
        for probe in _probes(believed, self._random) if believed else ():
            planned.insert(self._random.randint(0, len(planned)), (None, probe))
        at = 0
        for source, must_fail in stubbed:
            at = self._random.randint(at, len(planned))
            planned.insert(at, (None, _stub(source, must_fail)))
            at += 1
        return planned

    def _asked(self, request: Request) -> Generator[Request, Reply, Reply]:
        reply = yield request
        self.stdout = (self.stdout + reply.stdout)[:_MAX_KEPT]
        self.stderr = (self.stderr + reply.stderr + _text(reply.fields.get("error")))[:_MAX_KEPT]
        if reply.exit_code is not None:
            raise ProcessEnded(f"its process ended with exit code {reply.exit_code}")
        return reply

    def _value(self, request: Request) -> Generator[Request, Reply, Any]:
        """What an expression is worth. InvalidData if it raises."""
        reply = yield from self._asked(request)
        if "value" not in reply.fields:
            raise InvalidData("it raised")
        return decoded(reply.fields["value"])

    def runs_program(self, test: Program) -> Dialogue:
        """Whether the code prints what it should. It may end its process, by exit code 0."""
        reply = yield {"run": self._code, "name": "__main__", "stdin": test.stdin}
        has_ended = reply.has_ended or reply.exit_code == 0
        passes = has_ended and same_output(reply.stdout, test.expected)
        self.has_ended &= has_ended
        if not self._has_shown_failure:  # its output is that of the first that failed
            self._has_shown_failure = not passes
            self.stdout = reply.stdout[:_MAX_KEPT]
            self.stderr = (reply.stderr + _text(reply.fields.get("error")))[:_MAX_KEPT]
        return passes

    def calls(self, test: Call) -> Dialogue:
        """Whether a function returns what it should."""
        try:
            request = {"call": test.function, "arguments": list(test.arguments)}
            # JSON would make texts of them.
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

    def does(self, step: Do) -> Dialogue:
        """Whether statements raise nothing."""
        reply = yield from self._asked({"do": step.source, "space": _SPACE})
        return reply.has_ended

    def holds(self, step: Check) -> Dialogue:
        """Whether an assertion holds, of values of the process."""
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
            request = {"value": str(pair), "space": _SPACE}
            try:
                held = bool((yield from self._value(request)))
            except InvalidData:
                return False
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            self.stderr += f"{_RAISED}{type(error).__name__}: {error}\n"
            return False
        if not held:
            self.stderr += f"{_RAISED}AssertionError\n"
        return held

    def probes(self, request: Request, right: object) -> Dialogue:
        """Whether the process answers as it must; what it says of it is not shown."""
        reply = yield request
        if reply.exit_code is not None:
            raise ProcessEnded(f"its process ended with exit code {reply.exit_code}")
        if "do" in request:
            return right is None or reply.fields.get("ended") is right
        try:
            value = decoded(reply.fields.get("value"))
        except InvalidData:
            return False
        return type(value) is type(right) and value == right


def _test(test: Program | Call) -> Callable[[Grading], Dialogue]:
    if isinstance(test, Program):
        return lambda grading: grading.runs_program(test)
    return lambda grading: grading.calls(test)


def _step(step: Step) -> Callable[[Grading], Dialogue]:
    if isinstance(step, Do):
        return lambda grading: grading.does(step)
    return lambda grading: grading.holds(step)


def _stub(source: str, must_fail: bool) -> Callable[[Grading], Dialogue]:
    request = {"do": source, "space": _SPACE_OF_STUBS}
    return lambda grading: grading.probes(request, False if must_fail else None)


def _probes(steps: list[Step], chance: random.Random) -> list[Callable[[Grading], Dialogue]]:
    """One of each kind: statements that must raise, a value, an assertion that must not hold."""
    first, last = sorted(chance.sample(range(2, 2000), 2))
    # As one of the tests looks, but that it raises before it does anything.
    sources = [step.source for step in steps if isinstance(step, Do)] or ["pass"]
    fails = f"assert {EQUAL}({first} + {last}, {first - last})\n{chance.choice(sources)}"
    # Operators alone: the code may define a `sum` of its own.
    product, false = f"{first} * {last} + {first}", f"{last} < {first}"
    return [
        lambda grading: grading.probes({"do": fails}, False),
        lambda grading: grading.probes({"value": product}, first * last + first),
        lambda grading: grading.probes({"value": false}, False),
    ]


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


# What is compared ---------------------------------------------------------------------------------


def decoded(value: Any) -> Any:
    """The plain data that `sandbox_inside` has written as JSON; sets are frozensets.

    Raises InvalidData for anything else.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise InvalidData("is no value")
    ((kind, inner),) = value.items()
    try:
        match kind:
            case "tuple":
                return tuple(map(decoded, inner))
            case "set":
                return frozenset(map(decoded, inner))
            case "dict":
                return {decoded(key): decoded(entry) for key, entry in inner}
            case "bytes":
                return bytes.fromhex(inner)
            case "int":
                return int(inner, 16)
            case "complex":
                return complex(*inner)
            case "fraction":
                numerator, denominator = map(decoded, inner)
                # Of a text it would compute 10 ** 999999999.
                return Fraction(numerator + 0, denominator + 0)
            case "decimal":
                return Decimal(inner)
            case "opaque":
                return Opaque(inner)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InvalidData(str(error)) from error
    raise InvalidData("is no value")


def same_output(printed: str, expected: str) -> bool:
    """Whether a program's output is what was expected.

    Lines are compared in turn, each by its words; blank lines and white space do not count. A word
    that is expected to be a number with a point or an exponent may differ by 1e-6, of its size if
    that is more than 1.
    """
    lines = itertools.zip_longest(_lines(printed), _lines(expected), fillvalue="")
    return all(a == b or _same_line(a.split(), b.split()) for a, b in lines)


def _lines(text: str) -> Iterator[str]:
    """Those that are not blank, one at a time: there may be millions."""
    return filter(str.strip, io.StringIO(text, newline="\n"))


def _same_line(printed: list[str], expected: list[str]) -> bool:
    return len(printed) == len(expected) and all(map(_same_word, printed, expected))


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if not any(character in expected for character in ".eE") or max(len(printed), 0) > 400:
        return False
    try:
        return _is_close(float(printed), float(expected))
    except ValueError:
        return False


def same_result(value: Any, expected: Any) -> bool:
    """Whether a function has returned what JSON says it should.

    A tuple is a list, keys of an object are texts, and a float may differ by 1e-6, of its size if
    that is more than 1 and a float is expected.
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
        # Of an int the size does not count: 500000.5 is not 500000.
        return _is_close(a, b) if isinstance(expected, float) else abs(a - b) <= _TOLERANCE
    return not isinstance(value, Opaque) and bool(value == expected)


def _key(key: Any) -> str:
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return hex(key) if isinstance(key, int) and abs(key) >= _MAX_DECIMAL else str(key)


def _is_close(a: float, b: float) -> bool:
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= _TOLERANCE * max(1.0, abs(b))
