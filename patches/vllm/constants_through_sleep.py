"""A constant of sparse attention survives the sleep of an engine.

Symptom: after `sleep(level=2)`, which every hand-over takes, the engine of DeepSeek-V3.2 or GLM-5
on a Hopper GPU computes attention with garbage for the bounds of its queries.

Cause: sleep discards all memory that was allocated while the model was built, and saves the model's
registered buffers alone. `FlashAttnMLASparseImpl` keeps the numbers 0, 1, 2, ... in a plain
attribute of the implementation, which is not a module.

Why safe: after the weights' memory is allocated again, the same numbers are written to the same
address. Implementations without this attribute are left alone.

Upstream: not reported as far as we know.

Drop when: `cu_seqlens_q_buffer` is a buffer of the layer, or is made anew.

Versions: vllm 0.32.0, by tests/cuda on tensors of the CPU; others by reading their source.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mcore_rl.patches.registry import require_parameters
from mcore_rl.patches.vllm.platform import has_module, is_known, runs_on_cpu, vllm_patch

_BACKEND = "vllm.v1.attention.backends.mla.flashattn_mla_sparse"


def needed() -> bool:
    """Return whether this vLLM sleeps and has the implementation."""
    return is_known() and has_module(_BACKEND) and not runs_on_cpu()


def apply() -> None:
    """Write the numbers again after weights have woken up."""
    from vllm.v1.worker.gpu_worker import Worker

    wake = Worker.wake_up
    require_parameters(wake, "self tags")

    @functools.wraps(wake)
    def wake_with_constants(self: Any, tags: list[str] | None = None) -> None:
        wake(self, tags)
        if tags is None or "weights" in tags:
            for module in self.model_runner.model.modules():
                bounds = getattr(getattr(module, "impl", None), "cu_seqlens_q_buffer", None)
                if bounds is not None:
                    torch.arange(len(bounds), out=bounds)

    Worker.wake_up = wake_with_constants


PATCH = vllm_patch(
    "vllm.constants_through_sleep",
    "a constant of sparse attention survives the sleep of an engine",
    apply,
    needed,
)
