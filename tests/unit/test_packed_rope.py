"""The rotation of packed samples: upstream's numbers with fewer operations.

The oracle is a second, unpatched copy of upstream's module.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mcore_rl.megatron import adapter  # noqa: F401  (applies the patch)

from megatron.core.models.common.embeddings import rope_utils  # isort: skip


@pytest.fixture(scope="module")
def upstream() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"{rope_utils.__name__}_copy", rope_utils.__file__
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rotated(
    rotate: Callable[..., torch.Tensor], cp_size: int, cp_rank: int, interleaved: bool, mla: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The rotated samples, the gradient of the input and the number of nodes of autograd."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([3, 1, 7, 5], dtype=torch.int32)
    if cp_size > 1:
        lengths *= 2 * cp_size
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    num_tokens = int(bounds[-1]) // cp_size
    x = torch.randn(num_tokens, 2, 8, generator=generator, requires_grad=True)
    freqs = torch.randn(int(lengths.max()), 1, 1, 8, generator=generator)
    group = SimpleNamespace(size=lambda: cp_size, rank=lambda: cp_rank)
    options = {"rotary_interleaved": interleaved, "mla_rotary_interleaved": mla}
    out = rotate(x, bounds, freqs, **options, mscale=1.5, cp_group=group)
    out.backward(torch.randn(out.shape, generator=generator))
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    assert x.grad is not None
    return out.detach(), x.grad, len(seen)


@pytest.mark.parametrize("place", [(1, 0), (2, 0), (2, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("kind", [(False, False), (True, False), (False, True)], ids=str)
def test_packed_rotation_equals_upstream_with_fewer_operations(
    place: tuple[int, int], kind: tuple[bool, bool], upstream: ModuleType
) -> None:
    patched = rope_utils._apply_rotary_pos_emb_thd
    assert patched.__module__ != upstream._apply_rotary_pos_emb_thd.__module__
    expected, expected_gradient, most_nodes = rotated(
        upstream._apply_rotary_pos_emb_thd, *place, *kind
    )
    out, gradient, nodes = rotated(patched, *place, *kind)
    assert torch.equal(out, expected) and torch.equal(gradient, expected_gradient)
    assert nodes < most_nodes / 2
