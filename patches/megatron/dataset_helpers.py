"""Let `initialize_megatron` go on without the compiled dataset index builder.

Symptom: `initialize_megatron` exits with "Failed to compile the C++ dataset helper functions".

Cause: `megatron.core.datasets.utils.compile_helpers` runs `make` in a folder whose Makefile is part
of the repository but not of the wheel; in a checkout of the repository that wants pybind11, a
compiler, and a folder that it may write into.

Why safe: the helpers build the sample index of `.bin`/`.idx` corpora. Prompts of mcore_rl are not
such a corpus, and nothing in RL calls the helpers. Pre-training compiles them as before, as it does
not apply patches of mcore_rl.

Upstream: present in 0.17 to 0.19, and on main.

Drop when: `initialize_megatron` compiles nothing that is not used.

Versions: megatron-core 0.17 to 0.20.
"""

from __future__ import annotations

from mcore_rl.patches.registry import Patch, require_parameters


def needed() -> bool:
    """True wherever Megatron is."""
    return True


def apply() -> None:
    """Replace `compile_helpers` by a function that has nothing to do."""
    from megatron.core.datasets import utils

    require_parameters(utils.compile_helpers)

    def compile_helpers() -> None:
        """The index builder is not used by mcore_rl, see the module's docstring."""

    utils.compile_helpers = compile_helpers


PATCH = Patch(
    name="megatron.dataset_helpers",
    package="megatron-core",
    reason="the dataset index builder of pre-training is not compiled",
    needed=needed,
    apply=apply,
)
