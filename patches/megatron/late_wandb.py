"""Only the rank that logs to Weights & Biases imports wandb.

Symptom: every rank spends a quarter of its start on importing wandb, with or without a project.
Cause: `megatron.core` imports it (in `timers` and its inference engine) to recognise wandb as a
writer, and for the engine's own log.
Why safe: nothing else imported here uses it. `Timers.write` still recognises the module once
something else has imported it; `megatron.training` imports it if a project is set. The inference
engine, which RL does not use, logs as if wandb were not installed.
Upstream: as described in 0.18 and 0.19, and on main.
Drop when: `megatron.core.timers` imports wandb where it is used.
Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from mcore_rl.patches.registry import Patch, require_source


class _Wandb:
    """A stand-in that equals the module wandb, without importing it."""

    def __eq__(self, other: object) -> bool:
        return other is not None and other is sys.modules.get("wandb")

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("wandb"), name)


def needed() -> bool:
    """Return whether wandb is installed but not imported yet."""
    return "wandb" not in sys.modules and importlib.util.find_spec("wandb") is not None


def apply() -> None:
    """Import `megatron.core` as if wandb were not installed, and give its timers the stand-in."""
    sys.modules["wandb"] = None  # type: ignore[assignment]  # importing it is an ImportError
    try:
        from megatron.core import timers
    finally:
        del sys.modules["wandb"]
    require_source(timers.Timers.write, "elif writer == wandb and wandb is not None:")
    timers.wandb = _Wandb()


PATCH = Patch("megatron.late_wandb", "wandb is imported where it is used", apply, needed)
