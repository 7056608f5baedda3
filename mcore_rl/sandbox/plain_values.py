"""The tests' view of the values of a policy's code, in the process that runs it.

`inside` receives the text of this module once it is confined, and runs it before the code:
it imports only the standard library.
"""

from __future__ import annotations

import collections
import contextlib
import fractions
import numbers
import operator
import random
import sys
import types
from typing import Any

_MAX_DEPTH = 50  # of containers; below the limit of `common.readers`
_MAX_INT = 1 << 4096  # beyond that, Python writes and reads no decimals

_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
# How to take the value of a subclass, whatever its methods return.
_TAKE: dict[type, Any] = {
    int: int.__index__,
    float: float.__float__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    bytearray: lambda value: bytearray.__getitem__(value, slice(None)),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
}
_OPERATIONS: dict[str, Any] = {
    **{"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le},
    **{">": operator.gt, ">=": operator.ge, "in": lambda a, b: a in b},
    **{"not in": lambda a, b: a not in b, "+": operator.add, "-": operator.sub},
    **{"*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod},
    **{"**": operator.pow, "@": operator.matmul, "<<": operator.lshift, ">>": operator.rshift},
    **{"&": operator.and_, "|": operator.or_, "^": operator.xor},
}
# Methods by which an object decides what it is equal to, and what is computed from it.
_OPERATORS = frozenset(
    f"__{reflected}{name.strip('_')}__"
    for name in (*vars(operator), "divmod", "round", "class", "getattribute", "array")
    for reflected in ("", "r")
) | {"__array_ufunc__", "__array_function__", "__array_interface__", "__array_struct__"}
_OPERATORS -= {"__call__", "__doc__", "__name__", "__setitem__", "__delitem__"}
_HARMLESS = frozenset(dir(object)) - _OPERATORS | {"__getnewargs__"}
_FIELD = type(vars(collections.namedtuple("_Fields", "field"))["field"])
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.items()), type({}.values()))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not static data of the interpreter


class PlainValues:
    """A reader of values as plain data, whatever classes of the code define.

    An instance of a class of the code that defines operators is read as its data if it is data (an
    int, a list). Any other such instance is only equal to instances of such classes, and an
    operation on it and plain data can only result in such an instance.
    """

    def __init__(self) -> None:
        self.module: dict[str, Any] = {}  # the names of the code
        # What `assertions` writes for == and other operations that could ask an object its value.
        self.defined = {
            "_are_equal_as_plain_data": self.are_equal,
            **{"_compared": self.compared, "_computed": self.computed},
            **{"_settled": self.settled, "_called": self.called},
        }
        self._made: set[type] = set()  # classes that the tests have instantiated

    def as_json(self, value: Any) -> Any:
        """Convert a value for `grading.decoded`; `opaque`, with its truth, if it is not plain."""
        try:
            return self._tagged(self._copy(value, 0))
        except (_NotPlain, TypeError, RecursionError):
            pass
        try:
            return {"opaque": bool(value)}
        except Exception:  # as for an array or `pytest.approx`
            return {"opaque": None}

    def are_equal(self, left: Any, right: Any) -> bool:
        """Return whether two values are equal as plain data, or else by `compared`."""
        copies = []
        for value in (left, right):
            with contextlib.suppress(_NotPlain, TypeError, RecursionError):
                copies.append(self._copy(value, 0))
        if len(copies) == 2:
            return bool(copies[0] == copies[1])
        return bool(self._compared(left, "==", right))

    def compared(self, left: Any, *rest: Any) -> Any:
        """Evaluate a chain such as `left < 1 <= 2`; `rest` alternates operators and operands."""
        for name, right in zip(rest[:-2:2], rest[1:-2:2], strict=True):
            if not (held := self._compared(left, name, right)):
                return held
            left = right
        return self._compared(left, *rest[-2:])

    def _compared(self, left: Any, name: str, right: Any) -> Any:
        if type(left) in _SCALARS and type(right) in _SCALARS:
            return _OPERATIONS[name](left, right)
        is_in = name in ("in", "not in")
        left, right = self._settle(left, 0, True), self._settle(right, 0, not is_in)
        own = self._is_custom(left), self._is_custom(right)
        if is_in and (any(own) or self._has_operators(type(right))):
            return self._contains(right, left) == (name == "in")
        if own[0] == own[1]:
            return _OPERATIONS[name](left, right)
        if name in ("==", "!="):
            return name == "!="
        raise TypeError(f"{name} of plain data and an object of a class of the code's")

    def _contains(self, container: Any, value: Any) -> bool:
        if self._has_operators(type(container)):
            if type(container) not in self._made or _is_true_of_anything(container, "__contains__"):
                raise TypeError("the contents of the code's object are unknown")
            return value in container
        return any(e is value or bool(self._compared(e, "==", value)) for e in container)

    def computed(self, left: Any, name: str, right: Any) -> Any:
        """Evaluate `left - right` and the like."""
        if type(left) in _SCALARS and type(right) in _SCALARS:
            return _OPERATIONS[name](left, right)
        left, right = self._settle(left, 0), self._settle(right, 0)
        value = _OPERATIONS[name](left, right)
        if self._is_custom(left) != self._is_custom(right) and not isinstance(left, str | bytes):
            # Tests take `abs` of a difference next, which must then be small.
            if not self._is_custom(value) or (name == "-" and hasattr(type(value), "__abs__")):
                raise TypeError(f"{name} of plain data and an object of a class of the code's")
        return value

    def called(self, function: Any, *arguments: Any, **named: Any) -> Any:
        """Call a function that compares its first two arguments, or its object and an argument."""
        code = getattr(function, "__code__", None)
        if getattr(code, "co_filename", "") != "<test>":
            arguments = tuple([self._settle(each, 0, True) for each in arguments])
            named = {name: self._settle(each, 0, True) for name, each in named.items()}
            owner = getattr(function, "__self__", None)
            compared = [*arguments, *named.values()]
            if isinstance(owner, _CONTAINERS):
                compared.insert(0, owner)
            if len(compared) > 1 and self._is_custom(compared[0]) != self._is_custom(compared[1]):
                raise AssertionError("plain data and an object of a class of the code's")
        return self.settled(function(*arguments, **named))

    def settled(self, value: Any, maker: Any = None) -> Any:
        """Return what the tests see of the result of a call of `maker`."""
        if type(value) in _SCALARS:
            return value
        if maker is type(value):
            self._made.add(maker)
        return self._settle(value, 0, is_result=True)

    def _settle(
        self, value: Any, depth: int, takes_all: bool = False, *, is_result: bool = False
    ) -> Any:
        """Replace data with operators of the code by plain data, except in containers that the
        tests have created, unless `takes_all`. TypeError: the value is equal to everything, which
        is only allowed for values that are not results, such as `unittest.mock.ANY`."""
        kind = type(value)
        if kind in _SCALARS or depth > _MAX_DEPTH:
            return value
        if kind in _CONTAINERS:
            items = [*dict.items(value)] if kind is dict else [*value]
            if set(map(type, items)) <= _SCALARS:
                return value
            inner = depth + 1
            settled = [self._settle(e, inner, takes_all, is_result=is_result) for e in items]
            if all(map(operator.is_, items, settled)):
                return value
            return kind(settled, value.maxlen) if kind is collections.deque else kind(settled)
        base = next((each for each in type.mro(kind) if each in _TAKE), None)
        if base is not None and base is not kind and self._has_operators(kind, base):
            if takes_all or base not in _CONTAINERS or kind not in self._made:
                return self._settle(_TAKE[base](value), depth + 1, takes_all)
        array: Any = getattr(sys.modules.get("numpy"), "ndarray", type(None))
        if issubclass(kind, array) and kind is not array and self._has_operators(kind, array):
            return array.view(value, array)
        if (is_result or self._has_operators(kind)) and _is_true_of_anything(value, "__eq__"):
            raise TypeError("the object is equal to everything")
        return value

    def _is_custom(self, value: Any, depth: int = 0) -> bool:
        """Return whether a value is or holds an object with operators of the code."""
        kind = type(value)
        if kind in _SCALARS or depth > _MAX_DEPTH:
            return False
        if kind is types.SimpleNamespace:
            value = vars(value)
        if kind is types.MappingProxyType:
            value = dict(value)
        if issubclass(type(value), dict):
            value = [*dict.keys(value), *dict.values(value)]
        elif getattr(getattr(value, "dtype", None), "hasobject", False) is True:
            value = value.ravel().tolist()
        elif not issubclass(kind, _CONTAINERS) and kind not in _VIEWS:
            return self._has_operators(kind)
        found = set(map(type, value))
        return not found <= _SCALARS and any(self._is_custom(each, depth + 1) for each in value)

    def _has_operators(self, kind: type, base: type = object) -> bool:
        """Return whether a class is the code's and defines operators, or any method of its base."""
        methods = _OPERATORS | (set(dir(base)) - _HARMLESS if base is not object else set())
        return any(
            name in methods and type(member) is not _FIELD
            for each in type.mro(kind)
            if self._is_of_code(each)
            for name, member in type.__dict__["__dict__"].__get__(each).items()
        )

    def _is_of_code(self, kind: type) -> bool:
        """Return whether the code has defined a class, or functions of it."""
        if not type.__dict__["__flags__"].__get__(kind) & _HEAP_TYPE:
            return False
        members = type.__dict__["__dict__"].__get__(kind)
        functions = [each for each in members.values() if type(each) is types.FunctionType]
        if any(each.__globals__ is self.module for each in functions):
            return True
        if any("_settled" in each.__globals__ for each in functions):
            return False  # defined by the tests
        module = sys.modules.get(members.get("__module__"))
        found: Any = module
        for name in type.__dict__["__qualname__"].__get__(kind).split("."):
            found = vars(found).get(name) if hasattr(found, "__dict__") else None
        return module is None or vars(module) is self.module or found is not kind

    def _copy(self, value: Any, depth: int) -> Any:
        if value is None or value is True or value is False:
            return value
        if depth > _MAX_DEPTH:
            raise _NotPlain
        inner = depth + 1
        if isinstance(value, int):
            return int.__index__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, list):
            return [self._copy(each, inner) for each in list.__iter__(value)]
        if isinstance(value, tuple):
            return tuple([self._copy(each, inner) for each in tuple.__iter__(value)])
        if isinstance(value, set):
            return frozenset([self._copy(each, inner) for each in set.__iter__(value)])
        if isinstance(value, frozenset):
            return frozenset([self._copy(each, inner) for each in frozenset.__iter__(value)])
        if isinstance(value, dict):
            pairs = dict.items(value)
            return {self._copy(k, inner): self._copy(v, inner) for k, v in pairs}
        if type(value) in _VIEWS[:2]:
            return frozenset([self._copy(each, inner) for each in value])
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        kind = type(value)
        if kind is complex:
            return value
        name = f"{kind.__module__}.{kind.__name__}"
        if name in ("fractions.Fraction", "decimal.Decimal") and not self._has_operators(kind):
            return value
        if isinstance(value, numbers.Real) and not self._has_operators(kind):  # sympy's
            if isinstance(value, numbers.Integral):
                return operator.index(value)
            if isinstance(value, numbers.Rational):
                return fractions.Fraction(int(value.numerator), int(value.denominator))
        if name.startswith("numpy.") and hasattr(value, "tolist"):
            return self._copy(value.tolist(), inner)
        raise _NotPlain

    def _tagged(self, value: Any) -> Any:
        """Return the JSON form of a result of `_copy`."""
        if isinstance(value, int) and not -_MAX_INT < value < _MAX_INT:
            return {"int": hex(value)}
        if isinstance(value, list):
            return [self._tagged(each) for each in value]
        if isinstance(value, tuple):
            return {"tuple": [self._tagged(each) for each in value]}
        if isinstance(value, frozenset):
            return {"set": [self._tagged(each) for each in value]}
        if isinstance(value, dict):
            return {"dict": [[self._tagged(k), self._tagged(v)] for k, v in value.items()]}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if type(value).__name__ == "Fraction":
            return {"fraction": [self._tagged(value.numerator), self._tagged(value.denominator)]}
        return {"decimal": str(value)}


def _is_true_of_anything(value: Any, method: str) -> bool:
    """Return whether a class's Python method is true of a new object or of a random number."""
    kind = type(value)
    if not type.__dict__["__flags__"].__get__(kind) & _HEAP_TYPE:
        return False
    found = next((vars(each)[method] for each in type.mro(kind) if method in vars(each)), None)
    if type(found) is not types.FunctionType:
        return False
    for other in (object(), random.random() * 1e300):
        with contextlib.suppress(Exception):
            if (answer := found(value, other)) is not NotImplemented and answer:
                return True
    return False


class _NotPlain(Exception):
    """Only the value's own process can decide what it is equal to."""
