"""The wire on a device: NCCL between as many devices as there are, up to four, one among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.machine import HAS_CUDA, anywhere, not_on_cpu, play

pytestmark = anywhere

NUM_PLANS = 4


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=not_on_cpu), 2, pytest.param(4, marks=not_on_cpu)]
)
def test_bytes_travel_on_the_device_and_objects_beside_it(num_ranks: int, tmp_path: Path) -> None:
    num_devices = torch.cuda.device_count()
    if HAS_CUDA and num_devices < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices, and there are {num_devices}")
    for found in play(
        "tests.gpu.jobs:transfers_and_objects", tmp_path, num_ranks=num_ranks, num_plans=NUM_PLANS
    ):
        assert found == {"num_plans": NUM_PLANS, "ranks": list(range(num_ranks)), "taken": 0}
