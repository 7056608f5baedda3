"""Megatron's `--wandb-*` and `--tensorboard-dir` start what they name once, and not in Megatron."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.dist.layouts import job_flags
from tests.rank_pool import RankPool


def started_with_a_project(flags: list[str], packages: str) -> dict[str, Any]:
    """What Megatron made of `--wandb-project` and `--tensorboard-dir`; `packages` has a wandb that
    cannot be started."""
    from tests.dist.jobs import started

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


def test_megatron_does_not_start_wandb_and_the_project_is_kept(
    ranks: RankPool, checkpoint_factory, tmp_path: Path
) -> None:
    """Megatron would on its last rank, and would let the error end the job."""
    (tmp_path / "wandb.py").write_text("def init(**values):\n    raise ConnectionError\n")
    [outcome] = ranks.run_raw(
        "tests.dist.test_wandb:started_with_a_project",
        world_size=1,
        flags=job_flags(checkpoint_factory(), "tp1_pp1_ep1", "--log-interval", "3"),
        packages=tmp_path,
    )
    found = outcome.result
    assert found == {"project": "sums", "writers": "(None, None)", "points": "/points"}
    assert not (tmp_path / "points").exists()
    # What does nothing is named as the run starts.
    line = "without effect in RL: --log-interval (every step has its line in metrics.jsonl)\n"
    assert outcome.output.count(line) == 1, outcome.output
