"""Conversion of test texts into self-contained ones, and the check that they can fail.

Functions that a test runner would call are called: `check(candidate)` of HumanEval, `test_*` of
pytest, the methods of a `unittest.TestCase`. Pure: nothing that is read here runs here.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections import Counter
from collections.abc import Iterable, Sequence

from mcore_rl.sandbox.assertions import (
    DEFINED_INSIDE,
    EQUAL_METHODS,
    Do,
    constant,
    parsed,
    steps_of,
)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_RUNNERS = ("unittest.main", "pytest.main")
_EXITS = ("exit", "quit", "sys.exit", "os._exit", "os.abort")
# Prefixes, in lower case, of methods that are called without being named.
_CALLED_METHODS = ("test", "setup", "teardown", "__")
_MUST_RAISE = ("raises", "assertRaises", "assertRaisesRegex")
# Builtins whose names no policy's function has, and that find nothing that the policy defined.
_HELPERS = frozenset(
    "abs all any bool dict enumerate float int isinstance len list map print range repr round set "
    "sorted str tuple type zip".split()
)
_CASES_PASSED = (
    "_found.testsRun > len(_found.skipped) + len(_found.expectedFailures) "
    "and _found.wasSuccessful()"
)
_RUN_CASES = f"""
import unittest as _unittest
_found = _unittest.TestResult()
for _case in ({{names}},):
    _unittest.defaultTestLoader.loadTestsFromTestCase(_case).run(_found)
for _, _what in (*_found.failures, *_found.errors):
    print(_what)
assert {_CASES_PASSED}
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
    called = {each.id for each in _loaded(body)}
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
        bases = [_last_name(base) for base in each.bases]
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


def _loaded(nodes: Iterable[ast.AST]) -> list[ast.Name]:
    return [
        each
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    ]


def _inlined(body: list[ast.stmt]) -> list[ast.stmt]:
    """Replace the only call of a function by its body, so that its assertions can be split."""
    uses = [each.id for each in _loaded(body)]
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
    return isinstance(node, ast.Call) and _last_name(node) in ("_exit", "abort")


class _Stub(ast.NodeTransformer):
    """A transformer that replaces names by a function whose result equals nothing else."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names - DEFINED_INSIDE

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._names or not isinstance(node.ctx, ast.Load):
            return node
        return ast.parse("(lambda *_, **__: object())", mode="eval").body


# Whether it can fail -----------------------------------------------------------------------------


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


def can_fail(module: ast.Module) -> bool:
    """Return whether running the tests could raise an error that means that the code is wrong."""
    module = _with_constants(module)
    defined: dict[str, FunctionNode | ast.ClassDef] = {
        each.name: each
        for each in ast.walk(module)
        if isinstance(each, FunctionNode | ast.ClassDef)
    }
    return _Scan(defined).any_fails(module.body)


def _with_constants(module: ast.Module) -> ast.Module:
    """Replace names that have one value by it: a constant, or an empty container that only loops
    use, so nothing fills it."""
    nodes = list(ast.walk(module))
    names = [each for each in nodes if isinstance(each, ast.Name)]
    bound = Counter(each.id for each in names if not isinstance(each.ctx, ast.Load))
    bound.update(each.arg for each in nodes if isinstance(each, ast.arg))
    uses = Counter(each.id for each in _loaded([module]))
    loops = [n.iter for n in nodes if isinstance(n, ast.For | ast.AsyncFor | ast.comprehension)]
    in_loops = Counter(each.id for each in _loaded(loops))
    known: dict[str, ast.expr] = {}
    for node in nodes:
        match node:
            case ast.Assign([ast.Name(name)], value) if bound[name] == 1:
                fixed = isinstance(value, ast.Constant)
                if fixed or (_is_empty(value) and uses[name] == in_loops[name]):
                    known[name] = value

    class Replaced(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return known.get(node.id, node) if isinstance(node.ctx, ast.Load) else node

    return Replaced().visit(copy.deepcopy(module)) if known else module


class _Scan:
    """A search of the reachable statements for an assertion or the like."""

    def __init__(self, defined: dict[str, FunctionNode | ast.ClassDef]) -> None:
        self._defined = defined
        self._seen: set[str] = set()

    def any_fails(self, statements: Sequence[ast.stmt]) -> bool:
        for statement in statements:
            if self._fails(statement):
                return True
            if isinstance(statement, ast.Return | ast.Continue | ast.Break):
                return False
        return False

    def _fails(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Assert(test) if ast.unparse(test) == _CASES_PASSED:
                return False  # the methods of the cases have been scanned
            case ast.Assert(test):
                return not _is_always(test, True)
            case ast.Expr(ast.Call(ast.Name(name))) if _is_deferred(self._defined.get(name)):
                return False  # a coroutine or generator that nothing runs
            case ast.Raise():
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return False  # unless it is called
            case ast.If(test, body, orelse):
                taken = [] if _is_always(test, False) else body
                other = [] if _is_always(test, True) else orelse
                return self._calls(test) or self.any_fails(taken) or self.any_fails(other)
            case ast.While(test, body, orelse):
                taken = [] if _is_always(test, False) else body
                return self._calls(test) or self.any_fails(taken) or self.any_fails(orelse)
            case ast.For(_, iterated, body, orelse) | ast.AsyncFor(_, iterated, body, orelse):
                taken = [] if _is_empty(iterated) else body
                return self._calls(iterated) or self.any_fails(taken) or self.any_fails(orelse)
            case ast.Match(subject, cases):
                return self._calls(subject) or any(self.any_fails(each.body) for each in cases)
            case ast.With(items, body) | ast.AsyncWith(items, body):
                contexts = [item.context_expr for item in items]
                if any(_last_name(each) == "suppress" for each in contexts):
                    return False
                return any(map(self._calls, contexts)) or self.any_fails(body)
            case ast.Try(body, handlers, orelse, final) | ast.TryStar(
                body, handlers, orelse, final
            ):
                leaves = any(isinstance(e, ast.Return | ast.Break | ast.Continue) for e in final)
                is_lost = leaves or any(map(_swallows, handlers))
                handled = any(self.any_fails(handler.body) for handler in handlers)
                inner = not is_lost and self.any_fails(body)
                return inner or handled or self.any_fails(orelse) or self.any_fails(final)
            case _:
                return self._calls(statement)

    def _calls(self, node: ast.AST) -> bool:
        """Return whether something that it calls, or passes on to be called, fails."""
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                name, last = ast.unparse(each.func), _last_name(each)
                if name in _EXITS or last in _MUST_RAISE or last == "fail":
                    return True
                if last.startswith("assert") and last not in self._defined:
                    if not _is_always(_asserted(last, each.args), True):
                        return True
            elif isinstance(each, ast.Name | ast.Attribute):
                used = each.id if isinstance(each, ast.Name) else each.attr
                if used in self._defined and used not in self._seen:
                    self._seen.add(used)
                    if self._body_fails(self._defined[used]):
                        return True
        return False

    def _body_fails(self, definition: FunctionNode | ast.ClassDef) -> bool:
        if not isinstance(definition, ast.ClassDef):
            return self.any_fails(definition.body)
        if _is_skipped(definition):
            return False
        # unittest.IsolatedAsyncioTestCase awaits its methods; another base may derive from it.
        awaits = any(_last_name(base) != "TestCase" for base in definition.bases)
        methods = [each for each in definition.body if isinstance(each, FunctionNode)]
        return any(map(self._calls, definition.bases)) or any(
            self.any_fails(method.body)
            for method in methods
            if method.name.lower().startswith(_CALLED_METHODS)
            and not _is_skipped(method)
            and (awaits or not _is_deferred(method))
        )


def _is_skipped(definition: FunctionNode | ast.ClassDef) -> bool:
    """Return whether a runner skips it, or expects it to fail."""
    names = [_last_name(each) for each in definition.decorator_list]
    return any(name in ("skip", "expectedFailure") for name in names)


def _is_deferred(definition: ast.stmt | None) -> bool:
    """Return whether a call alone does not run its body."""
    return isinstance(definition, ast.AsyncFunctionDef) or (
        isinstance(definition, ast.FunctionDef)
        and any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(definition))
    )


def _asserted(method: str, arguments: Sequence[ast.expr]) -> ast.expr:
    """Return what a method of `unittest.TestCase` asserts, where that could be a constant."""
    match method, arguments:
        case "assertTrue", [test, *_]:
            return test
        case "assertFalse", [test, *_]:
            return ast.UnaryOp(ast.Not(), test)
        case name, [left, right, *_] if name in EQUAL_METHODS:
            return ast.Compare(left, [ast.Eq()], [right])
    return ast.Name(method, ast.Load())


def _is_empty(iterated: ast.expr) -> bool:
    """Return whether a loop over it has no iteration, whatever the code does."""
    match iterated:
        case ast.List([]) | ast.Tuple([]) | ast.Dict([]) | ast.Constant("" | b""):
            return True
        case ast.Call(ast.Name("zip"), arguments):
            return any(map(_is_empty, arguments))
        case ast.Call(ast.Name("range"), [ast.Constant(int() as stop)]):
            return stop <= 0
        case ast.Call(
            ast.Name("enumerate" | "list" | "reversed" | "sorted" | "tuple"), [inner, *_]
        ) | ast.Call(ast.Attribute(inner, "items" | "keys" | "values"), []):
            return _is_empty(inner)
    return False


def _last_name(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else node
    return ast.unparse(function).rpartition(".")[2]


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler swallows a failed assertion, because it does not raise again."""
    if any(isinstance(each, ast.Raise | ast.Assert) for s in handler.body for each in ast.walk(s)):
        return False
    if any(_last_name(e) in ("exit", "_exit", "fail") for s in handler.body for e in _calls_in(s)):
        return False
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    lost = ("AssertionError", "Exception", "BaseException")
    return any(_last_name(kind) in lost for kind in kinds)


def _calls_in(statement: ast.stmt) -> list[ast.Call]:
    return [each for each in ast.walk(statement) if isinstance(each, ast.Call)]


def _is_always(test: ast.expr, truth: bool) -> bool:
    """Return whether an expression has this truth value, whatever the code does."""
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            return _is_always(operand, not truth)
        case ast.BoolOp(operator, values):
            some = isinstance(operator, ast.Or) == truth
            return (any if some else all)(_is_always(value, truth) for value in values)
        case ast.NamedExpr(_, value):
            return _is_always(value, truth)
        case ast.Tuple(elements) | ast.List(elements) | ast.Set(elements) if elements:
            return truth
        case ast.GeneratorExp() | ast.Lambda():
            return truth
        case ast.Call(
            ast.Name("all"), [ast.GeneratorExp(_, [first, *_]) | ast.ListComp(_, [first, *_])]
        ) if _is_empty(first.iter):
            return truth
        case ast.JoinedStr(values) if any(isinstance(e, ast.Constant) for e in values):
            return truth
        case ast.Dict(keys) if keys:
            return truth
        case ast.Compare(left, [ast.Eq() | ast.Is() | ast.LtE() | ast.GtE()], [right]) if ast.dump(
            left
        ) == ast.dump(right):
            return truth
        case ast.Compare(ast.Name("__name__"), [ast.NotEq()], [ast.Constant("__main__")]):
            return not truth
    found, value = constant(test)
    return found and bool(value) == truth
