"""What a rank does in `test_sparse_attention.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from tests.dist.delta_net_jobs import Rows, difference
from tests.dist.jobs import started


def packed_against_padded(flags: list[str], lengths: list[int]) -> list[float]:
    """For each sample of a packed row the largest difference to the same sample in padded rows,
    relative to the largest number: of the attention of all layers, and of its input's gradients."""
    _, actor, _ = started(flags)
    layers = [  # a HybridModel has others in between
        layer
        for layer in actor.state.chunks[0].decoder.layers
        if hasattr(layer.self_attention, "pg_collection")
    ]
    torch.manual_seed(3)
    width = layers[0].config.hidden_size
    inputs, of_outputs = ([torch.randn(1, size, width) for size in lengths] for _ in range(2))
    row = Rows(lengths, packed=True, groups=layers[0].self_attention.pg_collection)
    packed = _computed(layers, row.share(inputs), row.share(of_outputs), row.samples)
    padded = _computed(layers, _padded(inputs), _padded(of_outputs), None)
    largest = [0.0] * len(lengths)
    for in_row, in_rows in zip(packed, padded, strict=True):
        pairs = zip(in_row[:, 0].split(lengths), in_rows.unbind(1), lengths, strict=True)
        for sample, (found, expected, size) in enumerate(pairs):
            largest[sample] = max(largest[sample], difference(found, expected[:size]))
    dist.destroy_process_group()
    return largest


def _padded(samples: list[torch.Tensor]) -> torch.Tensor:
    """Rows `[s, b, h]`; no gradient comes from what fills them up."""
    return pad_sequence([sample[0] for sample in samples])


def _computed(
    layers: Any, inputs: torch.Tensor, of_outputs: torch.Tensor, samples: Any
) -> list[torch.Tensor]:
    """Each layer's output and the gradient of its input; later ones share choices of keys."""
    found = []
    for layer in layers:
        mine = inputs.clone().requires_grad_()
        out, _ = layer.self_attention(mine, None, packed_seq_params=samples)
        out.backward(of_outputs)
        assert mine.grad is not None
        found += [out.detach(), mine.grad]
    return found
