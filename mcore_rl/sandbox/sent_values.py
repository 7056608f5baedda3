"""Values that the process of the tests sends: plain data, of the type that decides what it equals.

`plain_values` writes them there. Pure, and of the standard library alone.
"""

from __future__ import annotations

from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction
from operator import eq, ge, gt, le, lt
from typing import Any

from mcore_rl.common.readers import InvalidData


class Opaque:
    """A value of the process that is not plain data."""


class Array(list[Any]):
    """An array of the process, as nested lists.

    It equals a list of its data; apart from that, it has a truth and compares as numpy's arrays do:
    only if it has one element.
    """

    def element(self) -> Any:
        """Return the only element. Raises TypeError if there are more."""
        elements = _elements(self)
        if len(elements) != 1:
            raise TypeError("the truth of an array with several elements is ambiguous")
        return elements[0]

    def _pair(self, other: Any) -> tuple[Any, Any]:
        return self.element(), Array([other]).element()

    def __eq__(self, other: object) -> bool:
        return list.__eq__(self, other) is True or bool(eq(*self._pair(other)))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return bool(lt(*self._pair(other)))

    def __le__(self, other: Any) -> bool:
        return bool(le(*self._pair(other)))

    def __gt__(self, other: Any) -> bool:
        return bool(gt(*self._pair(other)))

    def __ge__(self, other: Any) -> bool:
        return bool(ge(*self._pair(other)))

    def __contains__(self, value: object) -> bool:
        return any(Array([each]) == value for each in _elements(self))


def _elements(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value]
    return [element for each in value for element in _elements(each)]


def decoded(value: Any) -> Any:
    """Decode plain data that `inside` has written as JSON; sets become frozensets.

    Raises InvalidData for anything else.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise InvalidData("is not a value")
    ((kind, inner),) = value.items()
    try:
        match kind:
            case "tuple":
                return tuple(map(decoded, inner))
            case "set":
                return frozenset(map(decoded, inner))
            case "array":
                return Array(map(decoded, inner))
            case "dict" | "ordered":
                pairs = [(decoded(key), decoded(entry)) for key, entry in inner]
                return OrderedDict(pairs) if kind == "ordered" else dict(pairs)
            case "bytes":
                return bytes.fromhex(inner)
            case "int":
                return int(inner, 16)
            case "complex":
                return complex(*inner)
            case "fraction":
                numerator, denominator = map(decoded, inner)
                # A text would make it compute 10 ** 999999999.
                return Fraction(numerator + 0, denominator + 0)
            case "decimal":
                return Decimal(inner)
            case "opaque":
                return Opaque()
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InvalidData(str(error)) from error
    raise InvalidData("is not a value")
