"""Leave Weights & Biases to the rank that writes there.

Symptom: every rank spends a quarter of its start on importing wandb, with or without a project.
Cause: `megatron.core` imports it (in `timers`, and its inference engine) to recognise a writer that
is wandb itself, and for a log of its own.
Why safe: nothing else of what is imported here uses it. `Timers.write` recognises the module as
before, once something else has imported it; `megatron.training` imports it where there is a
project. The inference engine, which RL does not use, logs as if wandb were not installed.
Upstream: as described in 0.17 to 0.19, and on main.
Drop when: `megatron.core.timers` imports wandb where it is used.
Versions: megatron-core 0.17 to 0.20.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from mcore_rl.patches.registry import Patch, require_source


class _Wandb:
    """Equal to the module wandb, without importing it."""

    def __eq__(self, other: object) -> bool:
        return other is not None and other is sys.modules.get("wandb")

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("wandb"), name)


def needed() -> bool:
    """Where wandb is installed and nobody has imported it yet."""
    return "wandb" not in sys.modules and importlib.util.find_spec("wandb") is not None


def apply() -> None:
    """Import `megatron.core` as if there were no wandb, and give its timers one that comes late."""
    sys.modules["wandb"] = None  # type: ignore[assignment]  # importing it is an ImportError
    try:
        from megatron.core import timers
    finally:
        del sys.modules["wandb"]
    require_source(timers.Timers.write, "elif writer == wandb and wandb is not None:")
    timers.wandb = _Wandb()


PATCH = Patch(
    name="megatron.late_wandb",
    package="megatron-core",
    reason="wandb is imported where it is used",
    needed=needed,
    apply=apply,
)
