"""Sparse attention: which layers have an indexer, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GlmMoeDsaConfig

from mcore_rl.common.errors import UsageError
from mcore_rl.job.engines import check_layers
from mcore_rl.job.layout import check_stages
from mcore_rl.megatron import adapter, sparse_attention  # noqa: F401  (it applies patches)
from mcore_rl.model.architecture_flags import megatron_flags
from mcore_rl.model.config_json import ModelShape, model_shape
from mcore_rl.model.families import left_to_defaults
from mcore_rl.model.sparse_attention import Indexer
from tests.model_shapes import CONFIGS

from megatron.core.transformer.experimental_attention_variant import dsa  # isort: skip
from megatron.core.transformer.experimental_attention_variant.dsa import (  # isort: skip
    is_dsa_skip_topk_layer,
    source_dsa_compute_layer,
)

GLM_5 = json.loads((CONFIGS / "glm-5.json").read_text())
DEEPSEEK_V32 = json.loads((CONFIGS / "deepseek-v3.2.json").read_text())
NUM_LAYERS = GLM_5["num_hidden_layers"]


def glm(**fields: Any) -> ModelShape:
    return model_shape(GLM_5 | fields, Path("config.json"), for_planning=True)


def indexer_of(**fields: Any) -> Indexer:
    indexer = glm(**fields).indexer
    assert indexer is not None
    return indexer


@pytest.mark.parametrize("frequency", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("offset", [1, 2, 3, 7])
def test_layers_are_those_of_transformers_and_megatron(frequency: int, offset: int) -> None:
    fields = {"index_topk_freq": frequency, "index_skip_topk_offset": offset}
    indexer = indexer_of(**fields)
    types = GlmMoeDsaConfig(num_hidden_layers=NUM_LAYERS, **fields).indexer_types
    assert indexer.in_layer == tuple(kind == "full" for kind in types)
    flags = megatron_flags(glm(**fields))
    given = {
        name: int(flags[flags.index(name) + 1]) if name in flags else default
        for name, default in (("--dsa-indexer-skip-topk-offset", 0), ("--dsa-indexer-topk-freq", 1))
    }
    for layer in range(NUM_LAYERS):
        assert indexer.in_layer[layer] is not is_dsa_skip_topk_layer(layer + 1, *given.values())
        assert indexer.source_of(layer) == source_dsa_compute_layer(layer + 1, *given.values()) - 1


def test_layers_by_types_are_those_by_a_pattern_and_given_to_vllm() -> None:
    types = (["full"] + ["full", "shared", "shared"] * NUM_LAYERS)[:NUM_LAYERS]
    pattern = "".join(kind[0].upper() for kind in types)
    by_types = indexer_of(indexer_types=types)
    assert by_types == indexer_of(index_topk_pattern=pattern)
    added = left_to_defaults(GLM_5 | {"indexer_types": types})
    assert added["index_topk_pattern"] == pattern
    assert "index_topk_pattern" not in left_to_defaults(GLM_5)


SHARED = ["full", "shared"] * (NUM_LAYERS // 2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"indexer_types": SHARED[1:] + ["full"]}, "indexers in layers that do not follow"),
        ({"indexer_types": [*SHARED[:-3], "full", *SHARED[-2:]]}, "indexers in layers that do"),
        ({"indexer_types": SHARED[:-1]}, f"indexer_types .* must be {NUM_LAYERS} of F, S, full"),
        ({"indexer_types": ["some"] * NUM_LAYERS}, "indexer_types .* must be"),
        ({"index_topk_pattern": 7}, "index_topk_pattern 7, which must be"),
        (
            {"indexer_types": SHARED, "index_topk_freq": 4},
            "other layers .* by index_topk_freq than",
        ),
        ({"index_topk": 0}, "index_topk 0, which must be an integer from 1"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave False with model_type"),
        ({"layer_types": ["sliding_attention"] * NUM_LAYERS}, "layer_types other than indexed"),
    ],
)
def test_indexers_that_megatron_cannot_build_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as refusal:
        glm(**fields)
    assert refusal.value.remedy


def test_rope_of_the_indexer_is_told_to_vllm() -> None:
    """transformers has one for each class, and writes none."""
    for values, interleaved in ((GLM_5, True), (DEEPSEEK_V32, False)):
        without = {k: v for k, v in values.items() if k != "indexer_rope_interleave"}
        assert left_to_defaults(without)["indexer_rope_interleave"] is interleaved
        shape = model_shape(without, Path("config.json"), for_planning=True)
        flag = "--dsa-indexer-rope-interleaved"
        assert (flag in megatron_flags(shape)) is interleaved


def test_engines_without_cuda_are_refused() -> None:
    says = "glm_moe_dsa .* vLLM runs on GPUs only; use .*--rl-verify-megatron-only"
    with pytest.raises(UsageError, match=says):
        check_layers(glm(), cuda=False)
    check_layers(glm(), cuda=True)


def test_stages_that_separate_a_layer_from_its_indexer_are_refused() -> None:
    shape = glm(index_topk_freq=4, index_skip_topk_offset=3)  # layers 2, 6, 10, ...
    says = "2 separates layer 39 from layer 38, .*; let every stage begin at a layer with an"
    with pytest.raises(UsageError, match=f"--pipeline-model-parallel-size {says}"):
        check_stages(shape, 2, {})
    stages = check_stages(shape, 2, {"decoder_first_pipeline_num_layers": 38})
    assert [len(chunks[0]) for chunks in stages] == [38, 40]
    assert check_stages(glm(), 2, {}) is not None


def test_choices_that_fp8_scores_replace_are_counted() -> None:
    """Against sets of keys, chosen by scores computed one by one."""
    generator = torch.Generator().manual_seed(3)
    num, heads, head, topk = 24, 16, 128, 5
    q = torch.randn(num, 1, heads, head, generator=generator)
    k = torch.randn(num, 1, head, generator=generator)
    weights = torch.randn(num, 1, heads, generator=generator)
    starts, ends = torch.zeros(num, dtype=torch.int64), torch.arange(1, num + 1)
    found = sparse_attention.Choices()
    with sparse_attention.comparing_choices(found):
        _, chosen = dsa.fused_qk_topk_naive(
            q, k, weights, topk, varlen_starts=starts, varlen_ends=ends
        )

    def best(query: int, *parts: torch.Tensor) -> set[int]:
        queries, keys = (part[:, 0] for part in parts)
        scores = [
            sum(
                float(weights[query, 0, h] * (queries[query, h] @ keys[t]).relu())
                for h in range(heads)
            )
            for t in range(query + 1)
        ]
        return set(sorted(range(query + 1), key=lambda t: -scores[t])[:topk])

    replaced = 0
    for query in range(topk, num):
        exact = best(query, q, k)
        assert exact == set(chosen[0, query].tolist())
        replaced += len(exact - best(query, rounded(q), rounded(k)))
    assert found.chosen == topk * (num - topk)
    assert found.replaced == replaced > 0
    assert dsa.fused_qk_topk_naive.__module__ == dsa.__name__, "the original is back"


def rounded(x: torch.Tensor) -> torch.Tensor:
    """By the smallest power of two with which every element is at most 448."""
    found = torch.empty_like(x)
    for place in itertools.product(*map(range, x.shape[:-1])):
        values, scale = x[place], 2.0**-20
        while values.abs().max() / scale > 448:
            scale *= 2
        found[place] = (values / scale).to(torch.float8_e4m3fn).float() * scale
    return found
