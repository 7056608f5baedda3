"""The simulation of benchmarks/dispatch.py: by hand where it is small, and its bound."""

from __future__ import annotations

import pytest

from benchmarks.dispatch import KNOWS, SECTION, makespan, seconds_of, section_of
from benchmarks.pages import markers
from benchmarks.rollout_worker import LONG_TAIL, Load


@pytest.mark.parametrize(
    ("shares", "rest", "expected"),
    [
        # Room for two, a step costs 10 and one for each sequence.
        ([[1, 2], [1]], [], 12 + 11),  # the first engine: both, then one
        ([[3], [1]], [[1], [1]], 12 + 11 + 11),  # engine 0 has room and draws first
        ([[2, 2, 2], []], [], 12 + 12 + 11 + 11),  # the third waits for room
        ([[2], [2]], [[2, 2]], 12 + 12 + 11 + 11),  # what is drawn together stays together
    ],
)
def test_makespan_is_that_of_the_slowest_engine(
    shares: list[list[int]], rest: list[list[int]], expected: float
) -> None:
    assert makespan(shares, iter(rest), room=2, fixed=10) == expected


@pytest.mark.parametrize("seed", range(20))
def test_no_way_is_faster_than_the_bound(seed: int) -> None:
    found = seconds_of(LONG_TAIL, seed, fixed=6)
    assert found.keys() == KNOWS.keys()
    assert min(found.values()) == found["bound"]


def test_the_page_has_a_row_for_every_way() -> None:
    page = section_of(Load(num_prompts=4, num_samples=2, median_tokens=4, max_num_seqs=2), 3)
    assert (page.splitlines()[0], page.splitlines()[-1]) == markers(SECTION)
    assert all(f"| {way} | " in page for way in KNOWS)
    assert "| blocks | nothing | 1.00x (1.00-1.00)" in page
