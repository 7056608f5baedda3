"""A reference policy lies on the host: whole updates take as much device memory as without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.layouts import job_flags
from tests.gpu.machine import cuda, play

pytestmark = cuda

LARGEST_DIFFERENCE = 0.02


@pytest.mark.parametrize("arch", ["deepseek_v3", "qwen3"])
def test_peak_of_an_update_is_the_same_with_a_reference(
    arch: str, checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    # Larger than the caching allocator's blocks of 2 MiB, so that weights would show.
    flags = job_flags(checkpoint_factory(arch, size="small"), "tp1_pp1_ep1")
    flags[flags.index("fp32")] = "bf16"
    (found,) = play("tests.dist.memory_jobs:update_peaks", tmp_path, arguments={"flags": flags})
    assert found["without"] > 0
    difference = abs(found["with"] - found["without"]) / found["without"]
    print(f"{arch}: {found}, {difference:.2%}")
    assert difference < LARGEST_DIFFERENCE
