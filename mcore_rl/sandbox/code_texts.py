"""Conversion of test texts into self-contained ones.

Functions that a test runner would call are called: `check(candidate)` of HumanEval, `test_*` of
pytest, the methods of a `unittest.TestCase`. Pure: nothing that is read here runs here.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Sequence

from mcore_rl.sandbox.assertions import DEFINED_INSIDE, Do, parsed, steps_of

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_RUNNERS = ("unittest.main", "pytest.main")
# Builtins whose names no policy's function has, and that find nothing that the policy defined.
_HELPERS = frozenset(
    "abs all any bool dict enumerate float getattr int isinstance len list map print range repr "
    "round set sorted str tuple type zip".split()
)
CASES_PASSED = "_found.countTestCases() > 0"
# `debug` lets what a test raises pass: `run` would take it for a skipped or a stopped test if the
# code raises what unittest raises for those.
_RUN_CASES = f"""
import unittest as _unittest
_found = _unittest.TestSuite()
for _case in ({{names}},):
    for _name in _unittest.defaultTestLoader.getTestCaseNames(_case):
        if not any(
            getattr(_marked, "__unittest_skip__", False)
            or getattr(_marked, "__unittest_expecting_failure__", False)
            for _marked in (_case, getattr(_case, _name))
        ):
            _found.addTest(_case(_name))
_found.debug()
assert {CASES_PASSED}
"""


def runnable(source: str, entry_point: str | None) -> ast.Module:
    """Return the tests of a text, with calls of the functions that it never calls.

    `entry_point` is the expression for the argument of `check(candidate)`. Raises ValueError for a
    text that is not Python, a `check` without an entry point and tests that need pytest.
    """
    module = parsed(source)
    body = [part for statement in module.body for part in _without_runner(statement)]
    if not any(isinstance(each, FunctionNode | ast.ClassDef) for each in body):
        return ast.Module(body, [])
    called = {each.id for each in loaded_names(body)}
    for function in [each for each in body if isinstance(each, ast.FunctionDef)]:
        if function.name in called:
            continue
        required = _required(function)
        if function.name == "check" or required == ["candidate"]:
            if len(required) != 1:
                raise ValueError(f"has a function {function.name} that is never called")
            if entry_point is None:
                raise ValueError(
                    f"defines {function.name}({required[0]}), but no entry_point says what to give "
                    "to it"
                )
            body += parsed(f"{function.name}({entry_point})").body
        elif function.name.startswith("test"):
            if required or function.decorator_list:
                raise ValueError(f"has a test {function.name} that only pytest can call")
            body += parsed(f"{function.name}()").body
    body += _calls_of_classes([each for each in body if isinstance(each, ast.ClassDef)], called)
    return ast.Module(_inlined(body), [])


def _without_runner(statement: ast.stmt) -> list[ast.stmt]:
    """Remove `unittest.main()`, and unwrap the body under `__name__ == "__main__"`."""
    if isinstance(statement, ast.If) and ast.unparse(statement.test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    ):
        return [part for inner in statement.body for part in _without_runner(inner)]
    if isinstance(statement, ast.Expr):
        names = {ast.unparse(e.func) for e in ast.walk(statement) if isinstance(e, ast.Call)}
        if names & set(_RUNNERS):
            return []
    return [statement]


def _required(function: FunctionNode) -> list[str]:
    """Return the parameters without a default."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    without = positional[: len(positional) - len(given.defaults)]
    named = [a for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is None]
    return [each.arg for each in (*without, *named)]


def _calls_of_classes(classes: Sequence[ast.ClassDef], called: set[str]) -> list[ast.stmt]:
    calls: list[str] = []
    cases: list[str] = []
    for each in classes:
        bases = [last_name(base) for base in each.bases]
        if any(base.endswith("TestCase") or base in cases for base in bases):
            cases.append(each.name)
        elif each.name.startswith("Test") and each.name not in called:
            methods = [f for f in each.body if isinstance(f, ast.FunctionDef)]
            before = "".join(
                f"_case.{f.name}({'None' if len(_required(f)) > 1 else ''})\n"
                for name in ("setup_class", "setup_method")
                for f in methods
                if f.name == name
            )
            for test in methods:
                if not test.name.startswith("test"):
                    continue
                if len(_required(test)) > 1 or test.decorator_list:
                    raise ValueError(f"has a test {test.name} that only pytest can call")
                calls.append(f"_case = {each.name}()\n{before}_case.{test.name}()")
    if cases:
        calls.append(_RUN_CASES.format(names=", ".join(cases)))
    return [statement for call in calls for statement in parsed(call).body]


def loaded_names(nodes: Iterable[ast.AST]) -> list[ast.Name]:
    """Return all reads of names."""
    return [
        each
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    ]


def _inlined(body: list[ast.stmt]) -> list[ast.stmt]:
    """Replace the only call of a function by its body, so that its assertions can be split."""
    uses = [each.id for each in loaded_names(body)]
    functions = {
        each.name: each
        for each in body
        if isinstance(each, ast.FunctionDef) and uses.count(each.name) == 1 and _is_simple(each)
    }
    inlined: list[ast.stmt] = []
    gone = set()
    for statement in body:
        match statement:
            case ast.Expr(ast.Call(ast.Name(name), arguments, [])) if name in functions:
                parameters = [each.arg for each in functions[name].args.args]
                if len(parameters) == len(arguments) and not any(
                    isinstance(each, ast.Starred) for each in arguments
                ):
                    gone.add(name)
                    inlined += [
                        ast.Assign([ast.Name(parameter, ast.Store())], argument, lineno=1)
                        for parameter, argument in zip(parameters, arguments, strict=True)
                    ]
                    inlined += functions[name].body
                    continue
        inlined.append(statement)
    left = [
        each for each in inlined if not (isinstance(each, ast.FunctionDef) and each.name in gone)
    ]
    return [ast.fix_missing_locations(statement) for statement in left]


def _is_simple(function: ast.FunctionDef) -> bool:
    """Return whether its body means the same at module level."""
    given = function.args
    if given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg or given.defaults:
        return False
    if function.decorator_list:
        return False
    kinds = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)
    names = {"locals", "globals", "vars", "super"}
    return not any(
        isinstance(each, kinds) or (isinstance(each, ast.Name) and each.id in names)
        for statement in function.body
        for each in ast.walk(statement)
    )


# Without the code --------------------------------------------------------------------------------


def stubbed_steps(modules: Sequence[ast.Module], setup: str) -> list[str]:
    """Return the steps that the tests run in the process, with a stub in place of the code's names.

    It reveals only expected values that the tests reveal there, too. Loops that might not end, and
    statements that end the process, are omitted.
    """
    before = [Do(setup)] if setup else []
    steps = [*before, *(step for module in modules for step in steps_of(module))]
    sources = []
    for step in steps:
        if isinstance(step, Do):
            sources.append(step.source)
            continue
        sources += [f"assert {leaf}" if step.is_truth else leaf for leaf in step.leaves]
    whole = parsed("\n".join(sources))
    stub = _Stub(free_names(whole))
    return [
        ast.unparse(ast.fix_missing_locations(stub.visit(module)))
        for module in map(parsed, sources)
        if not any(isinstance(each, ast.While) or _ends(each) for each in ast.walk(module))
    ]


def _ends(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last_name(node) in ("_exit", "abort")


class _Stub(ast.NodeTransformer):
    """A transformer that replaces names by a function whose result equals nothing else."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names - DEFINED_INSIDE

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._names or not isinstance(node.ctx, ast.Load):
            return node
        return ast.parse("(lambda *_, **__: object())", mode="eval").body


def free_names(module: ast.Module) -> frozenset[str]:
    """Return the names that the tests use from the code: names that they use but do not define, and
    `solution` where they import it."""
    bound: set[str] = set()
    loaded: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.Name(name, ast.Load()):
                loaded.add(name)
            case ast.Name(name) | ast.arg(name):
                bound.add(name)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                bound.add(name)
            case ast.ImportFrom("solution", names):
                loaded |= {"solution", *(each.name for each in names)}
            case ast.Import(names) | ast.ImportFrom(_, names):
                bound |= {each.asname or each.name.partition(".")[0] for each in names}
            case ast.ExceptHandler(_, str() as name):
                bound.add(name)
    return frozenset(loaded - bound - _HELPERS - _ERRORS - {"__name__", "__file__"})


_ERRORS = frozenset(
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
)


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name, or of the name that a call calls."""
    function = node.func if isinstance(node, ast.Call) else node
    return ast.unparse(function).rpartition(".")[2]
