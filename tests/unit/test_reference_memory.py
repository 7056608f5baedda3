"""The reference policy costs a swap no more than a copy of a parameter at a time.

How device memory of whole updates compares with and without one is tests/gpu's part.
"""

from __future__ import annotations

import pytest
import torch

from mcore_rl import megatron_adapter
from mcore_rl.actor import ReferencePolicy
from tests.live_bytes import LiveBytes

WIDTHS = (10, 300, 200, 250, 50)
COPIES_AT_A_TIME = 1


@pytest.fixture
def chunk() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.ModuleList(torch.nn.Linear(100, width, bias=False) for width in WIDTHS)


def test_live_bytes_are_counted_until_the_last_view_is_gone() -> None:
    tensor = torch.ones(1000)
    with LiveBytes() as live:
        copy = tensor.clone()
        assert live.live_bytes == 4000
        tensor.add_(copy)  # in place, and of before
        assert live.peak_bytes == 4000
        view = (copy + 1).view(10, 100)[3]
        assert live.live_bytes == live.peak_bytes == 8000
        del copy
        assert live.live_bytes == 4000
        del view
        assert live.live_bytes == 0
    assert live.peak_bytes == 8000


def test_swap_copies_parameter_by_parameter(chunk: torch.nn.Module) -> None:
    reference = ReferencePolicy(megatron_adapter.TrainState([chunk], None, None, 0))
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


def test_scoring_by_the_reference_leaves_nothing_behind(chunk: torch.nn.Module) -> None:
    """A forward pass takes what it takes without a reference, and a swap's copies."""
    reference = ReferencePolicy(megatron_adapter.TrainState([chunk], None, None, 0))
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
