"""Weights for FP8 rollout: cut at the sender, they are those of the complete weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.layouts import SPLITS, job_flags
from tests.rank_pool import RankPool

# TP2 cuts blocks of 128: attention by heads of 112 rows, 192 rows of dense layers, 64 of experts.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 48,
    "v_head_dim": 48,
}


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "powers_of_two"])
def results(
    request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> list[dict[str, Any]]:
    checkpoint = checkpoint_factory("deepseek_v3", overrides=SIZES)
    flags = [*job_flags(checkpoint, "tp2_pp2_ep2", "--lr", "1e-2")]
    flags += ["--expert-tensor-parallel-size", "2", "--expert-model-parallel-size", "1"]
    return ranks.run(
        "tests.dist.float8_jobs:hand_overs",
        world_size=SPLITS["tp2_pp2_ep2"][3],
        flags=flags,
        powers_of_two=request.param,
    )


def test_slices_have_the_bits_of_the_quantised_weight(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["quantised"] > 20
        assert result["cut_blocks"] > 20, "no slice cuts a block, so nothing is tested"
        assert result["equal"] == [[], []]
        assert result["gathered_equal"] == [[], []]


def test_what_arrives_is_attested(results: list[dict[str, Any]]) -> None:
    for result in results:
        for attestation in result["attested"]:
            assert "arrived as it was held (full)" in attestation


def test_received_bytes_are_the_lower_bound(results: list[dict[str, Any]]) -> None:
    for result in results:
        in_float8, in_bf16 = result["lower_bound"]
        first, changed_blocks = result["received"]
        assert changed_blocks <= first == in_float8
        assert in_float8 < in_bf16
