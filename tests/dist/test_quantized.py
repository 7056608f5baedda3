"""Quantized checkpoints on four ranks: into Megatron, into vLLM, and back.

Everything is compared with a bfloat16 folder of the dequantized weights.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.model.config_json import read_model_shape
from tests.dist.checkpoints import (
    assert_log_probs_equal_transformers,
    differing,
    run_all_ways,
    tensors_of,
)
from tests.float8_checkpoint import make_float8
from tests.int4_checkpoint import make_int4
from tests.multimodal import make_multimodal
from tests.mxfp4_checkpoint import make_mxfp4
from tests.rank_pool import RankPool

# No dimension that is cut is a multiple of 128, so that TP cuts through FP8 blocks.
FLOAT8_SIZES = {
    "hidden_size": 192,
    "intermediate_size": 320,  # 160 rows or columns of a TP rank
    "moe_intermediate_size": 160,  # of the shared expert 80
    "qk_nope_head_dim": 48,
    "v_head_dim": 48,
}
UNTIED = {"tie_word_embeddings": False}
NUM_TENSORS = {"float8": 41, "int4": 41, "mxfp4": 30}  # at least


@dataclass(frozen=True)
class Outcome:
    published: Path
    dequantized: Path
    exported: Path
    exported_float8: Path
    results: list[dict[str, Any]]  # each rank's


@pytest.fixture(scope="module")
def outcome_of(
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Outcome]:
    """One start of Megatron and of the engines for each kind."""

    @functools.cache
    def outcome_of(kind: str) -> Outcome:
        folder = tmp_path_factory.mktemp(kind)
        exported_float8 = folder / "exported_float8"
        if kind == "float8":
            checkpoint = checkpoint_factory("kimi_k2", overrides=FLOAT8_SIZES)
            published, dequantized = make_float8(checkpoint, folder)
            split, targets = "tp2_pp2_ep2", {"float8_target": exported_float8}
        elif kind == "int4":
            checkpoint = make_multimodal(
                checkpoint_factory("kimi_k2"), "kimi_k25", folder / "source", **UNTIED
            )
            published, dequantized = make_int4(checkpoint, folder)
            split, targets = "tp2_pp2_ep2", {}
        else:
            published, dequantized = make_mxfp4(checkpoint_factory("gpt_oss"), folder)
            split, targets = "tp2_pp2_ep1", {}  # engines split experts, too
        results = run_all_ways(ranks, published, split, folder, published=dequantized, **targets)
        return Outcome(published, dequantized, folder / "exported", exported_float8, results)

    return outcome_of


@pytest.mark.parametrize("kind", NUM_TENSORS)
def test_megatron_has_the_dequantized_weights(
    kind: str, outcome_of: Callable[[str], Outcome]
) -> None:
    outcome = outcome_of(kind)
    assert differing(outcome.exported, outcome.dequantized, NUM_TENSORS[kind]) == []
    index = json.loads((outcome.exported / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(outcome.exported).keys()
    assert read_model_shape(outcome.exported).quantization is None
    log_probs = [result["log_probs"] for result in outcome.results]
    assert_log_probs_equal_transformers(log_probs, outcome.exported)


@pytest.mark.parametrize("kind", NUM_TENSORS)
def test_engine_starts_from_the_folder_and_gets_the_dequantized_weights(
    kind: str, outcome_of: Callable[[str], Outcome]
) -> None:
    """Against vLLM's own load of the bfloat16 folder, by its own loader from its files."""
    outcome = outcome_of(kind)
    for result in outcome.results:
        assert result["num_stored"] > 15
        verification = result["verification"]
        assert verification["stored_equal"], verification["differing"]
        if kind == "float8":  # gpt-oss stacks its experts
            assert verification["num_tensors"] == len(tensors_of(outcome.dequantized))
        assert result["published_stored_otherwise"] == []
        assert result["published_log_probs"] == verification["vllm_log_probs"]
        assert verification["mean_abs_difference"] < 0.04


def test_untrained_float8_blocks_are_exported_as_published(
    outcome_of: Callable[[str], Outcome],
) -> None:
    outcome = outcome_of("float8")
    assert differing(outcome.exported_float8, outcome.published, NUM_TENSORS["float8"]) == []
    before, after = (
        json.loads((folder / "config.json").read_text())
        for folder in (outcome.published, outcome.exported_float8)
    )
    assert after == before
