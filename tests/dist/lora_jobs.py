"""What a rank does in `test_lora.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.megatron.lora import adapters_of
from tests.dist.jobs import first_mini_batch, rank_batch, started


def update(flags: list[str], target: str) -> dict[str, Any]:
    job, actor, shards = started(flags, in_float32=True)
    before = actor.log_probs(rank_batch(job))
    stats = actor.update(first_mini_batch(job))
    export(shards, job.spec.checkpoint, Path(target))
    found = {
        "num": sum(len(adapters_of(c).by_tensor) for c in actor.state.chunks if adapters_of(c)),
        "log_probs": float(before.sum()),
        "grad_norm": stats.result.grad_norm,
    }
    dist.destroy_process_group()
    return found
