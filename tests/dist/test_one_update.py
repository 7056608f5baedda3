"""Scoring the samples in a step's only update is the same as scoring them before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.layouts import SPLITS, job_flags
from tests.dist.updates import PPO_JOB, Outcome, learned
from tests.rank_pool import RankPool

FLAGS = tuple(
    "--rl-num-mini-batches 1 --rl-max-tokens-per-microbatch 128 --rl-mismatch-correction "
    "sequence_tis --rl-kl-coef 0.05 --adam-eps 1.0 --lr 0.1".split()
)
SPLIT = "tp2_pp2_ep2"


@pytest.fixture(scope="module")
def both(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> tuple[Outcome, Outcome]:
    """What came of samples that are scored in the update, and before it."""
    flags = job_flags(checkpoint_factory("deepseek_v3"), SPLIT, *FLAGS, micro_batch_size=1)
    in_update, before = (
        learned(
            ranks,
            flags,
            SPLITS[SPLIT][3],
            tmp_path_factory.mktemp("learned"),
            job=PPO_JOB,
            scores_in_update=scores_in_update,
        )
        for scores_in_update in (True, False)
    )
    return in_update, before


def test_the_weights_are_the_same_bit_for_bit(both: tuple[Outcome, Outcome]) -> None:
    weights, expected = (outcome.weights for outcome in both)
    assert weights.keys() == expected.keys() and expected
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name


def test_the_metrics_are_the_same(both: tuple[Outcome, Outcome]) -> None:
    found, expected = (outcome.found["steps"] for outcome in both)
    for step, expected_step in zip(found, expected, strict=True):
        assert step.keys() == expected_step.keys() >= {"kl/rollout_actor", "mismatch/mean_weight"}
        for name, value in expected_step.items():
            # Sums of float64 over micro-batches, in another order.
            assert step[name] == pytest.approx(value, rel=1e-12), name
