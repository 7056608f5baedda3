"""What a rank does in `test_wandb.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from tests.dist.jobs import started


def started_with_a_project(flags: list[str], packages: str) -> dict[str, Any]:
    """What Megatron made of `--wandb-project` and `--tensorboard-dir`; `packages` has a wandb that
    cannot be started."""
    sys.path.insert(0, packages)
    points = f"{packages}/points"
    job, _, _ = started([*flags, "--wandb-project", "sums", "--tensorboard-dir", points])
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    result = {
        "project": job.args.wandb_project,
        "writers": repr((get_wandb_writer(), get_tensorboard_writer())),
        "points": job.args.tensorboard_dir.removeprefix(packages),
    }
    dist.destroy_process_group()
    return result
