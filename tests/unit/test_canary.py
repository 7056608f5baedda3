"""The comparison of canaries and its schedule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mcore_rl.batching.types import TrainBatch
from mcore_rl.hybrid_engine.proof.canary import (
    Canary,
    CanaryResult,
    differences,
    megatron_log_probs,
    worst_of,
)


def result(*means: float, tolerance: float = 0.1) -> CanaryResult:
    return CanaryResult(3, means, tuple(2 * m for m in means), tolerance)


@pytest.mark.parametrize(
    ("means", "tolerance", "ok"),
    [
        ((0.02, 0.1), 0.1, True),
        ((0.02, 0.11), 0.1, False),
        ((float("nan"), 0.02), 0.1, False),
        ((0.02, 7.5), 0.0, True),  # 0 disables the comparison, but for NaN
        ((0.02, float("nan")), 0.0, False),
    ],
)
def test_result_is_ok_within_the_tolerance_of_every_prompt(
    means: tuple[float, ...], tolerance: float, ok: bool
) -> None:
    assert result(*means, tolerance=tolerance).ok == ok


def test_result_names_the_worst_prompt() -> None:
    assert "canary prompt 1 is scored apart by 0.1100 on average and 0.2200 at most" in str(
        result(0.02, 0.11)
    )
    assert "prompt 1 is scored apart by nan" in str(result(0.5, float("nan")))


def test_differences_are_by_prompt() -> None:
    ours = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]
    theirs = [np.array([-1.5, -2.0], np.float32), np.array([-2.0], np.float32)]
    assert differences(ours, theirs) == ([0.25, 1.0], [0.5, 1.0])
    with pytest.raises(ValueError):
        differences(ours, theirs[:1])


def test_result_is_that_of_the_worst_engine() -> None:
    assert worst_of([[0.1, 0.2], [0.3, 0.1]]) == (0.3, 0.2)
    assert np.isnan(worst_of([[0.1], [float("nan")]])[0])


def test_prompts_are_scored_each_in_a_micro_batch_of_its_own() -> None:
    seen: list[TrainBatch] = []

    def log_probs(batch: TrainBatch) -> torch.Tensor:
        seen.append(batch)
        return batch.token_ids.float().roll(-1)  # as if token t+1 were its score

    prompts = [[7, 8, 9], [1, 2, 3, 4, 5]]
    scores = megatron_log_probs(log_probs, prompts, count_multiple_of=4)
    assert [batch.cuts for batch in seen] == [((1, 1, 1, 1),)]
    assert [score.tolist() for score in scores] == [[8.0, 9.0], [2.0, 3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    ("interval", "expected"), [(1, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (50, [1])]
)
def test_canary_is_due_at_the_first_version_and_every_interval(
    interval: int, expected: list[int]
) -> None:
    canary = Canary(
        lambda batch: batch.token_ids.float(), [[1, 2]], interval=interval, tolerance=0.1
    )
    assert [version for version in range(1, 6) if canary.due(version)] == expected


def test_engine_elsewhere_is_compared_with_the_last_scores() -> None:
    canary = Canary(
        lambda batch: batch.token_ids.float().roll(-1), [[1, 2, 3], [4, 5]], interval=1, tolerance=1
    )
    canary.score()
    assert canary.prompts == [[1, 2, 3], [4, 5]]
    found = canary.compare_with([np.array([2.0, 4.0]), np.array([5.25])], 3)
    assert found == CanaryResult(3, (0.5, 0.25), (1.0, 0.25), tolerance=1) and found.ok
    assert not canary.compare_with([np.array([2.0, 6.0]), np.array([5.0])], 3).ok
    assert not canary.compare_with([np.array([2.0, 3.0]), np.array([float("nan")])], 3).ok
