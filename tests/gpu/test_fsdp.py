"""Megatron-FSDP on two CUDA devices: NCCL's sums, Transformer Engine's layers and Adam.

What does not depend on them is in tests/dist/test_fsdp.py, over gloo. Here, too, the ranks play the
jobs of `tests.dist.fsdp_jobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.checkpoints import tensors_of
from tests.dist.layouts import job_flags
from tests.gpu.machine import play

NUM_RANKS = 2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < NUM_RANKS, reason=f"needs {NUM_RANKS} CUDA devices"
    ),
]

FSDP = tuple(
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion".split()
)


def run(function: str, flags: list[str], target: Path) -> list[Any]:
    """What each rank's call of `function(flags, target)` returned."""
    return play(
        f"tests.dist.fsdp_jobs:{function}",
        target,
        num_ranks=NUM_RANKS,
        flags=flags,
        target=target,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    )


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads", "optim"])
def test_updates_are_those_of_plain_data_parallelism(
    strategy: str, checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    results, weights = [], []
    for name, more in (
        ("plain", ()),
        ("fsdp", (*FSDP, "--data-parallel-sharding-strategy", strategy)),
    ):
        target = tmp_path / name
        target.mkdir()
        flags = job_flags(
            checkpoint_factory("deepseek_v3"),
            "tp1_pp1_ep1",
            *("--adam-eps", "1.0", "--lr", "0.1", *more),
            precision="bf16",
        )
        results.append(run("learn", flags, target))
        weights.append([tensors_of(target / when) for when in ("before", "after")])
    for plain, sharded in zip(*results, strict=True):
        for expected, update in zip(plain["updates"], sharded["updates"], strict=True):
            # Of bfloat16's gradients, added up in another order.
            assert update["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-2)
    (before, after), (unchanged, updated) = weights
    for tensor, value in before.items():
        assert torch.equal(unchanged[tensor], value), tensor
        # Two steps of bfloat16 at the largest weights.
        assert torch.allclose(updated[tensor], after[tensor], rtol=2**-6, atol=1e-3), tensor


def test_resume_from_a_checkpoint_is_bitwise(
    checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    flags = job_flags(checkpoint_factory("deepseek_v3"), "tp1_pp1_ep1", *FSDP, precision="bf16")
    assert run("save_and_continue", flags, tmp_path) == ["iter_0000001"] * NUM_RANKS
    assert run("load_and_continue", flags, tmp_path) == [1] * NUM_RANKS
    continued, resumed = tensors_of(tmp_path / "continued"), tensors_of(tmp_path / "resumed")
    assert all(torch.equal(resumed[tensor], value) for tensor, value in continued.items())
