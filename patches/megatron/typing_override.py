"""`typing.override` exists on Python 3.11.

Symptom: `import megatron.training` fails on Python 3.11 with "cannot import name 'override' from
'typing'".

Cause: megatron-core 0.17 and later require Python 3.12 and use this one name from it, in two files
under `megatron/training/models`.

Why safe: `typing_extensions.override` is the same decorator, backported by the typing authors; a
name is added, and no name changes.

Upstream: intended; Megatron requires 3.12.

Drop when: Python 3.11 is no longer supported here.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import sys
import typing

import typing_extensions

from mcore_rl.patches.registry import Patch


def needed() -> bool:
    """Return whether this is Python 3.11, which lacks the name (`import mcore_rl` adds it)."""
    return sys.version_info < (3, 12)


def apply() -> None:
    """Add the name to `typing`."""
    typing.override = typing_extensions.override  # type: ignore[attr-defined]


PATCH = Patch("megatron.typing_override", "typing.override exists on Python 3.11", apply, needed)
