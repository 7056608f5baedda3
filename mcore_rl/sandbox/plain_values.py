"""The tests' view of the values of a policy's code, in the process that runs it.

`inside` receives the text of this module once it is confined, and runs it before the code:
it imports only the standard library.
"""

from __future__ import annotations

import collections
import contextlib
import decimal
import fractions
import gc
import numbers
import operator
import random
import sys
import types
import weakref
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
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.items()))
# Of decimals, before the code changes the context.
_DIGITS, _LEAST_EXPONENT = decimal.DefaultContext.prec, decimal.DefaultContext.Emin
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not static data of the interpreter


class _Array(list[Any]):
    """The data of an array."""


class _Tolerant:
    """An object of the tests that is equal to more than its like: `pytest.approx`, `mock.ANY`."""

    __array_ufunc__ = None  # as in `pytest.approx`: arrays leave the comparison to it

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> Any:
        return self._value == other

    def __ne__(self, other: object) -> Any:
        return self._value != other

    def __repr__(self) -> str:
        return repr(self._value)


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
            **{"_settled": self.settled, "_called": self.called, "_tolerant": self.tolerant},
        }
        self._made: set[type] = set()  # classes that the tests have instantiated

    def as_json(self, value: Any) -> Any:
        """Convert a value for `grading.decoded`; `opaque` if it is not plain."""
        try:
            return self._tagged(self._copy(value, 0))
        except (_NotPlain, TypeError, RecursionError):
            return {"opaque": None}

    def are_equal(self, left: Any, right: Any) -> bool:
        """Return whether two values are equal as plain data, or else by `compared`."""
        with contextlib.suppress(_NotPlain, TypeError, RecursionError):
            if self._copy(left, 0) == self._copy(right, 0):
                return True
        return bool(self._compared(left, "==", right))

    def tolerant(self, value: Any) -> Any:
        """Return what the tests use as `ANY` or `approx(...)`, marked as theirs."""
        return _Tolerant(value) if _is_tolerant(value) else value

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
        if is_in and not own[1] and _is_true_of_anything(right, "__contains__"):
            raise TypeError("it contains everything")
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
        with decimal.localcontext() as context:  # of the code's, but not its loss of digits
            context.prec = max(context.prec, _DIGITS)
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
        if type(value) is decimal.Decimal:  # the code's context must not make differences zero
            decimal.getcontext().Emin = _LEAST_EXPONENT
        return self._settle(value, 0, is_result=True)

    def _settle(
        self, value: Any, depth: int, takes_all: bool = False, *, is_result: bool = False
    ) -> Any:
        """Replace data with operators of the code by plain data, except in containers that the
        tests have created, unless `takes_all`. TypeError: the value is equal to more than its like,
        such as `unittest.mock.ANY`, and not the tests'."""
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
        if kind is not _Tolerant and (_is_tolerant(value) or (not is_result and _is_masked(value))):
            raise TypeError("the object is equal to more than its like")
        return value

    def _is_custom(self, value: Any) -> bool:
        """Return whether a value is or holds an object with operators of the code."""
        waiting, seen = [value], dict[int, Any]()
        while waiting:
            each = waiting.pop()
            kind = type(each)
            if kind in _SCALARS or id(each) in seen:
                continue
            seen[id(each)] = each
            is_container = issubclass(kind, _CONTAINERS)
            if kind in weakref.ProxyTypes or not is_container and self._has_operators(kind):
                return True
            if getattr(getattr(each, "dtype", None), "hasobject", False) is True:
                waiting += each.ravel().tolist()
            elif is_container or _method(kind, "__eq__") is not _method(object, "__eq__"):
                held = gc.get_referents(each)  # whatever it iterates over
                if not set(map(type, held)) <= _SCALARS:
                    waiting += held
        return False

    def _has_operators(self, kind: type, base: type = object) -> bool:
        """Return whether a class is the code's and defines operators, or any method of its base."""
        if kind is _Tolerant:
            return False
        methods = _OPERATORS | (set(dir(base)) - _HARMLESS if base is not object else set())
        return any(
            name in methods and type(member) is not _FIELD
            for each in type.mro(kind)
            if self._is_of_code(each)
            for name, member in _members(each).items()
        )

    def _is_of_code(self, kind: type) -> bool:
        """Return whether the code has defined a class, or functions of it."""
        if not type.__dict__["__flags__"].__get__(kind) & _HEAP_TYPE:
            return False
        members = _members(kind)
        functions = [each for each in members.values() if type(each) is types.FunctionType]
        if any(each.__globals__ is self.module for each in functions):
            return True
        if any("_settled" in each.__globals__ for each in functions):
            return False  # defined by the tests
        module = sys.modules.get(members.get("__module__"))
        resolved: Any = module
        for name in type.__dict__["__qualname__"].__get__(kind).split("."):
            resolved = vars(resolved).get(name) if hasattr(resolved, "__dict__") else None
        return module is None or vars(module) is self.module or resolved is not kind

    def _copy(self, value: Any, depth: int) -> Any:
        if value is None or value is True or value is False:
            return value
        if depth > _MAX_DEPTH:
            raise _NotPlain
        inner = depth + 1
        if isinstance(value, int):
            return int.__index__(value)
        if isinstance(value, float):
            return _unless_nan(float.__float__(value), depth)
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
            copied = [(self._copy(k, inner), self._copy(v, inner)) for k, v in dict.items(value)]
            is_ordered = isinstance(value, collections.OrderedDict)
            return collections.OrderedDict(copied) if is_ordered else dict(copied)
        if type(value) in _VIEWS:
            return frozenset([self._copy(each, inner) for each in value])
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        kind = type(value)
        if kind is complex or kind is decimal.Decimal:
            return _unless_nan(value, depth)
        if isinstance(value, numbers.Real) and not self._has_operators(kind):  # sympy's, too
            if isinstance(value, numbers.Integral):
                return operator.index(value)
            if isinstance(value, numbers.Rational):
                return fractions.Fraction(int(value.numerator), int(value.denominator))
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            data = value.tolist()
            if isinstance(data, bool):
                return int(data)  # it is not True, but equal to it
            copied = self._copy(data, inner)
            return _Array(copied) if isinstance(copied, list) else copied
        raise _NotPlain

    def _tagged(self, value: Any) -> Any:
        """Return the JSON form of a result of `_copy`."""
        if isinstance(value, int) and not -_MAX_INT < value < _MAX_INT:
            return {"int": hex(value)}
        if isinstance(value, list):
            data = [self._tagged(each) for each in value]
            return {"array": data} if type(value) is _Array else data
        if isinstance(value, tuple):
            return {"tuple": [self._tagged(each) for each in value]}
        if isinstance(value, frozenset):
            return {"set": [self._tagged(each) for each in value]}
        if isinstance(value, dict):
            name = "dict" if type(value) is dict else "ordered"
            return {name: [[self._tagged(k), self._tagged(v)] for k, v in value.items()]}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if type(value).__name__ == "Fraction":
            return {"fraction": [self._tagged(value.numerator), self._tagged(value.denominator)]}
        return {"decimal": str(value)}


def _unless_nan(value: Any, depth: int) -> Any:
    if depth and value != value:
        raise _NotPlain  # as an element it is equal to itself, the same object
    return value


def _members(kind: type) -> Any:
    return type.__dict__["__dict__"].__get__(kind)


def _method(kind: type, name: str) -> Any:
    return next((_members(each)[name] for each in type.mro(kind) if name in _members(each)), None)


def _is_tolerant(value: Any) -> bool:
    """Return whether an object is equal to anything, or to all that is about as large."""
    return _is_a(value, "pytest", "Approx") or _is_true_of_anything(value, "__eq__")


def _is_masked(value: Any) -> bool:
    """Return whether it is an array with masked elements, which are equal to anything."""
    return _is_a(value, "numpy", "MaskedArray") and bool(value.mask.any())


def _is_a(value: Any, package: str, name: str) -> bool:
    """Return whether a class's name begins with `name`, which differs by version."""
    return any(
        each.__name__.startswith(name) and f"{each.__module__}".lstrip("_").startswith(package)
        for each in type.mro(type(value))
    )


def _is_true_of_anything(value: Any, method: str) -> bool:
    """Return whether a class's Python method is true of a new object or of random values."""
    kind = type(value)
    if not type.__dict__["__flags__"].__get__(kind) & _HEAP_TYPE:
        return False
    function = _method(kind, method)
    if type(function) is not types.FunctionType:
        return False
    for other in (object(), random.random() * 1e300, random.getrandbits(64), repr(random.random())):
        with contextlib.suppress(Exception):
            if (answer := function(value, other)) is not NotImplemented and answer:
                return True
    return False


class _NotPlain(Exception):
    """Only the value's own process can decide what it is equal to."""
