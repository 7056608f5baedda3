"""GDPO and GRPO with the deviation of a step, against plain loops over groups and rewards."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.estimators import advantages_of_valid
from mcore_rl.algorithms.interfaces import AdvantageInputs
from mcore_rl.algorithms.registry import find_advantage_estimator
from mcore_rl.common.parameters import with_values
from tests.unit.algorithms.ragged import Ragged, random_ragged

EPS = 1e-6
GROUP_IDS = np.array([4, 4, 9, 4, 9, 1, 1, 7])
# The second reward is constant in group 4, and the first in group 1, whose sums differ.
PARTS = np.array(
    [[0.3, 1.0], [1.0, 1.0], [-2.0, 0.0], [0.25, 1.0], [0.5, 3.0], [0.1, 0.0], [0.1, 5.0], [3.0, 1]]
)
WEIGHTS = np.array([2.0, -0.5])
# The first group is of another source, which weighs them otherwise.
OF_SAMPLES = np.where((GROUP_IDS == GROUP_IDS[0])[:, None], [0.25, 1.0], WEIGHTS)


def inputs_of(batch: Ragged) -> AdvantageInputs:
    return AdvantageInputs(
        scores=PARTS @ WEIGHTS,
        group_ids=GROUP_IDS,
        response_lengths=batch.response_lengths,
        rows=np.arange(8),
        token_rewards=torch.zeros(batch.num_tokens),
        loss_mask=batch.loss_mask,
        lengths=batch.lengths,
        reward_parts=PARTS,
        reward_weights=OF_SAMPLES,
    )


def normalised(values: list[float], value: float) -> float:
    if len(set(values)) == 1:
        return 0.0
    return (value - statistics.mean(values)) / (statistics.stdev(values) + EPS)


def of_tokens(batch: Ragged, per_sample: dict[int, float]) -> torch.Tensor:
    expected = torch.zeros(batch.num_tokens)
    for sample, value in per_sample.items():
        expected[batch.loss_tokens[sample]] = value
    return expected


def estimated(name: str, batch: Ragged, valid: list[int], **config: str) -> torch.Tensor:
    entry = find_advantage_estimator(name)
    is_valid = np.isin(np.arange(8), valid)
    inputs = inputs_of(batch)
    for sample in np.flatnonzero(~is_valid):
        inputs.loss_mask[batch.loss_tokens[sample]] = False
    parameters = with_values(entry.parameters, config)
    return advantages_of_valid(entry.function, inputs, parameters, is_valid).advantages


@pytest.mark.parametrize("valid", [list(range(8)), [0, 1, 2, 4, 5, 6]])
def test_gdpo_normalises_each_reward_then_the_step(valid: list[int]) -> None:
    batch = random_ragged(1)
    totals = {}
    for i in valid:
        members = [j for j in valid if GROUP_IDS[j] == GROUP_IDS[i]]
        totals[i] = sum(
            OF_SAMPLES[i, k] * normalised([PARTS[j, k] for j in members], PARTS[i, k])
            for k in range(2)
        )
    every = list(totals.values())
    expected = {i: normalised(every, total) for i, total in totals.items()}
    found = estimated("gdpo", batch, valid)
    torch.testing.assert_close(found, of_tokens(batch, expected), rtol=1e-6, atol=1e-7)
    assert found.unique().numel() > 4


@pytest.mark.parametrize("valid", [list(range(8)), [0, 1, 2, 4, 5, 6]])
def test_grpo_divides_by_the_deviation_of_the_step(valid: list[int]) -> None:
    batch = random_ragged(2)
    scores = PARTS @ WEIGHTS
    std = statistics.stdev([scores[i] for i in valid])
    expected = {}
    for i in valid:
        members = [scores[j] for j in valid if GROUP_IDS[j] == GROUP_IDS[i]]
        expected[i] = (scores[i] - statistics.mean(members)) / (std + EPS)
    found = estimated("grpo", batch, valid, scale_rewards="batch")
    torch.testing.assert_close(found, of_tokens(batch, expected), rtol=1e-6, atol=1e-7)
    assert not torch.equal(found, estimated("grpo", batch, valid))


def test_gdpo_without_rewards_one_by_one_is_refused() -> None:
    batch = random_ragged(0)
    entry = find_advantage_estimator("gdpo")
    with pytest.raises(RuntimeError, match="rewards one by one"):
        entry.function(
            AdvantageInputs(
                np.zeros(8), GROUP_IDS, batch.response_lengths, np.arange(8),
                torch.zeros(batch.num_tokens), batch.loss_mask, batch.lengths,
            ),
            entry.parameters,
        )  # fmt: skip
