"""Megatron's `--wandb-*` and `--tensorboard-dir` start what they name once, and not in Megatron."""

from __future__ import annotations

from pathlib import Path

from tests.dist.layouts import job_flags
from tests.rank_pool import RankPool


def test_megatron_does_not_start_wandb_and_the_project_is_kept(
    ranks: RankPool, checkpoint_factory, tmp_path: Path
) -> None:
    """Megatron would on its last rank, and would let the error end the job."""
    (tmp_path / "wandb.py").write_text("def init(**values):\n    raise ConnectionError\n")
    [outcome] = ranks.run_raw(
        "tests.dist.wandb_jobs:started_with_a_project",
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
