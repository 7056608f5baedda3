"""LoRA on Megatron's model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.dist.layouts import SPLITS, job_flags
from tests.rank_pool import RankPool

FLAGS = tuple("--rl-kl-coef 0.05 --adam-eps 1.0 --lr 0.1".split())


def test_first(checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path) -> None:
    for split in ("tp1_pp1_ep1", "tp2_pp2_ep2"):
        for more in ((), ("--rl-lora-rank", "4")):
            flags = job_flags(checkpoint_factory("deepseek_v3"), split, *FLAGS, *more)
            print(
                split,
                more,
                ranks.run(
                    "tests.dist.lora_jobs:update",
                    world_size=SPLITS[split][3],
                    flags=flags,
                    target=tmp_path / "x",
                ),
            )
