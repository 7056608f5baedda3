"""Transformer Engine's Adam takes the moments that it loads, without a copy on the device."""

from __future__ import annotations

import pytest

from tests.cuda.stack import Stack

pytestmark = pytest.mark.timeout(900)


def test_moments_are_taken_as_they_are_unless_they_are_converted(cuda_stack: Stack) -> None:
    found = cuda_stack.run("adam_job")
    assert found["class"].startswith("transformer_engine.") and found["patched"]
    for dtype, is_copied in ("torch.float32", False), ("torch.bfloat16", True):
        loaded = found["loaded"][dtype]
        assert loaded["is_copied"] == is_copied and loaded["dtypes"] == [dtype]
        values = [{"exp_avg": [0.5] * size, "exp_avg_sq": [0.25] * size} for size in (5, 3)]
        assert loaded["values"] == values
        assert loaded["group"] == {"step": 7, "lr": 0.125} and loaded["same_parameters"]


def test_a_first_step_begins_with_dithered_copies(cuda_stack: Stack) -> None:
    found = cuda_stack.run("adam_job")["dithered"]
    for name, dtype in ("remainders", "torch.int16"), ("copies", "torch.float32"):
        first = found[name]
        assert first["dtype"] == dtype and first["rounds"] and first["moved"] > 0.99
        assert first["moments"] == [0.0, 0.0]
    assert found["remainders"]["bits"] == found["copies"]["bits"]
