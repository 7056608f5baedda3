"""How much memory a reload takes beside the model, and that it takes no more every time.

The weights of an MoE model of 300 MB come as slices in one small buffer that is overwritten when
the next slice is asked for. Digests are compared with those after vLLM's own layerwise reload of
the same weights, which is measured too: it shows what the bound is worth.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import load_script
from tests.dist.checkpoints import NO_WEIGHT
from tests.rank_pool import RankPool

CHUNK_BYTES = 4 << 20
REPETITIONS = 10
SLACK_BYTES = 2 << 20  # what is kept of small allocations, and Python's own objects

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> dict[str, Any]:
    config = load_script("make_tiny_deepseek").hf_config("deepseek_v3", "small")
    config |= dict(hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=6)
    config |= dict(vocab_size=8192, intermediate_size=2048, torch_dtype="bfloat16")
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(config))
    (result,) = ranks.run(
        "tests.dist.reload_memory_jobs:measure",
        world_size=1,
        model_dir=folder,
        chunk_bytes=CHUNK_BYTES,
        repetitions=REPETITIONS,
    )
    print({key: result[key] for key in ("module_bytes", "peaks", "upstream_peaks")})
    return result


def test_the_weights_are_those_of_vllms_own_reload(measured):
    changed = [n for n in measured["same_as_version_2"] if not NO_WEIGHT.search(n)]
    assert changed == []  # the weights before were others, everywhere
    assert measured["differing"] == []


def test_a_reload_holds_one_slice_and_what_a_packed_layer_needs(measured):
    """Linear layers compute with packed copies on CPU, made of a weight that is dropped then."""
    modules = measured["module_bytes"]
    experts = modules.pop("RoutedExperts")
    # Both embeddings keep their weight as it is; their packed copy goes before the new one comes.
    packed = max(size for kind, size in modules.items() if kind.endswith("Linear"))
    assert max(measured["peaks"]) < CHUNK_BYTES + packed + SLACK_BYTES < experts / 2
    # vLLM's keeps what it is given, and makes the layer's parameters a second time.
    assert min(measured["upstream_peaks"]) > 2 * experts


def test_ten_reloads_leave_no_more_memory_than_two(measured):
    resident = measured["resident"]
    assert len(resident) == REPETITIONS
    assert max(resident) - resident[1] < 1 << 20


def test_no_loader_of_this_model_computes_with_what_it_is_given(measured):
    """Such tensors would have to be put together before they are loaded."""
    assert measured["computed"] == []
