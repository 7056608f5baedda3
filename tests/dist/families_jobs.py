"""What a rank does in test_families: one model, all the ways its weights go."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from mcore_rl import verify
from mcore_rl.common.run_output import setup_logging
from mcore_rl.hybrid_engine.vllm.engine import VLLMEngine
from mcore_rl.megatron.hf_checkpoint import export
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.build import engine_config
from mcore_rl.trainer.models import build_actor, micro_batching
from mcore_rl.verify import start_verification, stored_digests
from tests.dist.jobs import log_probs_of_random_tokens


def all_ways(flags: list[str], target: str, published: str) -> dict[str, Any]:
    """`mcore_rl.verify` of a folder, the way back into a checkpoint, and the engine on another
    folder that holds the same model."""
    setup_logging()
    with open("/dev/null", "w") as log:
        job = start_verification(flags, log=log)
        state, shards = build_actor(job, log=log)
    digests: list[dict[str, str]] = []

    def noted(engine: VLLMEngine) -> dict[str, str]:
        digests.append(stored_digests(engine))
        return digests[-1]

    with mock.patch.object(verify, "stored_digests", noted):
        verification = verify.compare_loads(job, state, shards)
    from_disk = digests[0]
    actor = Actor(job.args, job.config, state, job.train_layout, micro_batching(job))
    log_probs = log_probs_of_random_tokens(job, actor)
    # Several files and several writers, whatever the size of the model.
    export(shards, job.checkpoint, Path(target), max_file_bytes=1 << 17, bucket_bytes=1 << 14)

    as_published = replace(engine_config(job, load_format="auto"), model_dir=Path(published))
    engine = VLLMEngine(as_published)
    differing = [name for name, d in stored_digests(engine).items() if from_disk.get(name) != d]
    scores = [scored.tolist() for scored in engine.prompt_log_probs(verification.token_ids)]
    engine.close()
    result = {
        "verification": asdict(verification),
        "log_probs": log_probs.tolist(),
        "parameters": {
            name: list(value.shape)
            for chunk in actor.state.chunks
            for name, value in chunk.named_parameters()
        },
        "num_stored": len(from_disk),
        "published_stored_otherwise": differing,
        "published_log_probs": scores,
    }
    dist.destroy_process_group()
    return result
