"""Scoring the samples in a step's only update is the same as scoring them before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.checkpoints import tensors_of
from tests.dist.layouts import SPLITS, job_flags
from tests.rank_pool import RankPool

FLAGS = (
    *("--rl-num-mini-batches", "1"),
    *("--rl-max-tokens-per-microbatch", "128"),
    *("--rl-mismatch-correction", "sequence_tis"),
    *("--rl-kl-coef", "0.05"),
    *("--adam-eps", "1.0"),
    *("--lr", "0.1"),
)
SPLIT = "tp2_pp2_ep2"


@pytest.fixture(scope="module")
def both(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> dict[bool, tuple[dict, dict[str, torch.Tensor]]]:
    """What a job measured and the weights it made: samples scored in the update, or before."""
    found = {}
    for scores_in_update in (True, False):
        target = tmp_path_factory.mktemp("learnt")
        flags = job_flags(checkpoint_factory("deepseek_v3"), SPLIT, *FLAGS, micro_batch_size=1)
        results = ranks.run(
            "tests.dist.ppo_jobs:learn",
            world_size=SPLITS[SPLIT][3],
            flags=flags,
            target=target,
            scores_in_update=scores_in_update,
        )
        assert all(result == results[0] for result in results), "ranks disagree"
        found[scores_in_update] = results[0], tensors_of(target / "actor")
    return found


def test_the_weights_are_the_same_bit_for_bit(both: dict[bool, tuple[dict, dict]]) -> None:
    (_, weights), (_, expected) = both[True], both[False]
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name


def test_the_metrics_are_the_same(both: dict[bool, tuple[dict, dict]]) -> None:
    (found, _), (expected, _) = both[True], both[False]
    for step, expected_step in zip(found["steps"], expected["steps"], strict=True):
        assert step.keys() == expected_step.keys() >= {"kl/rollout_actor", "mismatch/mean_weight"}
        for name, value in expected_step.items():
            # Sums of float64 over micro-batches, in another order.
            assert step[name] == pytest.approx(value, rel=1e-12), name
