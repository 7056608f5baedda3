"""`mcore_rl.verify`: what is overwritten and how a difference is named, without an engine."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.common.values import difference, other_values

PLACES = ("here", "there")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_every_value_is_overwritten_with_another(dtype: torch.dtype) -> None:
    for values in ([0, 0, 0], [1, 1, 1], [0, 1, -1], [1e-7, 0.5, 448], [-0.0, 0.49, -300]):
        before = torch.tensor(values).to(dtype)
        after = other_values(before)
        assert after.dtype == dtype and ((after - before).abs() >= 0.5).all()
    if dtype.is_floating_point:
        assert other_values(torch.tensor([torch.nan, torch.inf], dtype=dtype)).tolist() == [0, 0]


def test_first_difference_is_named_with_its_place_and_both_values() -> None:
    a = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    b = a.clone()
    assert difference(a, b, PLACES) == ""
    b[1, 2], b[1, 0] = 7, -1
    assert difference(a, b, PLACES) == "[1, 0] is 3 here and -1 there"
    assert difference(a, b, PLACES, first_row=8) == "[9, 0] is 3 here and -1 there"
    assert difference(a, a.float(), PLACES) == " is bfloat16 [2, 3] here and float32 [2, 3] there"
    assert difference(a, a[:1], PLACES) == " is bfloat16 [2, 3] here and bfloat16 [1, 3] there"
    assert difference(torch.tensor(1), torch.tensor(2), PLACES) == "[] is 1 here and 2 there"


def test_equal_bits_are_equal_and_other_zeros_are_not() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert difference(nan, nan.clone(), PLACES) == ""
    zeros = torch.zeros(2)
    assert difference(zeros, -zeros, PLACES) == "[0] is 0 here and -0 there"
    float8 = torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn)
    other = torch.tensor([448.0, 0.5]).to(torch.float8_e4m3fn)
    assert difference(float8, other, PLACES) == "[0] is 0.5 here and 448 there"
