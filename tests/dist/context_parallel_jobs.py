"""What a rank does in `test_context_parallel.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.batching.rows import positions_on_cp_rank
from mcore_rl.patches.megatron.local_layers import SDPACoreAttention


def attention(lengths: list[int], *, packed: bool, groups: int, value_size: int) -> list[float]:
    """The largest differences of this rank's part to attention over whole samples: of what it
    returns, and of the gradients of query, key and value.

    `lengths` are of samples of one packed row, or else their sum is the length of two rows.
    """
    dist.init_process_group("gloo")
    cp_size, cp_rank = dist.get_world_size(), dist.get_rank()
    bounds = torch.tensor([0, *lengths] if packed else [0, sum(lengths)]).cumsum(0).int()
    own = positions_on_cp_rank(bounds, sum(lengths) // cp_size, cp_size=cp_size, cp_rank=cp_rank)
    generator = torch.Generator().manual_seed(7)
    rows = () if packed else (2,)
    heads = ((4, 16), (groups, 16), (groups, value_size))
    whole = [torch.randn(sum(lengths), *rows, *size, generator=generator) for size in heads]
    gradient = torch.randn(sum(lengths), *rows, 4 * value_size, generator=generator)

    expected = attend(1, whole, gradient, bounds if packed else None)
    found = attend(cp_size, [x[own] for x in whole], gradient[own], bounds if packed else None)
    dist.destroy_process_group()
    return [float((a - b[own]).abs().max()) for a, b in zip(found, expected, strict=True)]


def attend(
    cp_size: int,
    inputs: list[torch.Tensor],
    gradient: torch.Tensor,
    bounds: torch.Tensor | None,
) -> list[torch.Tensor]:
    """What the layer returns, and the gradients of its inputs."""
    config: Any = SimpleNamespace(context_parallel_size=cp_size, attention_dropout=0.0)
    groups = SimpleNamespace(cp=dist.group.WORLD)
    layer = SDPACoreAttention(config, 1, None, "self", pg_collection=groups)
    leaves = [x.clone().requires_grad_() for x in inputs]
    samples = None if bounds is None else SimpleNamespace(cu_seqlens_q=bounds)
    context = layer(*leaves, packed_seq_params=samples)
    context.backward(gradient)
    return [context.detach(), *(x.grad for x in leaves if x.grad is not None)]
