"""The rotation of packed samples: upstream's numbers with fewer operations.

It runs in a separate process, because a patch stays applied.
"""

from __future__ import annotations

import subprocess
import sys

SAME_AS_UPSTREAM = """
from mcore_rl.patches.megatron import cpu_torch, dataset_helpers, typing_override
from mcore_rl.patches.registry import apply_all
apply_all((typing_override.PATCH, cpu_torch.PATCH, dataset_helpers.PATCH))
import torch
from megatron.core.models.common.embeddings import rope_utils
from mcore_rl.patches.megatron import packed_rope


class Group:
    def __init__(self, size, rank):
        self.size, self.rank = lambda: size, lambda: rank


def rotated(cp_size, cp_rank, interleaved, mla):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([3, 1, 7, 5], dtype=torch.int32)
    if cp_size > 1:
        lengths *= 2 * cp_size
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    num_tokens = int(bounds[-1]) // cp_size
    x = torch.randn(num_tokens, 2, 8, generator=generator, requires_grad=True)
    freqs = torch.randn(int(lengths.max()), 1, 1, 8, generator=generator)
    out = rope_utils._apply_rotary_pos_emb_thd(
        x, bounds, freqs, rotary_interleaved=interleaved, mla_rotary_interleaved=mla,
        mscale=1.5, cp_group=Group(cp_size, cp_rank),
    )
    out.backward(torch.randn(out.shape, generator=generator))
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return out.detach(), x.grad, len(seen)


cases = [
    (*place, *kind)
    for place in ((1, 0), (2, 0), (2, 1), (3, 1))
    for kind in ((False, False), (True, False), (False, True))
]
upstream = [rotated(*case) for case in cases]
packed_rope.apply()
for case, (out, gradient, nodes) in zip(cases, upstream, strict=True):
    ours, ours_gradient, ours_nodes = rotated(*case)
    assert torch.equal(ours, out), case
    assert torch.equal(ours_gradient, gradient), case
    assert ours_nodes < nodes / 2, (ours_nodes, nodes)
"""


def test_packed_rotation_equals_upstream_with_fewer_operations() -> None:
    process = subprocess.run(
        [sys.executable, "-c", SAME_AS_UPSTREAM], capture_output=True, text=True, timeout=500
    )
    assert process.returncode == 0, process.stderr[-3000:]
