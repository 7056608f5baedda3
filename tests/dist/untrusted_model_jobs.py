"""What a rank does in `test_untrusted_model.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import torch.distributed as dist

from mcore_rl.hybrid_engine.vllm.startup import engine_arguments, start_llm
from tests.engine_samples import small_engine


def start_engine(folder: str, load_format: str) -> dict[str, str]:
    """Start an engine as training does (or as verification: "auto") and let it write a token."""
    dist.init_process_group("gloo")
    config = small_engine(folder, load_format)
    try:
        llm = start_llm(config)
    except Exception as error:  # vLLM has one for each kind of what is wrong with a folder
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "tokenizer": type(llm.get_tokenizer()).__name__,
        "load_format": engine_arguments(config)["load_format"],
    }
