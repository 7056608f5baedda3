"""A checkpoint's common.pt is read as data; one with code is refused with one sentence.

Symptom: `common.pt` of an older checkpoint from another person may contain code. By default it is
not run, because torch.load reads only weights. But TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD, set for
another program, makes it run; without that variable the run ends with torch's advice to disable the
check.
Cause: `load_common` leaves `weights_only` to torch's default.
Why safe: the same function reads the same file, with the default made explicit. Arguments, random
states and everything else that Megatron saves are among the classes that it registers with torch.
Upstream: as described; from 0.19 on common.pt is only read, and no longer written.
Drop when: Megatron sets `weights_only=True` there, or reads no common.pt.
Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import os
from typing import Any

from mcore_rl.patches.registry import Patch, require, require_parameters


def apply() -> None:
    """Replace `load_common` in its module and where it was imported by name."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common
    from megatron.core.msc_utils import MultiStorageClientFeature

    from mcore_rl.patches.torch.checkpoint_reading import load_object

    upstream = common.load_common
    require_parameters(upstream, "checkpoint_dir")
    require(serialization.load_common is upstream, "megatron's load_common", "is another one")

    def load_common(checkpoint_dir: str) -> Any:
        path = os.path.join(checkpoint_dir, common.COMMON_STATE_FNAME)
        if MultiStorageClientFeature.is_enabled() or not os.path.exists(path):
            return upstream(checkpoint_dir)
        return load_object(path, path)

    common.load_common = load_common
    serialization.load_common = load_common


PATCH = Patch(
    "megatron.common_state_reading",
    "common.pt is read as data, whatever the environment says",
    apply,
)
