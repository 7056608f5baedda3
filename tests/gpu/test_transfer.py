"""The wire: NCCL between as many devices as there are, or between ranks that share one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.machine import HAS_CUDA, anywhere, not_on_cpu, play, play_apart
from tests.rank_pool import free_port

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


def test_ranks_that_lose_a_worker_go_on_in_a_world_without_it(tmp_path: Path) -> None:
    *trainers, worker, lost = play_apart(
        "tests.gpu.jobs:lost_worker", tmp_path / "ranks", num_ranks=4, port=free_port()
    )
    assert lost is None
    assert [len(found["told"]) for found in (*trainers, worker)] == [1, 1, 1]
    assert worker["right"] == [1, 3]
