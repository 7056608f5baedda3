"""The wire on a device: NCCL between as many devices as there are, up to four, one among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.machine import HAS_CUDA, anywhere, play

pytestmark = anywhere

WORLDS = [1, 2, 4]


def here(num_ranks: int) -> int:
    if HAS_CUDA and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices, and there are {torch.cuda.device_count()}")
    return num_ranks


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_every_byte_arrives_on_the_device(num_ranks: int, tmp_path: Path) -> None:
    num_plans = 4
    results = play(
        "tests.gpu.jobs:transfers",
        tmp_path,
        num_ranks=here(num_ranks),
        arguments={"num_plans": num_plans},
    )
    assert results == [num_plans] * num_ranks


@pytest.mark.parametrize("num_ranks", WORLDS[:2])
def test_objects_travel_beside_nccl_without_device_memory(num_ranks: int, tmp_path: Path) -> None:
    for found in play("tests.gpu.jobs:objects", tmp_path, num_ranks=here(num_ranks)):
        assert found == {"ranks": list(range(num_ranks)), "taken": 0}
