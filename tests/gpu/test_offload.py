"""The offloader and the generators on a device: memory really goes, and the bits come back."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from mcore_rl.hybrid_engine.memory.host_memory import HostCopy
from mcore_rl.hybrid_engine.memory.offload import Offloader
from mcore_rl.megatron.rng import RngState
from tests.gpu.machine import DEVICE, HAS_CUDA, anywhere

pytestmark = anywhere
only_cuda = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")

MIB = 1 << 20
ALL = frozenset({"parameters", "optimizer", "gradients"})


def tensors_on_device() -> dict[str, list[tuple[str, torch.Tensor]]]:
    generator = torch.Generator(DEVICE).manual_seed(1)

    def random(num_bytes: int) -> torch.Tensor:
        return torch.randint(
            0, 256, (num_bytes,), dtype=torch.uint8, device=DEVICE, generator=generator
        )

    buffer = random(64 * MIB)
    return {
        "parameters": [("a", buffer[: 20 * MIB]), ("b", buffer[20 * MIB :])],
        "optimizer": [
            ("main", random(96 * MIB + 12)),
            ("moment", random(96 * MIB)),
            ("step", torch.tensor(3.0)),  # on the host, as PyTorch's Adam has it
        ],
        "gradients": [("grads", random(64 * MIB))],
    }


def in_use() -> tuple[int, int]:
    """Bytes that PyTorch has given out, and that the driver has free; 0 without CUDA."""
    if not HAS_CUDA:
        return 0, 0
    return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]


def offloader(tensors: dict[str, list[tuple[str, torch.Tensor]]], **options: Any) -> Offloader:
    device = torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else DEVICE
    return Offloader(lambda: tensors, ALL, device=device, chunk_bytes=32 * MIB, **options)


@pytest.mark.parametrize("pin", [True, False])
def test_device_memory_goes_to_the_driver_and_bits_come_back(pin: bool) -> None:
    tensors = tensors_on_device()
    expected = {name: t.cpu().clone() for kind in tensors.values() for name, t in kind}
    there_and_back = offloader(tensors, pin=pin)
    there_and_back.offload()  # CUDA loads what it needs for it, which stays
    there_and_back.onload()
    allocated, free = in_use()
    for _ in range(2):
        there_and_back.offload("gradients", "optimizer")
        there_and_back.offload("parameters")
        stats = there_and_back.stats
        assert stats.dropped_bytes == 64 * MIB
        # On the host the optimizer's step goes along.
        assert 0 <= stats.moved_bytes - ((64 + 2 * 96) * MIB + 12) <= (0 if HAS_CUDA else 4)
        if HAS_CUDA:
            assert stats.saved_bytes == stats.moved_bytes + stats.dropped_bytes
            assert in_use()[0] <= allocated - stats.saved_bytes
            assert in_use()[1] >= free + stats.saved_bytes - 4 * MIB  # in whole pages
        # What lies in the freed memory meanwhile must not matter.
        torch.full((256 * MIB,), 255, dtype=torch.uint8, device=DEVICE)
        there_and_back.onload()
        for kind, found in tensors.items():
            for name, tensor in found:
                if kind == "gradients":
                    assert not tensor.any()
                else:
                    assert torch.equal(tensor.cpu(), expected[name]), name
    assert in_use()[0] == allocated


@only_cuda
def test_prefetch_runs_beside_the_engine_and_takes_what_fits() -> None:
    tensors = tensors_on_device()
    moment = tensors["optimizer"][1][1].cpu()
    there_and_back = offloader(tensors)
    there_and_back.offload()
    free = torch.cuda.mem_get_info()
    with mock.patch("torch.cuda.mem_get_info", lambda *a: (200 * MIB, free[1])):
        first = there_and_back.prefetch(reserve_bytes=20 * MIB)
    assert first == (64 + 96) * MIB + 12  # the parameters and one of the optimizer's two
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 4096  # the engine's kernels, on the stream it uses
    assert there_and_back.prefetch(reserve_bytes=0) == 96 * MIB
    there_and_back.onload()
    assert torch.equal(tensors["optimizer"][1][1].cpu(), moment)


@only_cuda
def test_host_memory_is_page_locked_and_kept() -> None:
    there_and_back = offloader(tensors_on_device())
    there_and_back.offload()
    held = there_and_back.host_bytes
    # Chunks are powers of two: at most one that is not full for each kind.
    assert there_and_back.stats.moved_bytes <= held
    assert held <= there_and_back.stats.moved_bytes + 2 * 32 * MIB
    there_and_back.onload()
    assert there_and_back.host_bytes == held
    there_and_back.offload()
    assert there_and_back.host_bytes == held
    there_and_back.onload()


@only_cuda
def test_values_kept_on_the_host_are_exchanged_beside_the_callers_stream() -> None:
    weights = [t for _, t in tensors_on_device()["optimizer"][:2]]
    first = [weight.cpu() for weight in weights]
    copy = HostCopy(weights, chunk_bytes=32 * MIB, bucket_bytes=8 * MIB)
    assert all(chunk.is_pinned() for chunk in copy._host._chunks)
    held = copy.host_bytes
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 4096
    for weight in weights:
        weight.bitwise_not_()  # waits behind that, and the exchange for it
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for expected in (first, [~value for value in first], first):
        copy.exchange()
        for weight, value in zip(weights, expected, strict=True):
            assert torch.equal(weight.cpu(), value)
    assert torch.cuda.max_memory_allocated() - before <= 8 * MIB
    assert copy.host_bytes == held


@only_cuda
def test_everything_is_away_while_an_engine_starts() -> None:
    """Also what no flag names, through memory that is not page-locked."""
    tensors = tensors_on_device()
    expected = [tensor.cpu() for _, tensor in tensors["parameters"] + tensors["optimizer"]]
    there_and_back = Offloader(
        lambda: tensors, frozenset(), device=torch.device("cuda", torch.cuda.current_device())
    )
    before = torch.cuda.mem_get_info()[0]
    with there_and_back.all_offloaded():
        assert torch.cuda.mem_get_info()[0] >= before + (2 * 64 + 2 * 96 - 4) * MIB
    found = [tensor.cpu() for _, tensor in tensors["parameters"] + tensors["optimizer"]]
    assert all(map(torch.equal, found, expected))
    assert there_and_back.host_bytes == 0


def test_generators_of_all_devices_are_restored() -> None:
    before = RngState.capture()
    assert len(before.devices) == torch.cuda.device_count()

    def draw() -> list[list[float]]:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return [torch.rand(4, device=device).tolist() for device in ("cpu", *devices)]

    first = draw()
    assert draw() != first
    before.restore()
    assert draw() == first
