"""Members of enums are saved by their values, in every version of Python.

Symptom: `--load` refuses a checkpoint of a run with Python 3.11.0 to 3.11.3: it "holds getattr".
Cause: these versions pickle a member of an enum as a call of `getattr`, with its name, and a signal
as the name of a global. Megatron's arguments have both, and torch's unpickler for weights calls no
function and knows only classes.
Why safe: it is what Python does from 3.11.4 on, and both forms are read as the same member.
Upstream: python/cpython, changed in 3.11.4.
Drop when: setup.py requires Python 3.11.4.
Versions: Python 3.11.0 to 3.11.3; nothing is done in others.
"""

from __future__ import annotations

import enum
import signal
from typing import Any

from mcore_rl.patches.registry import Patch


class _Probe(enum.Enum):
    MEMBER = 1


def is_needed() -> bool:
    """Return whether members are pickled by their names."""
    return _Probe.MEMBER.__reduce_ex__(2)[0] is getattr


def apply() -> None:
    """Pickle members by their values, with protocol 2 and higher."""

    def reduce_by_value(self: enum.Enum, protocol: Any) -> tuple[type[enum.Enum], tuple[Any]]:
        return type(self), (self._value_,)

    for cls in (enum.Enum, signal.Signals):  # which has a method of its own
        cls.__reduce_ex__ = reduce_by_value  # type: ignore[method-assign,assignment]


PATCH = Patch(
    "torch.enum_pickles",
    "members of enums are saved by their values, as from Python 3.11.4 on",
    apply,
    needed=is_needed,
    packages=("torch",),
    versions=">=2.8,<2.14",
)
