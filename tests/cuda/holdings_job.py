"""What every rank of a preset holds of the checkpoint, by Megatron's model for CUDA.

    python -m tests.cuda.holdings_job CONFIG WORLD_SIZE FILE [all] -- FLAG ...

Writes a pickle to FILE: for each rank, checkpoint tensor -> boxes, as the hand-over has them. Two
ranks of each pipeline stage are built, the first and the last, or with `all` every one. The others
of a stage differ from them in their TP, DP and EP coordinates alone, on which neither names nor
shapes of parameters depend (what is built is compared, and so are its coordinates with those that
Megatron's groups say); where a parameter lies in the checkpoint is worked out from the coordinates
of each rank by the product's `ModelShards`.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

from tests.cuda import megatron_models

PLATFORM = megatron_models.prepare(transformer_engine=True)

import torch  # noqa: E402

from mcore_rl.megatron.shards import ModelShards  # noqa: E402
from mcore_rl.model.boxes import Box  # noqa: E402
from tests.cuda.presets import tensor_infos, trainable_shape  # noqa: E402


def main() -> None:
    separator = sys.argv.index("--")
    config, world_size, file, *options = sys.argv[1:separator]
    shape = trainable_shape(config)
    job = megatron_models.parsed(
        sys.argv[separator + 1 :], shape, PLATFORM, world_size=int(world_size)
    )
    layout, infos = job.layout, tensor_infos(shape)
    held: dict[int, dict[str, tuple[Box, ...]]] = {}
    unlike = []
    for stage in range(layout.pp_size):
        ranks = [rank for rank in range(layout.world_size) if layout.pp_rank(rank) == stage]
        names_of_stage = None
        for rank in ranks if "all" in options else (ranks[0], ranks[-1]):
            with megatron_models.as_rank(job, rank):
                model = megatron_models.build(job)
                placed = place_by_megatron()
            if placed != (layout.tp_rank(rank), stage, layout.ep_rank(rank), layout.etp_rank(rank)):
                unlike.append(rank)
            names = {name: tuple(weight.shape) for name, weight in model.state_dict().items()
                     if isinstance(weight, torch.Tensor)}  # fmt: skip
            names_of_stage = names_of_stage or names
            if names != names_of_stage:
                unlike.append(rank)
        for rank in ranks:
            shards = ModelShards([model], shape, layout, rank, infos)
            held[rank] = {tensor: shards.boxes(tensor) for tensor in shards.tensors()}
    Path(file).write_bytes(pickle.dumps([held[rank] for rank in range(layout.world_size)]))
    print(json.dumps({"unlike": unlike}))


def place_by_megatron() -> tuple[int, int, int, int]:
    """(TP rank, stage, EP rank, expert-TP rank) of this process, by Megatron's groups."""
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )


if __name__ == "__main__":
    main()
