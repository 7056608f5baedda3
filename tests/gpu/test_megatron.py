"""Megatron's side alone, for which vLLM need not be there: log-probs, and a checkpoint there and
back through the transfer that exports it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.checkpoints import assert_log_probs_equal_transformers, differing
from tests.dist.layouts import job_flags
from tests.gpu.machine import HAS_CUDA, anywhere, not_on_cpu, play

pytestmark = anywhere

# Float32 on a GPU adds up in another order; TF32, with 10 bits, is switched off.
TOLERANCE = 1e-3 if HAS_CUDA else 1e-4


@pytest.mark.parametrize(
    ("arch", "model_class"),
    [
        ("deepseek_v3", "gpt"),
        *(
            pytest.param(*case, marks=not_on_cpu)
            for case in (
                ("deepseek_v3", "hybrid"),
                ("qwen3", "gpt"),
                ("qwen3_next", "gpt"),
                ("qwen3_next", "hybrid"),
                ("qwen3_5_moe_text", "gpt"),
                ("deepseek_v32", "gpt"),
                ("deepseek_v32", "hybrid"),
            )
        ),
    ],
)
def test_log_probs_and_export_equal_transformers(
    arch: str, model_class: str, checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_factory(arch)
    exported = tmp_path / "exported"
    found = play(
        "tests.dist.jobs:log_probs_and_export",
        tmp_path,
        flags=job_flags(checkpoint, "tp1_pp1_ep1", "--rl-model-class", model_class),
        target=exported,
        environment={"NVIDIA_TF32_OVERRIDE": "0"},
    )
    assert_log_probs_equal_transformers(found, checkpoint, tolerance=TOLERANCE)
    assert differing(checkpoint, exported) == []
