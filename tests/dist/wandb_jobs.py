"""What a rank does in `test_wandb.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from tests.dist.jobs import started


def started_with_a_project(flags: list[str], packages: str) -> dict[str, Any]:
    """What Megatron made of `--wandb-project`; `packages` has a wandb that cannot be started."""
    sys.path.insert(0, packages)
    job, _, _ = started([*flags, "--wandb-project", "sums"])
    from megatron.training.global_vars import get_wandb_writer

    result = {"project": job.args.wandb_project, "writer": repr(get_wandb_writer())}
    dist.destroy_process_group()
    return result
