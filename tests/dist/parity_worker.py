"""Run by torchrun: load a checkpoint into Megatron, print log-probs, export it again.

    torchrun ... parity_worker.py OUT.json EXPORT_DIR <flags of mcore_rl.train>
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_rl import megatron_adapter
from mcore_rl.actor import Actor
from mcore_rl.checkpoint import export
from mcore_rl.startup import build_actor, start
from mcore_rl.types import TrainBatch


def token_ids(vocab_size: int) -> torch.Tensor:
    """The same prompts in every layout: `[4, 32]`."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, vocab_size, (4, 32), generator=generator)


def batch_of(tokens: torch.Tensor) -> TrainBatch:
    return TrainBatch(
        token_ids=tokens,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        rollout_log_probs=torch.zeros(tokens.shape),
        advantages=torch.zeros(tokens.shape[0]),
    )


def main() -> None:
    out, export_dir, *flags = sys.argv[1:]
    with open(f"{out}.rank{0}.log" if False else "/dev/null", "w") as log:
        job = start(flags, log=log)
        state, shards = build_actor(job, log=log)
    actor = Actor(job.args, job.config, state, job.train_layout)
    tokens = token_ids(job.shape.vocab_size)
    dp_rank, dp_size = job.train_layout.dp_rank(dist.get_rank()), job.train_layout.dp_size
    log_probs = actor.log_probs(batch_of(tokens[dp_rank::dp_size]))
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (dp_rank, log_probs))
    if dist.get_rank() == 0:
        whole = torch.empty(tokens.shape)
        for rank, part in parts:
            whole[rank::dp_size] = part
        Path(out).write_text(json.dumps({"log_probs": whole.tolist()}))
    export(shards, job.checkpoint, Path(export_dir), max_file_bytes=1 << 20)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
