"""The vLLM that the repairs in this folder are for: the CPU build, in the supported versions."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from mcore_rl.common.vllm_version import PACKAGES, SUPPORTED, installed_vllm, is_supported
from mcore_rl.patches.registry import Patch


def runs_on_cpu() -> bool:
    """Return whether vLLM's platform in this process is the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def is_known() -> bool:
    """Return whether this version is supported, for repairs that others may not need."""
    installed = installed_vllm()
    return installed is not None and is_supported(installed[1])


def has_module(name: str) -> bool:
    """Return whether this version has a module, for repairs of code that came with it."""
    return importlib.util.find_spec(name) is not None


def vllm_patch(
    name: str,
    reason: str,
    apply: Callable[[], None],
    needed: Callable[[], bool] = runs_on_cpu,
) -> Patch:
    """Return a patch of the supported versions, by default needed on the CPU only."""
    return Patch(name, reason, apply, needed, packages=PACKAGES, versions=str(SUPPORTED))
