"""What a rank does in `test_dither.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.megatron import fsdp_buffers
from mcore_rl.megatron.dither import main_parameters
from tests.dist.jobs import started

UPDATE = 1e-5


def main_parameters_at_the_start(flags: list[str], target: str) -> None:
    """Save this rank's shares of the optimizer's copies, and the weights that they round to."""
    _, actor, _ = started(flags)
    shares: dict[str, dict[str, Any]] = {}
    for chunk in actor.state.chunks:
        fsdp = fsdp_buffers.wrapper_of(chunk)
        if fsdp is not None:
            found = fsdp_buffers.main_weights(fsdp)
            names = {p: name.removeprefix("module.") for name, p in fsdp.raw_param.items()}
        else:
            found = (
                each for optimizer in actor.state.optimizers for each in main_parameters(optimizer)
            )
            names = {p: name for name, p in chunk.named_parameters()}
        local = {weight.name: weight for weight in fsdp_buffers.local_weights(chunk)}
        for parameter, copies, first in found:
            weight = local[names[parameter]]
            values = weight.data.detach().flatten()
            start = first - weight.first_row * values.numel() // max(1, weight.data.shape[0])
            shares[weight.name] = {
                "first": first,
                "copies": copies.detach().flatten().clone(),
                "weights": values[start : start + copies.numel()].clone(),
            }
    torch.save(shares, f"{target}/{dist.get_rank()}.pt")
    dist.destroy_process_group()


def reads_of_float32_weights(flags: list[str]) -> dict[str, Any]:
    """Move all weights by little. Return the share of it that arrives in what is read in bfloat16,
    of all matrices, and the matrices of which a slice is read otherwise than with the rest."""
    _, _, shards = started(flags)
    before = {
        name: [shards.read(name, box) for box in shards.boxes(name)] for name in _matrices(shards)
    }
    generator = torch.Generator().manual_seed(1)
    moved = torch.zeros((), dtype=torch.float64)
    wanted, unlike = moved.clone(), []
    for name, values in before.items():
        for box, was in zip(shards.boxes(name), values, strict=True):
            change = UPDATE * torch.randn(was.shape, generator=generator)
            shards.write(name, box, was.float() + change)
            now = shards.read(name, box)
            moved += ((now.float() - was.float()) * change).sum()
            wanted += change.square().sum()
            rows, columns = box
            some = ((rows[0] + 1, rows[1]), (columns[0], columns[1] - 3))
            at = (slice(None, None, 2), slice(1, None))
            if not torch.equal(shards.read(name, some), now[1:, :-3]):
                unlike.append(name)
            if not torch.equal(shards.read(name, box, at), now[at]):
                unlike.append(name)
    dist.destroy_process_group()
    return {"arrived": float(moved / wanted), "unlike": unlike, "num": len(before)}


def _matrices(shards: Any) -> list[str]:
    return [
        name for name in shards.tensors() if len(shards.boxes(name)[0]) == 2 and "norm" not in name
    ]
