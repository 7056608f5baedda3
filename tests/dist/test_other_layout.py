"""A checkpoint of actor and critic resumes in another layout as in its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.layouts import SPLITS, job_flags
from tests.dist.updates import Outcome, assert_alike
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
DP_CRITIC = ("--rl-critic-tp-size", "1", "--rl-critic-ep-size", "2")
# arch -> layouts that load
TO = {
    "deepseek_v3": {
        "one process": ("tp1_pp1_ep1", ()),
        "PP2": ("tp1_pp2_ep1", ()),
        "DP2 EP2": ("tp1_pp1_ep2", ()),
        "TP2, critic DP2": ("tp2_pp1_ep1", DP_CRITIC),
    },
    # Mamba-2 layers, and layers that are stored by position
    "nemotron_3": {"PP2": ("tp1_pp2_ep1", ()), "TP2, critic DP2": ("tp2_pp1_ep1", DP_CRITIC)},
}


@pytest.fixture(scope="module")
def saved_by(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> Callable[[str], tuple[Path, Outcome]]:
    """Where the run of TP2 PP2 EP2 has saved, and what came of its next step."""

    @functools.cache
    def saved_by(arch: str) -> tuple[Path, Outcome]:
        target = tmp_path_factory.mktemp("saved")
        results = ranks.run(
            "tests.dist.ppo_jobs:learn_save_and_learn",
            world_size=SPLITS[FROM][3],
            flags=job_flags(checkpoint_factory(arch), FROM, *FLAGS, micro_batch_size=1),
            target=target,
        )
        return target, Outcome.of([{"steps": [results[0]]}], target)

    return saved_by


@pytest.mark.parametrize(
    ("arch", "name"), [(arch, name) for arch, layouts in TO.items() for name in layouts]
)
def test_the_next_step_is_the_same_in_another_layout(
    arch: str,
    name: str,
    saved_by: Callable[[str], tuple[Path, Outcome]],
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    source, expected = saved_by(arch)
    split, more = TO[arch][name]
    load = ("--load", str(source / "saved"))
    results = ranks.run(
        "tests.dist.ppo_jobs:load_and_learn",
        world_size=SPLITS[split][3],
        flags=job_flags(checkpoint_factory(arch), split, *FLAGS, *more, *load, micro_batch_size=1),
        target=tmp_path,
    )
    assert_alike(Outcome.of([{"steps": [results[0]]}], tmp_path), expected)
