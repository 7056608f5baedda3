"""Training and an engine on one device: what goes away for the other, and comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.machine import HAS_CUDA, anywhere, bf16_flags, not_on_cpu, play, with_vllm

pytestmark = [*anywhere, with_vllm, pytest.mark.timeout(900)]

NUM_SWITCHES = 3
EVERYTHING = ("--rl-offload", "gradients,optimizer,parameters")


@pytest.mark.parametrize("arch", ["deepseek_v3", pytest.param("qwen3", marks=not_on_cpu)])
def test_training_comes_back_bit_for_bit_and_nothing_grows(
    arch: str, checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    flags = bf16_flags(checkpoint_factory(arch, "small"), *EVERYTHING, "--rl-attest", "full")
    (found,) = play("tests.gpu.jobs:switches", tmp_path, flags=flags, num_switches=NUM_SWITCHES)
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
