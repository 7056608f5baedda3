"""The check that tests can fail: code that is wrong must be able to fail them.

Pure: nothing that is read here runs here.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Sequence

from mcore_rl.sandbox.assertions import EQUAL_METHODS, constant
from mcore_rl.sandbox.code_texts import CASES_PASSED, FunctionNode, last_name, loaded_names

_EXITS = ("exit", "quit", "sys.exit", "os._exit", "os.abort")
# Prefixes, in lower case, of methods that are called without being named.
_CALLED_METHODS = ("test", "setup", "teardown", "__")
_MUST_RAISE = ("raises", "assertRaises", "assertRaisesRegex")


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
    uses = Counter(each.id for each in loaded_names([module]))
    loops = [n.iter for n in nodes if isinstance(n, ast.For | ast.AsyncFor | ast.comprehension)]
    in_loops = Counter(each.id for each in loaded_names(loops))
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
            case ast.Assert(test) if ast.unparse(test) == CASES_PASSED:
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
                if any(last_name(each) == "suppress" for each in contexts):
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
                name, last = ast.unparse(each.func), last_name(each)
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
        awaits = any(last_name(base) != "TestCase" for base in definition.bases)
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
    names = [last_name(each) for each in definition.decorator_list]
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


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler swallows a failed assertion, because it does not raise again."""
    if any(isinstance(each, ast.Raise | ast.Assert) for s in handler.body for each in ast.walk(s)):
        return False
    if any(last_name(e) in ("exit", "_exit", "fail") for s in handler.body for e in _calls_in(s)):
        return False
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    lost = ("AssertionError", "Exception", "BaseException")
    return any(last_name(kind) in lost for kind in kinds)


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
    is_constant, value = constant(test)
    return is_constant and bool(value) == truth
