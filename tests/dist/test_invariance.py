"""Loss, gradient and updated weights do not depend on the split or on the micro-batch size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.layouts import SPLITS, job_flags
from tests.dist.test_parity import tensors_of
from tests.rank_pool import RankPool

TOLERANCE = 1e-5
# Every term of the loss is on. Adam's epsilon is large, so that the weights show the gradient and not
# its sign, as they would under the first step with the usual one; Megatron's distributed optimizer
# takes no plain gradient descent.
LOSS_FLAGS = (
    *("--rl-clip-eps-upper", "0.28"),
    *("--rl-kl-coef", "0.05"),
    *("--rl-entropy-coef", "0.01"),
    *("--adam-eps", "1.0"),
    *("--lr", "0.5"),
)
# Samples a micro-batch, or a budget of tokens for packing.
VARIANTS = [
    *((split, 2) for split in SPLITS if split != "tp1_pp1_ep1"),
    ("tp1_pp1_ep1", 1),
    ("tp1_pp1_ep1", 4),
    ("tp2_pp2_ep2", 1),
    ("tp2_pp2_ep2", 4),
    *((split, "128 tokens") for split in SPLITS),
]


@pytest.fixture(scope="module")
def train(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> Callable[[str, int | str], tuple[dict, dict]]:
    checkpoint = checkpoint_factory("deepseek_v3")

    def train(split: str, micro_batch: int | str) -> tuple[dict, dict]:
        target = tmp_path_factory.mktemp("trained") / "weights"
        if isinstance(micro_batch, int):
            flags = job_flags(checkpoint, split, *LOSS_FLAGS, micro_batch_size=micro_batch)
        else:
            budget = ("--rl-max-tokens-per-microbatch", micro_batch.removesuffix(" tokens"))
            flags = job_flags(checkpoint, split, *LOSS_FLAGS, *budget, micro_batch_size=1)
        results = ranks.run(
            "tests.dist.jobs:grpo_updates",
            world_size=SPLITS[split][3],
            arguments={"flags": flags, "target": str(target)},
        )
        assert all(result == results[0] for result in results), "ranks disagree"
        return results[0], tensors_of(target)

    return train


@pytest.fixture(scope="module")
def reference(train: Callable, checkpoint_factory: Callable[..., Path]) -> tuple[dict, dict]:
    """One process, whole model; and the update it made must be large enough to show an error."""
    numbers, weights = train("tp1_pp1_ep1", 2)
    before = tensors_of(checkpoint_factory("deepseek_v3"))
    moved = max((weights[n].float() - before[n].float()).abs().max() for n in before)
    assert moved > 100 * TOLERANCE
    return numbers, weights


@pytest.mark.parametrize(("split", "micro_batch"), VARIANTS)
def test_grpo_update_is_the_same_for_split_micro_batches_and_packing(
    split: str, micro_batch: int | str, train: Callable, reference: tuple[dict, dict]
) -> None:
    expected, expected_weights = reference
    numbers, weights = train(split, micro_batch)
    for name, values in expected.items():
        assert numbers[name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name
    for name, weight in expected_weights.items():
        assert weight.dtype == weights[name].dtype == torch.float32
        difference = (weights[name] - weight).abs().max()
        assert difference <= TOLERANCE, f"{name} differs by {difference}"
