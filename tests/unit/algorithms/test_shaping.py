"""The overlong penalty by its equation, and the groups whose scores differ."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.algorithms.estimators import overlong_penalty, select_informative_groups


@pytest.mark.parametrize("buffer", [1, 3, 10])
def test_overlong_penalty_equals_equation(buffer: int) -> None:
    lengths, limit = np.arange(13), 10
    expected = []
    for length in lengths.tolist():
        if length <= limit - buffer:
            expected.append(0.0)
        elif length <= limit:
            expected.append(((limit - buffer) - length) / buffer)
        else:
            expected.append(-1.0)
    found = overlong_penalty(lengths, buffer_tokens=buffer, max_response_tokens=limit)
    assert found.dtype == np.float64 and found.tolist() == pytest.approx(expected)
    assert not np.signbit(found[expected == np.float64(0)]).any()


def test_overlong_penalty_is_zero_without_buffer() -> None:
    found = overlong_penalty(np.array([0, 10, 11]), buffer_tokens=0, max_response_tokens=10)
    assert found.tolist() == [0.0, 0.0, 0.0]


@given(
    groups=st.dictionaries(
        st.integers(-5, 50), st.lists(st.sampled_from([0.1, 0.2, 1.0]), min_size=1), min_size=1
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_informative_groups_have_several_scores(groups: dict[int, list[float]], seed: int) -> None:
    ids = np.array([group for group, scores in groups.items() for _ in scores])
    scores = np.array([score for scores in groups.values() for score in scores])
    order = np.random.default_rng(seed).permutation(len(ids))
    expected = sorted(group for group, scores in groups.items() if len(set(scores)) > 1)
    assert select_informative_groups(scores[order], ids[order]).tolist() == expected


def test_score_not_finite_is_refused() -> None:
    with pytest.raises(RuntimeError, match="of sample 1 .* is not finite"):
        select_informative_groups(np.array([0.0, math.nan]), np.array([0, 0]))
