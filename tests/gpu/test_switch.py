"""Training and an engine on one device: what goes away for the other, and comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.layouts import job_flags
from tests.gpu.machine import HAS_CUDA, anywhere, play, with_vllm

pytestmark = [*anywhere, pytest.mark.timeout(900)]

NUM_SWITCHES = 3
EVERYTHING = ("--rl-offload", "gradients,optimizer,parameters")


def bf16_flags(checkpoint: Path, *more: str) -> list[str]:
    flags = job_flags(checkpoint, "tp1_pp1_ep1", "--lr", "1e-2", *more)
    flags[flags.index("fp32")] = "bf16"
    return flags if HAS_CUDA else [*flags, "--rl-rollout-kv-cache-gib", "0.1"]


@with_vllm
@pytest.mark.parametrize("arch", ["deepseek_v3", "qwen3"])
def test_training_comes_back_bit_for_bit_and_nothing_grows(
    arch: str, checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    flags = bf16_flags(checkpoint_factory(arch, "small"), *EVERYTHING, "--rl-attest", "full")
    (found,) = play(
        "tests.gpu.jobs:switches",
        tmp_path,
        arguments={"flags": flags, "num_switches": NUM_SWITCHES},
    )
    assert found["kept"] == [True] * NUM_SWITCHES
    assert found["attested"] == [True] * NUM_SWITCHES
    assert found["finite"]
    assert min(found["moved_bytes"]) > 0
    if HAS_CUDA:
        assert all(
            saved > moved  # gradients are saved, too, and not moved
            for saved, moved in zip(found["saved_bytes"], found["moved_bytes"], strict=True)
        )
        in_training = [free for free, _ in found["free"]]
        assert max(in_training[1:]) - min(in_training[1:]) <= 8 << 20, found["free"]
        # The engine's share is taken in rollout and nowhere else.
        assert all(training > rollout for training, rollout in found["free"]), found["free"]


def test_the_reference_is_swapped_in_and_out_bit_for_bit(
    checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    flags = bf16_flags(checkpoint_factory("qwen3", "small"))
    (found,) = play("tests.gpu.jobs:reference_swaps", tmp_path, arguments={"flags": flags})
    assert found == {"learnt": True, "reference's": 0.0, "back": True, "actor's": 0.0}
