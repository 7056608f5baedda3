"""Runs on models with gated delta nets or Mamba-2 layers: they learn, and their engines sample from
the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.recipe import SMALL, metrics_of, run_job, task_flags
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NUM_STEPS = 16


@pytest.mark.parametrize("arch", ["qwen3_next", "qwen3_5_text", "nemotron_h"])
def test_reward_of_random_model_rises(
    arch: str, checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    experts = arch == "qwen3_next"
    flags = task_flags(
        checkpoint_factory(arch),
        tmp_path / "run",
        *SMALL,
        *("--expert-model-parallel-size", "2" if experts else "1"),
        *("--rl-routing-replay", "r3" if experts else "off"),
        *("--rl-num-prompts-per-step", "8", "--rl-num-samples-per-prompt", "8"),
        *("--rl-reward", "tests.e2e.vowels_reward:score", "--lr", "1e-2"),
        *("--rl-num-steps", str(NUM_STEPS)),
    )
    run_job(ranks, flags, timeout_seconds=1000).require(0)
    metrics = metrics_of(tmp_path / "run")[:NUM_STEPS]
    rewards = [each["reward/mean"] for each in metrics]
    assert sum(rewards[-3:]) / 3 >= sum(rewards[:3]) / 3 + 0.15, rewards
    assert max(each["kl/rollout_actor"] for each in metrics) < 0.01
    assert len({each["reshard/weight_version"] for each in metrics}) == NUM_STEPS
