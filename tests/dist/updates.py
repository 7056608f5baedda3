"""What a job that learns has measured and made, and how far it is from another one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.checkpoints import tensors_of
from tests.rank_pool import RankPool

TOLERANCE = 1e-5
PPO_JOB = "tests.dist.ppo_jobs:learn"


@dataclass(frozen=True)
class Outcome:
    found: dict[str, Any]  # by the job, alike on all ranks; "steps" has each step's metrics
    weights: dict[str, torch.Tensor]  # "actor/..." and "critic/..."

    @classmethod
    def of(cls, results: list[dict[str, Any]], target: Path) -> Outcome:
        """What each rank returned, and the models exported to `target`."""
        assert all(result == results[0] for result in results), "ranks disagree"
        weights = {
            f"{model}/{name}": weight
            for model in ("actor", "critic")
            for name, weight in tensors_of(target / model).items()
        }
        return cls(results[0], weights)


def learned(
    ranks: RankPool, flags: list[str], num_processes: int, target: Path, *, job: str, **more: Any
) -> Outcome:
    """Run `job(flags, target, **more)`; `more` may have options of `RankPool.run`, too."""
    results = ranks.run(job, world_size=num_processes, flags=flags, target=target, **more)
    return Outcome.of(results, target)


@dataclass(frozen=True)
class Differences:
    """The largest differences to a reference; losses are means over tokens."""

    # Absolute where the reference's value is below 1: terms of a token are of the order of 1 and
    # cancel each other in the mean.
    loss: float
    grad_norm: float  # relative
    weight: float  # absolute
    weight_name: str

    def assert_small(self) -> None:
        assert self.loss <= TOLERANCE
        assert self.grad_norm <= TOLERANCE
        assert self.weight <= TOLERANCE, self.weight_name


def differences_of(outcome: Outcome, expected: Outcome) -> Differences:
    loss = grad_norm = 0.0
    for step, expected_step in _steps_of_both(outcome, expected):
        for name, value in expected_step.items():
            assert math.isnan(step[name]) == math.isnan(value), name
            difference = abs(step[name] - value)
            if name.endswith("grad_norm"):
                grad_norm = max(grad_norm, difference / value)
            else:
                loss = max(loss, difference / max(abs(value), 1.0))
    return Differences(loss, grad_norm, *_largest_of_weights(outcome, expected))


def assert_alike(outcome: Outcome, expected: Outcome) -> None:
    """All within the tolerance; gradient norms below 1 absolutely, as losses are."""
    for step, expected_step in _steps_of_both(outcome, expected):
        for name, value in expected_step.items():
            assert step[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name
    difference, name = _largest_of_weights(outcome, expected)
    assert difference <= TOLERANCE, f"{name} differs by {difference}"


def _steps_of_both(outcome: Outcome, expected: Outcome) -> list[tuple[dict, dict]]:
    steps = list(zip(outcome.found["steps"], expected.found["steps"], strict=True))
    assert all(step.keys() == expected_step.keys() for step, expected_step in steps)
    return steps


def _largest_of_weights(outcome: Outcome, expected: Outcome) -> tuple[float, str]:
    """The largest absolute difference (nan if there is one), and whose it is."""
    assert outcome.weights.keys() == expected.weights.keys()
    largest, largest_name = 0.0, ""
    for name, weight in expected.weights.items():
        assert outcome.weights[name].dtype == weight.dtype == torch.float32
        difference = float((outcome.weights[name] - weight).abs().max())
        if not difference <= largest:
            largest, largest_name = difference, name
            if math.isnan(difference):
                break
    return largest, largest_name
