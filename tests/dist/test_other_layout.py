"""A checkpoint is gone on from in another layout, actor and critic, as if it were the same one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.checkpoints import tensors_of
from tests.dist.layouts import SPLITS, job_flags
from tests.dist.test_ppo import TOLERANCE
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

# The second step shows Adam's moments and step: a first one moves each weight by its sign alone.
# The reference keeps the biases of experts that the run began with, the actor's have moved.
FLAGS = (
    *("--rl-algorithm", "ppo", "--rl-kl-reward-coef", "0.05", "--rl-value-clip-eps", "0.5"),
    *("--adam-eps", "1.0", "--lr", "0.1", "--rl-critic-lr", "0.06"),
    *("--lr-decay-style", "linear", "--lr-warmup-iters", "1", "--min-lr", "1e-3"),
    *("--moe-router-bias-update-rate", "0.01"),
)
FROM = "tp2_pp2_ep2"
TO = {
    "one process": ("tp1_pp1_ep1", ()),
    "PP2": ("tp1_pp2_ep1", ()),
    "DP2 EP2": ("tp1_pp1_ep2", ()),
    "TP2, critic DP2": ("tp2_pp1_ep1", ("--rl-critic-tp-size", "1", "--rl-critic-ep-size", "2")),
}


@pytest.fixture(scope="module")
def saved(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> tuple[Path, dict[str, float]]:
    """Where the run of TP2 PP2 EP2 has saved, and what its next step measured."""
    target = tmp_path_factory.mktemp("saved")
    results = ranks.run(
        "tests.dist.ppo_jobs:learn_save_and_learn",
        world_size=SPLITS[FROM][3],
        flags=job_flags(checkpoint_factory("deepseek_v3"), FROM, *FLAGS, micro_batch_size=1),
        target=target,
    )
    return target, results[0]


@pytest.mark.parametrize("name", TO)
def test_the_next_step_is_the_same_in_another_layout(
    name: str,
    saved: tuple[Path, dict[str, float]],
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    source, expected = saved
    split, more = TO[name]
    load = ("--load", str(source / "saved"))
    results = ranks.run(
        "tests.dist.ppo_jobs:load_and_learn",
        world_size=SPLITS[split][3],
        flags=job_flags(
            checkpoint_factory("deepseek_v3"), split, *FLAGS, *more, *load, micro_batch_size=1
        ),
        target=tmp_path,
    )
    assert results[0].keys() == expected.keys()
    for metric, value in expected.items():
        assert results[0][metric] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), metric
    for model in ("actor", "critic"):
        weights, others = tensors_of(source / model), tensors_of(tmp_path / model)
        assert weights.keys() == others.keys()
        for tensor, weight in weights.items():
            difference = (others[tensor] - weight).abs().max()
            assert difference <= TOLERANCE, f"{model}: {tensor} differs by {difference}"
