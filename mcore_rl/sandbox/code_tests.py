"""The tests in a prompt's answer, in the forms in which data sets publish them.

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                       programs: APPS, TACO, PRIME
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}           functions: APPS, TACO
    [{"input": "1\\n2", "output": "3", "testtype": "functional"}]     LiveCodeBench, DeepCoder
    [{"input": "a = 1, b = 2", "output": "3"}], with entry_point     LeetCodeDataset
    {"test": "def check(candidate): ...", "entry_point": "add"}      HumanEval, LeetCodeDataset
    {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""}  MBPP
    "assert add(1, 2) == 3", or a list of such texts; unittest and pytest too

Each may be JSON text, or the list or object itself. Fields that the answer omits (`entry_point`,
`fn_name`, `test_setup_code`, `test_imports`) are taken from the row's columns of the same name.
This module is pure: it reads tests and runs none.
"""

from __future__ import annotations

import ast
import itertools
import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mcore_rl.common.readers import InvalidData, parse_json
from mcore_rl.sandbox.assertions import Step, by_value, constant, steps_of
from mcore_rl.sandbox.can_fail import can_fail
from mcore_rl.sandbox.code_texts import free_names, runnable

# Keys of a text of tests, or of any form that an answer may have.
_TEXTS = (
    *("test", "tests", "test_code", "functional", "pytest", "unittest", "test_cases"),
    *("public_test_cases", "private_test_cases"),  # LiveCodeBench
    *("public_tests", "private_tests", "generated_tests", "input_output"),
)
_FUNCTION_KEYS = ("fn_name", "func_name", "metadata", "entry_point")
_LISTS = ("test_list", "challenge_test_list", "assert_case")  # keys of a list of texts
_PAIRS = (("inputs", "outputs"), ("input", "output"))
_IMPORTS = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, cos, exp, floor, gcd, inf, isqrt, lcm, log, log2, pi, sin, sqrt
from typing import *
"""
_DEFINITION = re.compile(r"^(?:async )?def[ \t]+([A-Za-z_]\w*)[ \t]*\(", re.MULTILINE)
_INTEGER = re.compile("0|-?[1-9][0-9]{0,17}")  # "01" would collide with "1"
_PACKED = re.compile(r"e[AFJN][A-Za-z0-9+/\s]{20,}={0,2}")  # how zlib data begins
_MAX_NESTED_TEXTS = 3  # JSON text within JSON text


@dataclass(frozen=True, slots=True)
class Program:
    """The code as a program: its input and its expected output."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function, and the plain data that it must return."""

    function: str  # an expression
    arguments: tuple[Any, ...]
    expected: Any
    may_be_wrapped: bool = False  # `[3]` also expects 3, as in APPS


@dataclass(frozen=True, slots=True)
class Text:
    """Python that runs after the code and raises if the code is wrong."""

    module: ast.Module

    @property
    def steps(self) -> list[Step]:
        """Its statements, and its assertions one by one."""
        return steps_of(self.module)


Test = Program | Call | Text


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of one prompt, e.g. Suite((Program("1 2\\n", "3\\n"),))."""

    tests: tuple[Test, ...] = ()
    imports: str = ""  # runs before the code
    setup: str = ""  # runs between the code and the tests
    names: frozenset[str] = frozenset()  # names that the tests use from the code, as far as known


def is_blank(answer: Any) -> bool:
    """Return whether an answer is empty: no test, intended or not."""
    return not answer or (isinstance(answer, str) and not answer.strip())


def texts(tests: Sequence[str]) -> Suite:
    """Return a suite of Python texts, unchanged, whether or not they can fail."""
    return Suite(tuple(Text(_parsed_or_as_it_is(each)) for each in tests))


def _parsed_or_as_it_is(text: str) -> ast.Module:
    try:
        return runnable(text, None)
    except ValueError as error:  # it fails when it runs
        return ast.parse(f"raise SyntaxError({str(error)!r})")


def suite_of(answer: Any, *, prompt: str = "", row: Mapping[str, Any] | None = None) -> Suite:
    """Parse the tests of an answer.

    `prompt` and `row` provide what the answer omits. Raises InvalidData, a ValueError, for an
    answer of an unknown form and for tests that no code could fail.
    """
    reader = _Reader(prompt, dict(row or {}))
    try:
        reader.read(answer)
        return reader.suite()
    except ValueError as error:
        raise InvalidData(f"the answer {error}") from error


class _Reader:
    """The collected tests of an answer."""

    def __init__(self, prompt: str, row: dict[str, Any]) -> None:
        self._prompt = prompt
        self._row = row
        self._tests: list[Test] = []
        self._setup: list[str] = []
        self._names: set[str] = set()

    def suite(self) -> Suite:
        """Return the suite that was read."""
        if not self._tests:
            _refuse("holds no test")
        if all(isinstance(t, Program) and not t.expected.split() for t in self._tests):
            _refuse("expects no output of any program")
        if all(isinstance(t, Call) and t.expected in (None, [None]) for t in self._tests):
            _refuse("expects no result of any call")
        return Suite(
            tests=tuple(self._tests),
            imports=_IMPORTS if any(isinstance(t, Call) for t in self._tests) else "",
            setup=by_value("\n".join([*self._setup, *self._imports_of_tests()])),
            names=frozenset(self._names),
        )

    def _imports_of_tests(self) -> list[str]:
        """Return the tests' imports, which code may use: data sets run both as one module."""
        texts = [test for test in self._tests if isinstance(test, Text)]
        imports = [
            ast.unparse(node)
            for node in itertools.chain.from_iterable(test.module.body for test in texts)
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        return [
            f"try:\n    {line}\nexcept ImportError:\n    pass" for line in dict.fromkeys(imports)
        ]

    def read(self, value: Any, nested: int = 0) -> None:
        """Add the tests of an answer, or of a part of it."""
        if isinstance(value, str):
            self._read_text(value, nested)
        elif isinstance(value, dict):
            self._read_object(value)
        elif isinstance(value, list) and value:
            self._read_list(value, nested)
        else:
            _refuse("holds no test" if value == [] else f"is of type {type(value).__name__}")

    def _read_text(self, text: str, nested: int) -> None:
        if text.lstrip()[:1] in ("{", "[", '"') and nested < _MAX_NESTED_TEXTS:
            try:
                value = parse_json(text)
            except InvalidData:
                value = None  # Python that begins with a display or a docstring
            if isinstance(value, dict | list | str) and value:
                return self.read(value, nested + 1)
        self._setup += self._setup_of_row()
        self._add_text(text, self._entry_point({}))

    def _read_list(self, values: list[Any], nested: int) -> None:
        if all(isinstance(value, str) for value in values):
            if any(value.lstrip()[:1] == "{" for value in values):
                for value in values:
                    self._read_text(value, nested)
                return
            self._add_texts(values, self._setup_of_row())
        elif all(isinstance(value, dict) for value in values):
            for value in values:
                self._read_object(value)
        else:
            _refuse("is a list of neither texts nor objects")

    def _read_object(self, fields: dict[str, Any]) -> None:
        for inputs, outputs in _PAIRS:
            if inputs in fields and outputs in fields:
                is_plural = inputs == "inputs"
                pairs = [fields[inputs], fields[outputs]]
                if is_plural:
                    pairs = list(map(_container, pairs))
                return self._read_pairs(fields, *pairs, is_plural=is_plural)
            if inputs in fields or outputs in fields:
                missing = outputs if inputs in fields else inputs
                _refuse(f"has no {missing!r}")
        setup = [*_setup_texts(fields), *_texts(fields, "import_prefix")]
        for key in _LISTS:
            if values := _texts({key: _container(fields.get(key))}, key):
                self._add_texts(values, setup)
        self._row |= {key: fields[key] for key in _FUNCTION_KEYS if fields.get(key)}
        for key in _TEXTS:
            value = _container(fields.get(key))
            if key == "input_output" and any(isinstance(test, Text) for test in self._tests):
                continue  # LeetCodeDataset repeats its test there
            if isinstance(value, str | list | dict) and not is_blank(value):
                self._setup += setup
                if isinstance(value, str):
                    self._add_text(value, self._entry_point(fields))
                else:
                    self.read(value)
        if not self._tests:
            known = "inputs and outputs, test and entry_point, or test_list"
            _refuse(f"is an object with {', '.join(map(repr, fields)) or 'nothing'}, not {known}")

    # Texts ----------------------------------------------------------------------------------------

    def _add_texts(self, sources: Sequence[str], setup: Sequence[str]) -> None:
        """Add a list of tests, each its own; taken together, they must be able to fail."""
        self._setup += setup
        present = [source for source in sources if source.strip()]
        if not present:
            _refuse("holds no test")
        for source in present:
            self._add_text(source, self._entry_point({}), alone=False)
        whole = runnable("\n".join([*self._setup, *present]), self._entry_point({}))
        self._check(whole, free_names(whole))

    def _add_text(self, source: str, entry_point: str | None, *, alone: bool = True) -> None:
        if _PACKED.fullmatch(source.strip()):
            _refuse(
                "holds tests packed as base64 of zlib (LiveCodeBench's private_test_cases): unpack "
                "the column into JSON text first, with that data set's own loader"
            )
        module = runnable(source, entry_point)
        names = free_names(module)
        if alone:
            self._check(module, names)
        self._names |= names
        self._tests.append(Text(module))

    @staticmethod
    def _check(module: ast.Module, names: frozenset[str]) -> None:
        if not can_fail(module):
            _refuse("asserts nothing that code could fail")
        if not names:
            _refuse("uses nothing that code could define")

    def _entry_point(self, fields: Mapping[str, Any]) -> str | None:
        """Return the argument of `check(candidate)`, an expression: `f` or `Solution().f`."""
        named = fields.get("entry_point") or self._row.get("entry_point")
        if named is None:
            defined = [n for n in _DEFINITION.findall(self._prompt) if n != "check"]
            named = defined[-1] if defined else None
        return None if named is None else _checked_function(named)

    def _setup_of_row(self) -> list[str]:
        return _setup_texts(self._row) if "test_list" in self._row else []

    # Pairs ----------------------------------------------------------------------------------------

    def _read_pairs(
        self, fields: dict[str, Any], inputs: Any, outputs: Any, *, is_plural: bool
    ) -> None:
        kind = str(fields.get("testtype") or fields.get("type") or "")
        name = self._function(fields)
        is_call = name is not None and kind not in ("stdin", "stdin_stdout")
        if kind in ("functional", "function_call") and name is None:
            _refuse(f"has a test of type {kind!r}, but no 'fn_name' that names the function")
        are_lists = isinstance(inputs, list) and isinstance(outputs, list)
        if not are_lists or (kind and not is_plural):
            inputs, outputs = [inputs], [outputs]
        if len(inputs) != len(outputs):
            _refuse(f"has {len(inputs)} inputs, but {len(outputs)} outputs")
        for given, expected in zip(inputs, outputs, strict=True):
            if is_call:
                assert name is not None
                self._add_call(name, *_parsed_call(given, expected, kind))
            elif not self._add_named_call(fields, given, expected):
                self._tests.append(Program(_lines(given, "input"), _lines(expected, "output")))

    def _add_call(
        self, name: str, arguments: Sequence[Any], expected: Any, may_be_wrapped: bool = False
    ) -> None:
        self._names.add(name.partition(".")[0].partition("(")[0])
        function = (
            name if "." in name else f"({name} if {name!r} in globals() else Solution().{name})"
        )
        values = tuple(map(_with_integer_keys, arguments))
        self._tests.append(Call(function, values, expected, may_be_wrapped))

    def _add_named_call(self, fields: Mapping[str, Any], given: Any, expected: Any) -> bool:
        """Add the call of an input like `nums = [3], target = 6`; False for another input."""
        arguments = _assigned(given) if isinstance(given, str) else None
        if arguments is None or not (fields.get("entry_point") or self._row.get("entry_point")):
            return False
        name = self._entry_point(fields)
        assert name is not None
        last = name.rpartition(".")[2]
        stated = self._prompt + "\n" + "\n".join(_texts(self._row, "starter_code"))
        if re.search(rf"def {last}\([^\n]*\b(?:Tree|List)Node\b", stated):
            _refuse(
                f"has texts of lists as arguments of {last}, which takes TreeNode or ListNode "
                "objects: use the column that holds tests in Python"
            )
        self._add_call(name, arguments, _literal(expected))
        return True

    def _function(self, fields: Mapping[str, Any]) -> str | None:
        for place in (fields, self._row):
            metadata = place.get("metadata")
            if isinstance(metadata, str) and metadata.lstrip().startswith("{"):
                try:
                    metadata = parse_json(metadata)
                except InvalidData:
                    metadata = None
            inner = metadata.get("func_name") if isinstance(metadata, dict) else None
            named = place.get("fn_name") or place.get("func_name") or inner
            if name := named or (fields.get("entry_point") if "inputs" in fields else None):
                return _checked_function(name)
        return None


def _parsed_call(given: Any, expected: Any, kind: str) -> tuple[list[Any], Any, bool]:
    """Return a call's arguments, expected value, and whether that may be wrapped. Arguments are a
    list, a single object, or text with one JSON value per line."""
    if isinstance(given, str):
        try:
            arguments = [parse_json(line) for line in given.split("\n") if line.strip()]
        except InvalidData as error:
            _refuse(f"has arguments that are not JSON, one a line ({error})")
        return arguments, _parsed(expected), False
    arguments = given if isinstance(given, list) else [given]
    if kind == "functional":
        return arguments, _parsed(expected), False
    return arguments, expected, True


def _assigned(text: str) -> list[Any] | None:
    """Return the values of `a = 1, b = [2]`, or one assignment per line; None for other texts."""
    for source in (text, ", ".join(text.strip().split("\n"))):
        try:
            node = ast.parse(f"_({source})", mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if isinstance(node, ast.Call) and node.keywords and not node.args:
            texts = [ast.unparse(each.value) for each in node.keywords]
            values = [_literal(each) for each in texts]
            is_known = all(each.arg for each in node.keywords)
            # A text that is neither JSON nor a literal evaluates to itself.
            if is_known and not any(map(operator.is_, texts, values)):
                return values
    return None


def _literal(text: Any) -> Any:
    """Return the value of JSON or Python, in JSON's types; another text unchanged."""
    if not isinstance(text, str):
        return text
    try:
        is_constant, value = constant(ast.parse(text.strip(), mode="eval").body)
        return json.loads(json.dumps(value)) if is_constant else parse_json(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return text


def _parsed(text: Any) -> Any:
    try:
        return parse_json(text) if isinstance(text, str) else text
    except InvalidData:
        return text


def _container(value: Any) -> Any:
    """Return the list or object of a JSON text; any other value unchanged."""
    parsed = (
        _parsed(value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value
    )
    return parsed if isinstance(parsed, list | dict) else value


def _with_integer_keys(value: Any) -> Any:
    """Undo JSON's conversion of integer keys to texts, as graders of APPS do."""
    if isinstance(value, dict) and value and all(map(_INTEGER.fullmatch, value)):
        return {int(key): entry for key, entry in value.items()}
    return value


def _lines(value: Any, what: str) -> str:
    """Return the text of an input or output, given as a text or a list of lines."""
    if isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        return "\n".join(str(each).removesuffix("\n") for each in value) + "\n"
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    _refuse(f"has an {what} of type {type(value).__name__}, and no 'fn_name'")


def _checked_function(name: Any) -> str:
    """Return `f`, `a.f` or `Solution().f`, or refuse the name."""
    try:
        node = ast.parse(str(name).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        node = ast.Constant(None)
    source = ast.unparse(node)
    while isinstance(node, ast.Attribute | ast.Call):
        if isinstance(node, ast.Call) and (node.args or node.keywords):
            break
        node = node.value if isinstance(node, ast.Attribute) else node.func
    if not isinstance(node, ast.Name):
        _refuse(f"names {str(name)[:60]!r}, which is not a function")
    return source


def _texts(fields: Mapping[str, Any], key: str) -> list[str]:
    """Return the texts of a field that holds one, several or none."""
    value = fields.get(key)
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str) and each.strip()]


def _setup_texts(fields: Mapping[str, Any]) -> list[str]:
    return [*_texts(fields, "test_imports"), *_texts(fields, "test_setup_code")]


def _refuse(problem: str) -> NoReturn:
    raise InvalidData(problem)
