"""What a rank does in `test_sparse_attention.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from tests.dist.delta_net_jobs import Rows
from tests.dist.jobs import started


def samples_that_differ(flags: list[str], lengths: list[int]) -> dict[str, list[int]]:
    """Which samples of a packed row differ in any bit: of the attention of all layers, or of its
    input's gradients. "padded": from the same samples in padded rows. "others": if each second
    sample of the row is another one, from the remaining samples before that."""
    _, actor, _ = started(flags)
    layers = [  # a HybridModel has others in between
        layer
        for layer in actor.state.chunks[0].decoder.layers
        if hasattr(layer.self_attention, "pg_collection")
    ]
    torch.manual_seed(3)
    width = layers[0].config.hidden_size
    inputs, others, of_outputs = (
        [torch.randn(1, size, width) for size in lengths] for _ in range(3)
    )
    row = Rows(lengths, packed=True, groups=layers[0].self_attention.pg_collection)

    def packed(samples: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        found = _computed(layers, row.share(samples), row.share(of_outputs), row.samples)
        return [list(x[:, 0].split(lengths)) for x in found]

    in_rows = _computed(layers, _padded(inputs), _padded(of_outputs), None)
    padded = [[x[:size, i] for i, size in enumerate(lengths)] for x in in_rows]
    expected = packed(inputs)
    found = {"padded": _different(padded, expected), "others": list[int]()}
    for kept in (0, 1):
        mixed = [(inputs if i % 2 == kept else others)[i] for i in range(len(lengths))]
        different = _different(packed(mixed), expected)
        changed = [i for i in range(len(lengths)) if i % 2 != kept]
        assert set(changed) <= set(different), "another sample has the same attention"
        found["others"] += [i for i in different if i not in changed]
    dist.destroy_process_group()
    return found


def _different(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> list[int]:
    pairs = [list(zip(*of_layer, strict=True)) for of_layer in zip(found, expected, strict=True)]
    return [
        sample
        for sample, of_layers in enumerate(zip(*pairs, strict=True))
        if not all(torch.equal(*pair) for pair in of_layers)
    ]


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
