"""Python tests, split so that comparisons happen outside the tested process.

`assert f(1) == 2` becomes a `Check`: the policy's process evaluates only `f(1)`, and the comparison
with 2 happens here, on plain data. So neither an object that is equal to everything nor a patched
interpreter passes. Statements that cannot be split, such as a loop with an assertion, become a
`Do`, which runs in that process.

Pure: nothing that is read here runs here.
"""

from __future__ import annotations

import ast
import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from mcore_rl.sandbox.sent_values import Array, Opaque

_MAX_CONSTANT = 1 << 20  # elements, characters or bits that a constant expression may create

# Functions that `plain_values` defines.
EQUAL, COMPARED, COMPUTED = "_are_equal_as_plain_data", "_compared", "_computed"
SETTLED, CALLED, TOLERANT = "_settled", "_called", "_tolerant"
LEAF = "_leaf_{}_of_an_assertion"  # the name of a leaf's value, by its position
DEFINED_INSIDE = frozenset((EQUAL, COMPARED, COMPUTED, SETTLED, CALLED, TOLERANT))
EQUAL_METHODS = (
    "assertEqual assertListEqual assertTupleEqual assertDictEqual assertSetEqual "
    "assertSequenceEqual"
).split()
_COMPARING_METHODS = {
    **{"assertIn": "in", "assertNotIn": "not in", "assertNotEqual": "!=", "assertGreater": ">"},
    **{"assertGreaterEqual": ">=", "assertLess": "<", "assertLessEqual": "<="},
}
# Other functions that compare two values: of numpy, operator, unittest, and methods of containers.
_COMPARING = re.compile(
    r"assert(?!Is|Raises|Has|Warns|Logs|True|False|_called|_any_call|_has_calls|_awaited).*"
    r"|is_?close|allclose|array_equal|array_equiv|subtract|sub|eq|ne|[lg][te]|contains|count|index"
    r"|countOf|indexOf|remove|issubset|issuperset|isdisjoint|equals|(not_)?equal|isin|in1d"
    r"|(less|greater)(_equal)?"
)

Evaluate = Callable[[Sequence[Any]], Any]  # from the values of a check's leaves


class Incomparable(Exception):
    """Only the process can compare two of its values, by the expression in the exception's text."""


@dataclass(frozen=True, slots=True)
class Do:
    """Statements to run; the step fails if they raise."""

    source: str


@dataclass(frozen=True, slots=True)
class Check:
    """An assertion: the sources that the process evaluates, and the test of their values.

    `assert abs(f(1) - 2.5) < 0.1` has the leaf `f(1)`. `holds` may raise the errors that Python
    would, and `Incomparable`.
    """

    leaves: tuple[str, ...]
    holds: Evaluate
    is_truth: bool = False  # it is the truth of its only leaf, as in `assert all(...)`


Step = Do | Check


def parsed(source: str) -> ast.Module:
    """Parse Python. Raises ValueError for anything else."""
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"is not Python ({error.msg}, line {error.lineno})") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"is not Python ({error})") from error


def by_value(source: str) -> str:
    """Rewrite Python so that comparisons read objects of the code as their data."""
    return _source(parsed(source))


def steps_of(module: ast.Module) -> list[Step]:
    """Return the steps that run a text of tests, in order."""
    steps: list[Step] = []
    waiting: list[ast.stmt] = []

    def flush() -> None:
        if waiting:
            steps.append(Do(_source(ast.Module(list(waiting), []))))
            waiting.clear()

    for statement in module.body:
        if not isinstance(statement, ast.Assert):
            waiting.append(statement)
            continue
        flush()
        steps += [check_of(part) for part in _conjuncts(statement.test)]
    flush()
    return steps


def _conjuncts(test: ast.expr) -> list[ast.expr]:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return [part for value in test.values for part in _conjuncts(value)]
    return [test]


def check_of(test: ast.expr) -> Check:
    """Convert an assertion's expression into a check."""
    leaves: list[str] = []
    holds = _truth(test, leaves)
    return Check(tuple(leaves), holds, is_truth=leaves == [_source(_truth_of(test))])


# Evaluation in the process -----------------------------------------------------------------------


def _source(node: ast.AST) -> str:
    """Return the source to run in the process, where `==` compares plain data by value: an object
    that is equal to everything is not."""
    return ast.unparse(ast.fix_missing_locations(_ByValue().visit(copy.deepcopy(node))))


class _ByValue(ast.NodeTransformer):
    """A rewriter of operations that could ask an object of the code what it is equal to:
    comparisons, operators and calls. Where only the truth of == and != counts, arrays compare as
    lists, too."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.test = self._truth(node.test)
        self.generic_visit(node)
        node.test = _unsettled(node.test)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        node.test = self._truth(node.test)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and node.func.attr in EQUAL_METHODS:
            node.args += [each.value for each in node.keywords if each.arg not in (None, "msg")]
            node.keywords = [each for each in node.keywords if each.arg in (None, "msg")]
        match node:
            case ast.Call(ast.Name(name)) if name in DEFINED_INSIDE or name == "super":
                return self.generic_visit(node)
            case ast.Call(ast.Name("all" | "any"), [ast.GeneratorExp() | ast.ListComp() as each]):
                each.elt = self._truth(each.elt)
            case ast.Call(ast.Attribute(attr=name) as method, [left, right, *message]) if (
                name in EQUAL_METHODS
            ):
                method.attr = "assertTrue"
                node.args = [_call_of_equal(left, right), *message]
            case ast.Call(ast.Attribute(attr=name) as method, [left, right, *message]) if (
                name in _COMPARING_METHODS
            ):
                method.attr = "assertTrue"
                compared = [left, ast.Constant(_COMPARING_METHODS[name]), right]
                node.args = [_call(COMPARED, *compared), *message]
            case ast.Call(ast.Name(name) | ast.Attribute(attr=name) as function) if (
                _COMPARING.fullmatch(name)
            ):
                node.args.insert(0, function)
                node.func = ast.Name(CALLED, ast.Load())
                return self.generic_visit(node)
            case ast.Call(ast.Name("approx") | ast.Attribute(attr="approx")):
                return _call(TOLERANT, self.generic_visit(node))
        maker = [ast.Name(node.func.id, ast.Load())] if isinstance(node.func, ast.Name) else []
        return _call(SETTLED, self.generic_visit(node), *maker)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        node.value = _unsettled(self.visit(node.value))
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            node.operand = _unsettled(node.operand)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        is_any = node.id == "ANY" and isinstance(node.ctx, ast.Load)
        return _call(TOLERANT, node) if is_any else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        is_any = node.attr == "ANY" and isinstance(node.ctx, ast.Load)
        return _call(TOLERANT, node) if is_any else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if any(isinstance(each, ast.Is | ast.IsNot) for each in node.ops):
            return node
        compared = [node.left]
        for operator, right in zip(node.ops, node.comparators, strict=True):
            compared += [ast.Constant(_COMPARE[type(operator)][0]), right]
        return _call(COMPARED, *compared)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if constant(node)[0]:
            return node
        return _call(COMPUTED, node.left, ast.Constant(_SIGNS[type(node.op)]), node.right)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # its quotes do not nest

    def visit_MatchValue(self, node: ast.MatchValue) -> ast.AST:
        return node

    def _truth(self, node: ast.expr) -> ast.expr:
        match node:
            case ast.BoolOp(operator, values):
                return ast.BoolOp(operator, [self._truth(value) for value in values])
            case ast.UnaryOp(ast.Not(), operand):
                return ast.UnaryOp(ast.Not(), self._truth(operand))
            case ast.Compare(left, [ast.Eq()], [right]):
                return _call_of_equal(left, right)
            case ast.Compare(left, [ast.NotEq()], [right]):
                return ast.UnaryOp(ast.Not(), _call_of_equal(left, right))
        return node


_SIGNS: dict[type[ast.operator], str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"},
    **{ast.Pow: "**", ast.MatMult: "@", ast.LShift: "<<", ast.RShift: ">>"},
    **{ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"},
}


def _call(name: str, *arguments: ast.AST) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])  # type: ignore[arg-type]


def _unsettled(node: ast.expr) -> ast.expr:
    """Return a visited expression of which only the truth counts: its own type decides that."""
    match node:
        case ast.Call(ast.Name(name), [inner, *_]) if name == SETTLED:
            return inner
    return node


def _call_of_equal(left: ast.expr, right: ast.expr) -> ast.Call:
    return _call(EQUAL, left, right)


# Evaluation here ---------------------------------------------------------------------------------

_COMPARE: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Eq: ("==", lambda a, b: a == b),
    ast.NotEq: ("!=", lambda a, b: a != b),
    ast.Lt: ("<", lambda a, b: a < b),
    ast.LtE: ("<=", lambda a, b: a <= b),
    ast.Gt: (">", lambda a, b: a > b),
    ast.GtE: (">=", lambda a, b: a >= b),
    ast.Is: ("is", lambda a, b: a is b),
    ast.IsNot: ("is not", lambda a, b: a is not b),
    ast.In: ("in", lambda a, b: a in b),
    ast.NotIn: ("not in", lambda a, b: a not in b),
}


def _truth(node: ast.expr, leaves: list[str]) -> Evaluate:
    """Return an evaluator of the truth of `node`, which the process decides if it is one leaf."""
    match node:
        case ast.UnaryOp(ast.Not(), operand) if not constant(node)[0]:
            return _negated(_truth(operand, leaves))
        case ast.Compare(left, [operator], [right]) if not constant(node)[0]:
            compared = _compared(left, operator, right, leaves)
            if compared is not None:
                return compared
    position = len(leaves)
    planned = _plan(node, leaves)
    if leaves[position:] == [_source(node)]:
        leaves[position] = _source(_truth_of(node))
    return planned


def _negated(inner: Evaluate) -> Evaluate:
    def negated(values: Sequence[Any]) -> bool:
        try:
            return not inner(values)
        except Incomparable as compared:
            raise Incomparable(f"not {compared}") from None

    return negated


def _truth_of(node: ast.expr) -> ast.expr:
    """Return an expression of the truth of `node`, by operators alone, which no name shadows."""
    return ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), node))


def _plan(node: ast.expr, leaves: list[str]) -> Evaluate:
    """Return an evaluator of `node` from the values of `leaves`, to which it adds its own."""
    is_constant, value = constant(node)
    if is_constant:
        return lambda _: value
    return _tolerance(node, leaves) or _leaf(node, leaves)


def _leaf(node: ast.expr, leaves: list[str]) -> Evaluate:
    position = len(leaves)
    leaves.append(_source(node))
    return lambda values: values[position]


def _compared(
    left: ast.expr, operator: ast.cmpop, right: ast.expr, leaves: list[str]
) -> Evaluate | None:
    """Plan a comparison; None for an identity that involves more than None, True and False."""
    name, compare = _COMPARE[type(operator)]
    if isinstance(operator, ast.Is | ast.IsNot) and not any(map(_is_singleton, (left, right))):
        return None
    sources, plans = [], []
    for node, other in ((left, right), (right, left)):
        position = len(leaves)
        # For `v - 1 == w` with objects of the code only its process knows the difference.
        is_difference = isinstance(node, ast.BinOp) and not constant(node)[0]
        is_inside = is_difference and not constant(other)[0]
        plans.append((_leaf if is_inside else _plan)(node, leaves))
        is_leaf = leaves[position:] == [_source(node)]
        sources.append(LEAF.format(position) if is_leaf else "")
        # The process may know what it must not return, and whether it has what it contains.
        is_known = isinstance(operator, ast.NotEq | ast.NotIn)
        if constant(node)[0] and (is_known or (isinstance(operator, ast.In) and node is left)):
            sources[-1] = ast.unparse(node)
    shown = f"{COMPARED}({sources[0]}, {name!r}, {sources[1]})"
    if isinstance(operator, ast.Eq | ast.NotEq):
        shown = f"{'not ' * (name == '!=')}{EQUAL}({', '.join(sources)})"

    def compared(values: Sequence[Any]) -> Any:
        a, b = (plan(values) for plan in plans)
        # Only the process knows what objects that are not plain data are equal to; compared with
        # plain data that it does not have, its own comparison does not count.
        if all(sources) and (isinstance(a, Opaque) or isinstance(b, Opaque)) and name[:2] != "is":
            raise Incomparable(shown)
        return compare(a, b)

    return compared


def _is_singleton(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _tolerance(node: ast.expr, leaves: list[str]) -> Evaluate | None:
    """Plan `abs(f(1) - 2.5)`, `round(f(1), 2)`, `math.isclose(f(1), 2.5)` and their operands, which
    would reveal the expected value to the process."""
    match node:
        case ast.BinOp(left, ast.Sub() | ast.Div() as operator, right) if (
            constant(left)[0] or constant(right)[0]
        ):
            of_left, of_right = _plan(left, leaves), _plan(right, leaves)
            if isinstance(operator, ast.Sub):
                return lambda values: _plain(of_left(values)) - _plain(of_right(values))
            return lambda values: _number(of_left(values)) / _number(of_right(values))
        case ast.Call(ast.Name("abs"), [ast.BinOp() as inner], []):
            difference = _tolerance(inner, leaves)
            return None if difference is None else lambda values: abs(difference(values))
        case ast.Call(function, [left, right], keywords) if ast.unparse(function) in (
            "math.isclose",
            "isclose",
        ) and (constant(left)[0] or constant(right)[0]):
            options = {each.arg: constant(each.value) for each in keywords}
            if None in options or not all(is_constant for is_constant, _ in options.values()):
                return None
            named = {str(name): value for name, (_, value) in options.items()}
            of_left, of_right = _plan(left, leaves), _plan(right, leaves)
            return lambda values: math.isclose(of_left(values), of_right(values), **named)
        case _:
            return None


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return value
    return _number(value)


def _number(value: Any) -> Any:
    if isinstance(value, Array):
        value = value.element()
    if not isinstance(value, int | float | complex | Fraction | Decimal):
        raise TypeError(f"{type(value).__name__} is not a number")
    return value


def constant(node: ast.expr) -> tuple[bool, Any]:
    """Return whether an expression consists of plain data alone, and its value."""
    try:
        return True, _folded(node)
    except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError, SyntaxError):
        return False, None


def _folded(node: ast.expr) -> Any:
    """Evaluate literals, sums and products of them, and containers made of them.

    Raises one of the exceptions of `constant` for anything else, or for a value that is too large.
    """
    match node:
        case ast.BinOp(left, operator, right):
            return _arithmetic(operator, _folded(left), _folded(right))
        case ast.UnaryOp(ast.Not(), operand):
            return not _folded(operand)
        case ast.UnaryOp(ast.USub(), operand):
            return -_folded(operand)
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
            kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
            return kind(map(_folded, elements))
        case ast.Compare(left, [operator], [right]):
            return _COMPARE[type(operator)][1](_folded(left), _folded(right))
        case ast.Dict(keys, values) if None not in keys:
            return {
                _folded(key): _folded(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case ast.Call(ast.Name("float"), [ast.Constant(str() as text)], []):
            return float(text)
        case ast.Call(ast.Name("set" | "frozenset" | "tuple" | "list" as name), arguments, []):
            kinds: dict[str, Any] = {"set": set, "frozenset": frozenset, "tuple": tuple}
            return kinds.get(name, list)(*map(_folded, arguments))
        case _:
            return ast.literal_eval(node)


def _arithmetic(operator: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(operator, ast.Mult) and not _are_numbers(left, right):
        sequence, count = (left, right) if isinstance(right, int) else (right, left)
        if len(sequence) * count > _MAX_CONSTANT:
            raise ValueError("it is too large")
        return sequence * count
    if isinstance(operator, ast.Pow):
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            raise TypeError("it is not a number")
        if isinstance(left, int) and abs(left).bit_length() * abs(right) > _MAX_CONSTANT:
            raise ValueError("it is too large")
        return left**right
    if isinstance(operator, ast.Add):
        return left + right
    if not _are_numbers(left, right):
        raise TypeError("it is not a number")
    match operator:
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return left // right
        case ast.Mod():
            return left % right
        case _:
            raise ValueError("it is not a sum or a product")


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float | complex) for value in values)
