"""What a rank does in test_families: one model, all the ways its weights go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.builders import build_manager, engine_config
from mcore_rl.checkpoint import export
from mcore_rl.hybrid_engine.vllm_engine import VLLMEngine
from mcore_rl.verify import overwrite_with_zeros, stored_digests
from tests.dist.jobs import log_probs_of_random_tokens, random_tokens, started

NUM_PROMPTS = 4  # scored by vLLM


def all_ways(flags: list[str], target: str) -> dict[str, Any]:
    """Checkpoint -> Megatron (log-probs) -> checkpoint, and Megatron -> vLLM (what it stores)."""
    job, actor, shards = started(flags)
    log_probs = log_probs_of_random_tokens(job, actor)
    # Several files and several writers, whatever the size of the model.
    export(shards, job.checkpoint, Path(target), max_file_bytes=1 << 17, bucket_bytes=1 << 14)

    engine = VLLMEngine(engine_config(job, load_format="auto"))
    from_disk = stored_digests(engine)
    manager = build_manager(job, shards, engine)
    overwrite_with_zeros(engine, job, from_disk)
    with manager:
        handed_over = stored_digests(engine)
        prompts = random_tokens(job.shape.vocab_size)[:NUM_PROMPTS].tolist()
        vllm = torch.stack([torch.from_numpy(v) for v in engine.prompt_log_probs(prompts)])
    engine.close()
    names = sorted(from_disk.keys() | handed_over.keys())
    result = {
        "log_probs": log_probs.tolist(),
        "parameters": {
            name: list(value.shape)
            for chunk in actor.state.chunks
            for name, value in chunk.named_parameters()
        },
        "num_stored": len(from_disk),
        "stored_otherwise": [n for n in names if from_disk.get(n) != handed_over.get(n)],
        "mean_difference_to_vllm": float((log_probs[:NUM_PROMPTS, :-1] - vllm).abs().mean()),
    }
    dist.destroy_process_group()
    return result
