"""`initialize_megatron` continues without the compiled dataset index builder.

Symptom: `initialize_megatron` exits with "Failed to compile the C++ dataset helper functions".

Cause: `megatron.core.datasets.utils.compile_helpers` runs `make` in a folder whose Makefile is part
of the repository but not of the wheel. In a checkout of the repository this requires pybind11, a
compiler, and a writable folder.

Why safe: the helpers build the sample index of `.bin`/`.idx` corpora. Prompts of mcore_rl are not
such a corpus, and nothing in RL calls the helpers. Pre-training still compiles them, because it
does not apply patches of mcore_rl.

Upstream: present in 0.18 and 0.19, and on main.

Drop when: `initialize_megatron` compiles nothing that is not used.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

from mcore_rl.patches.registry import Patch, require_parameters


def apply() -> None:
    """Replace `compile_helpers` by a function that does nothing."""
    from megatron.core.datasets import utils

    require_parameters(utils.compile_helpers, "")

    def compile_helpers() -> None:
        """Do nothing: mcore_rl does not use the index builder (see the module's docstring)."""

    utils.compile_helpers = compile_helpers


PATCH = Patch(
    "megatron.dataset_helpers", "the dataset index builder of pre-training is not compiled", apply
)
