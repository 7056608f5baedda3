"""A checkpoint's common.pt is read as data, and one that is none is refused by a sentence.

Symptom: `common.pt` of an older checkpoint that somebody else has made may hold code. It is not
run, as torch.load takes weights alone by default; but TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD, set for
some other program's sake, makes it run, and without that the run ends in torch's advice to switch
the check off.
Cause: `load_common` leaves `weights_only` to torch's default.
Why safe: the same file is read by the same function, with the default said aloud. Arguments, random
states and whatever else Megatron saves are among the classes that it registers with torch.
Upstream: as described; from 0.19 on common.pt is only read, and no longer written.
Drop when: Megatron says `weights_only=True` there, or reads no common.pt.
Versions: megatron-core 0.17 to 0.20.
"""

from __future__ import annotations

import os
from typing import Any

from mcore_rl.patches.registry import Patch, require, require_parameters


def needed() -> bool:
    return True


def apply() -> None:
    """Replace `load_common` where it is and where it was imported by name."""
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
    name="megatron.common_state_reading",
    package="megatron-core",
    reason="common.pt is read as data, whatever the environment says",
    needed=needed,
    apply=apply,
)
