"""A reference policy lies on the host: whole updates take as much device memory as without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.machine import HAS_CUDA, anywhere, bf16_flags, play

pytestmark = anywhere

LARGEST_DIFFERENCE = 0.02


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device: the host has the reference anyway")
@pytest.mark.parametrize("arch", ["deepseek_v3", "qwen3"])
def test_peak_of_an_update_is_the_same_with_a_reference(
    arch: str, checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    # Larger than the caching allocator's blocks of 2 MiB, so that weights would show.
    flags = bf16_flags(checkpoint_factory(arch, size="small"))
    (found,) = play("tests.dist.memory_jobs:update_peaks", tmp_path, flags=flags)
    assert found["without"] > 0
    difference = abs(found["with"] - found["without"]) / found["without"]
    print(f"{arch}: {found}, {difference:.2%}")
    assert difference < LARGEST_DIFFERENCE


def test_the_reference_is_swapped_in_and_out_bit_for_bit(
    checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    flags = bf16_flags(checkpoint_factory("qwen3", "small"))
    (found,) = play("tests.gpu.jobs:reference_swaps", tmp_path, flags=flags)
    assert found == {"learned": True, "reference's": 0.0, "back": True, "actor's": 0.0}
