"""Bins of equal cost: complete, deterministic, and close to the optimum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.batching.assignment import SampleFlops, partition
from tests.model_shapes import DEEPSEEK_V3


@given(costs=st.lists(st.floats(0, 1e6), max_size=40), num_bins=st.integers(1, 9))
def test_partition_puts_every_index_in_one_bin(costs: list[float], num_bins: int) -> None:
    bins = partition(costs, num_bins)
    assert len(bins) == num_bins
    assert sorted(int(i) for indices in bins for i in indices) == list(range(len(costs)))
    assert all((np.diff(indices) > 0).all() for indices in bins)
    again = partition(list(costs), num_bins)
    assert all(np.array_equal(a, b) for a, b in zip(bins, again, strict=True))


def joined_by_hand(costs: list[float], num_bins: int) -> list[list[int]]:
    """The method as its paper tells it, with bins as lists; ties go to what is older."""
    partitions = [
        (-cost, index, [(0.0, [])] * (num_bins - 1) + [(cost, [index])])
        for index, cost in enumerate(costs)
    ]
    age = len(costs)
    while len(partitions) > 1:
        (_, _, one), (_, _, other), *partitions = sorted(partitions, key=lambda each: each[:2])
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda each: each[0])
        partitions.append((joined[0][0] - joined[-1][0], age, joined))
        age += 1
    return [sorted(indices) for _, indices in partitions[0][2]]


@given(
    costs=st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 7.25, 1e5 / 3]), min_size=1, max_size=30),
    num_bins=st.integers(2, 7),
)
def test_partition_is_the_method_of_largest_differences(costs: list[float], num_bins: int) -> None:
    found = [indices.tolist() for indices in partition(costs, num_bins)]
    assert found == joined_by_hand(costs, num_bins)


@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_two_bins_are_within_the_largest_number_of_the_best(costs: list[int]) -> None:
    found = max(sum(costs[i] for i in indices) for indices in partition(costs, 2))
    best = min(
        max(sum(c for c, side in zip(costs, sides, strict=True) if side == s) for s in (0, 1))
        for sides in itertools.product((0, 1), repeat=len(costs))
    )
    # Karmarkar-Karp is at most 7/6 of the optimum for two bins (Fischetti and Martello, 1987).
    assert found <= best * 7 / 6 + 1e-9


def test_the_differencing_method_of_the_paper() -> None:
    """{4, 5, 6, 7, 8}: 8-7=1, 6-5=1, 4-1=3, 3-1=2, a difference of 2; the greedy one gives 4."""
    sums = sorted(
        sum((4, 5, 6, 7, 8)[i] for i in indices) for indices in partition((4, 5, 6, 7, 8), 2)
    )
    assert sums == [14, 16]


@pytest.mark.parametrize("num_bins", [4, 64])
def test_many_samples_are_balanced(num_bins: int) -> None:
    costs = np.random.default_rng(1).lognormal(6, 0.8, 4096)
    sums = [costs[indices].sum() for indices in partition(costs, num_bins)]
    assert max(sums) / min(sums) < 1.001


def test_flops_of_a_sample_are_those_of_weights_and_of_causal_attention() -> None:
    flops = SampleFlops.of(DEEPSEEK_V3)
    # DeepSeek-V3 activates 37 B parameters a token, of which 0.9 B are the embedding.
    assert flops.per_token == pytest.approx(2 * 36.7e9, rel=0.02)
    # 61 layers x 128 heads x (192 + 128), two operations each, half of the pairs.
    assert flops.per_token_pair == 61 * 128 * (192 + 128)
    assert flops(np.array([1000]))[0] == 1000 * flops.per_token + 1000**2 * flops.per_token_pair
