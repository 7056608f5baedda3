"""Megatron's gated delta net with the local kernels: transformers' numbers, in all splits.

That whole models agree, test_families shows, and their updates test_family_invariance.
"""

from __future__ import annotations

import pytest

from tests.rank_pool import RankPool

TOLERANCE = 1e-5  # relative, in float32
ODD = [1, 129, 3, 64, 77]
FOURFOLD = [4, 132, 8, 64, 76]  # two chunks for each of two context-parallel ranks
SPLITS = {
    "one process": ({}, ODD),
    "TP2": ({"tp_size": 2}, ODD),
    "CP2": ({"cp_size": 2}, FOURFOLD),
    "TP2 CP2": ({"tp_size": 2, "cp_size": 2}, FOURFOLD),
}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("split", SPLITS)
def test_output_and_gradients_equal_transformers(split: str, packed: bool, ranks: RankPool) -> None:
    degrees, lengths = SPLITS[split]
    results = ranks.run(
        "tests.dist.delta_net_jobs:compare_with_transformers",
        world_size=degrees.get("tp_size", 1) * degrees.get("cp_size", 1),
        lengths=lengths if packed else [lengths[1]] * 2,
        packed=packed,
        **degrees,
    )
    for found in results:
        assert found.pop("unequal", 0.0) == 0.0  # bit for bit, sample by sample
        assert len(found) == 2 + 6 and max(found.values()) < TOLERANCE, found
