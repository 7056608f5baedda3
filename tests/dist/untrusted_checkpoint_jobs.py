"""What a rank does in `test_untrusted_checkpoint.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.common.errors import UsageError
from mcore_rl.megatron import adapter  # noqa: F401  (it applies the patches)
from tests.untrusted import Command


def _parts(rng_state: Any) -> dict[str, Any]:
    """A tensor and an object, as Megatron declares them."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    weight = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", weight),
        "rng_state": ShardedObject("rng_state", rng_state, (1,), (0,)),
    }


def save(folder: str, marker: str | None) -> None:
    """A checkpoint by Megatron, whose random states hold a command if there is a marker."""
    from megatron.core import dist_checkpointing

    dist.init_process_group("gloo")
    Path(folder).mkdir()
    state: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if marker is not None:
        state["torch"] = Command(Path(marker))
    arguments = Namespace(seed=7, path=Path("x"))
    dist_checkpointing.save({**_parts([state]), "args": arguments, "iteration": 3}, folder)
    dist.destroy_process_group()


def load(folder: str) -> dict[str, Any]:
    """What Megatron reads, or the user's error."""
    from megatron.core import dist_checkpointing

    dist.init_process_group("gloo")
    try:
        parts = _parts(None)
        parts["weight"].data.zero_()
        found = dist_checkpointing.load(parts, folder)
    except UsageError as error:
        return {"error": str(error)}
    finally:
        dist.destroy_process_group()
    return {
        "weight": found["weight"].flatten().tolist(),
        "seed": found["args"].seed,
        "iteration": found["iteration"],
        "rng": [sorted(found["rng_state"][0]), found["rng_state"][0]["numpy"][0]],
    }
