"""How much memory a reload takes beside the model, and that it takes no more every time.

The weights of an MoE model of 300 MB come as slices in one small buffer that is overwritten when
the next slice is asked for. Digests are compared with those after vLLM's own layerwise reload of
the same weights, which is measured too: it shows what the bound is worth.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import load_script
from tests.rank_pool import RankPool

CHUNK_BYTES = 4 << 20
BUCKET_BYTES = 16 << 20
REPETITIONS = 10
# What the allocator rounds up to and does not give back at once, and Python's own objects.
SLACK_BYTES = 8 << 20

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> dict[str, Any]:
    config = load_script("make_tiny_deepseek").hf_config("deepseek_v3", "small")
    config |= dict(hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=6)
    config |= dict(vocab_size=8192, intermediate_size=2048, torch_dtype="bfloat16")
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(config))
    arguments = dict(
        model_dir=str(folder),
        config=config,
        chunk_bytes=CHUNK_BYTES,
        repetitions=REPETITIONS,
    )
    (result,) = ranks.run(
        "tests.dist.reload_memory_jobs:measure", world_size=1, arguments=arguments
    )
    print(json.dumps(result))
    return result
