"""What a broken or hostile process may write: one hypothesis strategy for all tests of readers.

values()        any JSON value, the odd ones often
changed(value)  a well-formed message with one place replaced, left out, added or repeated
texts()         strings with surrogates, control characters, numbers in disguise
messages(value) bytes of JSON: whole, changed, cut, repeated, or no JSON at all
"""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# The same examples in every run; a busy machine is not a failure.
BOUNDED = settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

_ODD_NUMBERS = [
    *(10**400, -(10**400), 2**63, 2**64, 2**31, -(2**31) - 1, 10**18, -1, 0, 1, True, False),
    *(float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, -0.0, 1.5),
]
_ODD_TEXTS = [
    *("", " ", "\0", "\n\x1b[31m", "\ud800", "\udfff\ud800", "\u202e", "a" * 5000, "../../etc"),
    *("nan", "1e999", "9" * 400, "null", "[", "None", "true", "[Health] step 7, kl: forged"),
]
_DEEP = [b"[" * 5000, b'{"a":' * 5000, b"[" * 70 + b"]" * 70, b"[" * 2000 + b"]" * 2000]


def texts() -> st.SearchStrategy[str]:
    """Surrogates and control characters included."""
    alphabet = st.characters(exclude_categories=())
    return st.sampled_from(_ODD_TEXTS) | st.text(alphabet, max_size=20)


def scalars() -> st.SearchStrategy[Any]:
    """JSON's, with what Python's JSON has beyond it."""
    numbers = st.sampled_from(_ODD_NUMBERS) | st.integers() | st.floats()
    return st.none() | numbers | texts()


def values() -> st.SearchStrategy[Any]:
    """Any JSON value, of a depth that `json.dumps` can write."""
    nested = st.recursive(
        scalars(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts(), inner, max_size=4),
        max_leaves=8,
    )
    return nested | st.sampled_from([_wrapped(70), _wrapped(500), [None] * 5000])


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A copy of `value` with one place of it changed, or none."""
    value = copy.deepcopy(value)
    places = _places(value)
    if not places:
        return draw(values())
    holder, key = draw(st.sampled_from(places))
    kind = draw(st.sampled_from(["as it is", "replaced", "missing", "extra", "repeated", "other"]))
    if kind == "replaced":
        holder[key] = draw(values())
    elif kind == "missing":
        del holder[key]
    elif kind == "extra" and isinstance(holder, dict):
        holder[draw(texts())] = draw(values())
    elif kind == "repeated" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == "other":
        return draw(values())
    return value


@st.composite
def messages(draw: st.DrawFn, value: Any) -> bytes:
    """What arrives where the JSON of something like `value` is expected."""
    kind = draw(st.sampled_from(["json", "json", "json", "cut", "twice", "bytes", "deep"]))
    if kind == "bytes":
        return draw(st.binary(max_size=64))
    if kind == "deep":
        return draw(st.sampled_from(_DEEP))
    data = json.dumps(draw(changed(value))).encode()
    if kind == "cut":
        return data[: draw(st.integers(0, len(data)))]
    return data * 2 if kind == "twice" else data


def _wrapped(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every holder and key within `value`."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found: list[tuple[Any, Any]] = []
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], (dict, list)):
            found += _places(value[key])
    return found
