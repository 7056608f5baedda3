"""A weight loader that is a `functools.partial` survives a layerwise reload.

Symptom: MiniMax-M2 loads, and its first reload ends with "'functools.partial' object has no
attribute '__name__'".
Cause: layerwise reload distinguishes its wrapper from a layer's loader by the function's name, and
a partial has none; the norms of queries and keys over all heads have such loaders.
Why safe: the partial gets a name that differs from the wrapper's; the function it calls stays.
Upstream: not reported as far as we know.
Drop when: `_get_original_loader` takes a loader without a name.
Versions: any whose `_get_original_loader` uses a name; seen with 0.32.0, for CPU and for CUDA.
"""

from __future__ import annotations

import functools
from typing import Any

from mcore_rl.patches.registry import Patch, names_in, require_parameters
from mcore_rl.patches.vllm.platform import PACKAGES


def needed() -> bool:
    """Return whether this vLLM uses a loader's name."""
    from vllm.model_executor.model_loader.reload import layerwise

    return "__name__" in names_in(getattr(layerwise, "_get_original_loader", None))


def apply() -> None:
    """Name a partial when a reload looks it up."""
    from vllm.model_executor.model_loader.reload import layerwise

    find = layerwise._get_weight_loader
    require_parameters(find, "tensor")

    def find_with_name(tensor: Any) -> Any:
        loader: Any = find(tensor)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            loader.__name__ = "partial"  # type: ignore[attr-defined]  # it takes any attribute
        return loader

    layerwise._get_weight_loader = find_with_name


PATCH = Patch(
    "vllm.loaders_without_a_name",
    "a weight loader that is a functools.partial survives a layerwise reload",
    apply,
    needed,
    packages=PACKAGES,
)
