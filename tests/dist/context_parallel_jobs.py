"""What a rank does in `test_context_parallel.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.batching.rows import positions_on_cp_rank
from mcore_rl.patches.megatron.local_layers import SDPACoreAttention


def attention(
    lengths: list[int], *, packed: bool, groups: int, value_size: int, window: int | None = None
) -> list[float]:
    """The largest differences of this rank's part to attention over whole samples: of what it
    returns, and of the gradients of query, key and value; with a `window` also of sinks.

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

    samples = bounds if packed else None
    expected, of_sinks = attend(1, whole, gradient, samples, window)
    found, my_sinks = attend(cp_size, [x[own] for x in whole], gradient[own], samples, window)
    differences = [float((a - b[own]).abs().max()) for a, b in zip(found, expected, strict=True)]
    if of_sinks is not None and my_sinks is not None:
        dist.all_reduce(my_sinks)
        differences.append(float((my_sinks - of_sinks).abs().max()))
    dist.destroy_process_group()
    return differences


def attend(
    cp_size: int,
    inputs: list[torch.Tensor],
    gradient: torch.Tensor,
    bounds: torch.Tensor | None,
    window: int | None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """What the layer returns, and the gradients of its inputs; that of its sinks."""
    config: Any = SimpleNamespace(
        context_parallel_size=cp_size,
        attention_dropout=0.0,
        window_size=window and (window - 1, 0),
        window_attn_skip_freq=None,
        softmax_type="learnable" if window else "vanilla",
        num_attention_heads=4,
        params_dtype=torch.float32,
        perform_initialization=False,
    )
    groups = SimpleNamespace(cp=dist.group.WORLD, tp=SimpleNamespace(size=lambda: 1))
    layer = SDPACoreAttention(config, 1, None, "self", pg_collection=groups)
    if layer.softmax_offset is not None:
        layer.softmax_offset.data.copy_(torch.tensor([0.5, -1.0, 2.0, 1.0]))
    leaves = [x.clone().requires_grad_() for x in inputs]
    samples = None if bounds is None else SimpleNamespace(cu_seqlens_q=bounds)
    context = layer(*leaves, packed_seq_params=samples)
    context.backward(gradient)
    sinks = None if layer.softmax_offset is None else layer.softmax_offset.grad
    return [context.detach(), *(x.grad for x in leaves if x.grad is not None)], sinks
