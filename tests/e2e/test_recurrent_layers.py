"""Runs on models with gated delta nets or Mamba-2 layers: they learn, their engines sample from
the same model, and they resume bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.recipe import (
    SMALL,
    assert_same_metrics,
    exported_weights,
    metrics_of,
    run_job,
    seeded_metrics,
    task_flags,
)
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NUM_STEPS, SAVED_AT = 12, 10


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text", "nemotron_h"])
def run(
    request: pytest.FixtureRequest,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Path]:
    """Run the job with more flags; return the run's directory."""
    arch, folder = request.param, tmp_path_factory.mktemp("recurrent")
    experts = arch == "qwen3_next"

    def run(name: str, *more: str) -> Path:
        flags = task_flags(
            checkpoint_factory(arch),
            folder / name,
            *SMALL,
            *("--expert-model-parallel-size", "2" if experts else "1"),
            *("--rl-routing-replay", "r3" if experts else "off"),
            *("--rl-num-prompts-per-step", "8", "--rl-num-samples-per-prompt", "8"),
            *("--rl-reward", "tests.e2e.vowels_reward:score", "--lr", "1e-2"),
            *("--rl-num-steps", str(NUM_STEPS), "--save-interval", str(SAVED_AT)),
            *("--rl-export-hf", str(folder / name / "exported"), "--rl-deterministic", *more),
        )
        run_job(ranks, flags, timeout_seconds=1000).require(0)
        return folder / name

    return run


@pytest.fixture(scope="module")
def whole(run: Callable[..., Path]) -> Path:
    return run("whole")


def test_reward_of_random_model_rises(whole: Path) -> None:
    metrics = metrics_of(whole)[:NUM_STEPS]
    rewards = [each["reward/mean"] for each in metrics]
    assert sum(rewards[-3:]) / 3 >= sum(rewards[:3]) / 3 + 0.15, rewards
    assert max(each["kl/rollout_actor"] for each in metrics) < 0.01
    assert len({each["reshard/weight_version"] for each in metrics}) == NUM_STEPS


def test_resumed_run_repeats_the_last_steps_bit_for_bit(
    run: Callable[..., Path], whole: Path
) -> None:
    checkpoint = ("--load", str(whole / "checkpoints"), "--ckpt-step", str(SAVED_AT))
    resumed = run("resumed", *checkpoint)
    expected, found = seeded_metrics(whole), seeded_metrics(resumed)
    assert list(found) == [step for step in expected if step >= SAVED_AT]
    for step, metrics in found.items():
        assert_same_metrics(metrics, expected[step])
    assert exported_weights(resumed) == exported_weights(whole) != {}
