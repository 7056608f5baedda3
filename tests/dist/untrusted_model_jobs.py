"""What a rank does in `test_untrusted_model.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from mcore_rl.hybrid_engine.vllm import startup as vllm_start
from mcore_rl.hybrid_engine.vllm.startup import EngineConfig, start_llm


def start_engine(folder: str, load_format: str) -> dict[str, str]:
    """Start an engine as training does (or as verification: "auto") and let it write a token."""
    dist.init_process_group("gloo")
    config = EngineConfig(
        model_dir=Path(folder),
        load_format=load_format,
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_bytes=1 << 26,
    )
    try:
        llm = start_llm(config)
    except Exception as error:  # vLLM has one for each kind of what is wrong with a folder
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "tokenizer": type(llm.get_tokenizer()).__name__,
        "load_format": vllm_start.engine_arguments(config)["load_format"],
    }
