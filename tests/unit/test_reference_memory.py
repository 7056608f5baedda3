"""A swap of the reference policy allocates at most one bucket, and nothing on the host.

tests/gpu measures the device memory of whole updates and the overlap of copies with computation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.hybrid_engine.memory.host_memory import HostCopy
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.trainer.roles.reference import ReferencePolicy
from tests.live_bytes import LiveBytes

WIDTHS = (10, 300, 200, 250, 50)
COPIES_AT_A_TIME = 1


@pytest.fixture
def chunk() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.ModuleList(torch.nn.Linear(100, width, bias=False) for width in WIDTHS)


@pytest.fixture
def reference(chunk: torch.nn.Module) -> ReferencePolicy:
    return ReferencePolicy(megatron_adapter.TrainState([chunk], None, None, 0))


def test_live_bytes_are_counted_until_the_last_view_is_freed():
    tensor = torch.ones(1000)
    with LiveBytes() as live:
        copy = tensor.clone()
        assert live.live_bytes == 4000
        tensor.add_(copy)  # in place, in a tensor from before
        assert live.peak_bytes == 4000
        view = (copy + 1).view(10, 100)[3]
        assert live.live_bytes == live.peak_bytes == 8000
        del copy
        assert live.live_bytes == 4000
        del view
        assert live.live_bytes == 0
    assert live.peak_bytes == 8000


def test_swap_exchanges_parameters_one_by_one(chunk, reference):
    sizes = [parameter.nbytes for parameter in chunk.parameters()]
    initial = [parameter.detach().clone() for parameter in chunk.parameters()]
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.add_(1.0)
    with LiveBytes() as live:
        reference.swap()
    assert live.live_bytes == 0
    assert 0 < live.peak_bytes <= COPIES_AT_A_TIME * max(sizes) < sum(sizes)
    for parameter, before in zip(chunk.parameters(), initial, strict=True):
        assert torch.equal(parameter, before)
    reference.swap()
    for parameter, before in zip(chunk.parameters(), initial, strict=True):
        assert torch.equal(parameter, before + 1.0)


def test_scoring_by_the_reference_adds_only_the_copies_of_a_swap(chunk, reference):
    inputs = torch.ones(7, 100)

    def peak(*, with_reference: bool) -> tuple[int, int]:
        with LiveBytes() as live, torch.no_grad():
            if with_reference:
                reference.swap()
            for layer in chunk:
                layer(inputs)
            if with_reference:
                reference.swap()
        return live.peak_bytes, live.live_bytes

    largest = max(parameter.nbytes for parameter in chunk.parameters())
    alone, _ = peak(with_reference=False)
    both, left = peak(with_reference=True)
    assert left == 0
    assert both <= max(alone, COPIES_AT_A_TIME * largest)


class Copies(TorchDispatchMode):
    """Records every copy, and whether the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::copy_", "aten::_to_copy"):
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            self.blocking.append(not {**given, **(kwargs or {})}.get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_copies_of_swap_and_refresh_do_not_block_the_host(reference):
    with Copies() as copies:
        reference.swap()
        reference.refresh(1)
    assert copies.blocking == [False] * (3 + 1) * len(WIDTHS)


def test_values_are_exchanged_bit_for_bit_across_chunks_and_buckets():
    """Host memory in chunks, and a bucket smaller than most tensors."""
    generator = torch.Generator().manual_seed(1)

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    tensors = [
        bits(4099),
        bits(600).view(torch.bfloat16).view(3, 100),  # with nans of any payload
        bits(8).view(torch.float64)[0],
        torch.empty(0, 7),
        bits(2048).view(torch.float32).view(2, 8, 32)[1],  # a part of a larger storage
        bits(1000),
    ]

    def all_bits() -> list[torch.Tensor]:
        return [t.reshape(-1).view(torch.uint8).clone() for t in tensors]

    first = all_bits()
    copy = HostCopy(tensors, chunk_bytes=512, bucket_bytes=300)
    assert copy.host_bytes == sum(tensor.nbytes for tensor in tensors)
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8).bitwise_not_()
    second = all_bits()
    assert not torch.equal(first[0], second[0])
    for expected in (first, second, first):
        with LiveBytes() as live:
            copy.exchange()
        assert live.peak_bytes == 300
        assert all(map(torch.equal, all_bits(), expected))
    with LiveBytes() as live:
        copy.take()
    assert live.peak_bytes == 0
    copy.exchange()
    assert all(map(torch.equal, all_bits(), first))


def test_weight_with_gaps_is_refused():
    with pytest.raises(RuntimeError, match=r"shape \(4, 3\) has strides \(1, 4\)"):
        HostCopy([torch.zeros(3, 4).t()])
