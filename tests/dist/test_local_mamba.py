"""Megatron's Mamba-2 layer with the local kernels: transformers' numbers, in all splits."""

from __future__ import annotations

import pytest

from tests.dist.test_delta_net import SPLITS, TOLERANCE
from tests.rank_pool import RankPool


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("split", SPLITS)
def test_output_and_gradients_equal_transformers(split: str, packed: bool, ranks: RankPool) -> None:
    degrees, lengths = SPLITS[split]
    results = ranks.run(
        "tests.dist.mamba_jobs:compare_with_transformers",
        world_size=degrees.get("tp_size", 1) * degrees.get("cp_size", 1),
        lengths=lengths if packed else [lengths[1]] * 2,
        packed=packed,
        **degrees,
    )
    for found in results:
        assert found.pop("unequal", 0.0) == 0.0  # bit for bit, sample by sample
        assert len(found) == 2 + 8 and max(found.values()) < TOLERANCE, found
