"""Dither of main parameters: weights stay, small updates arrive, replicas agree."""

import pytest
import torch

from mcore_rl.megatron.dither import dither
from mcore_rl.megatron.lora import plus_product

UPDATE = 2e-5


def weights(size=1 << 16, dtype=torch.bfloat16):
    return (0.1 * torch.randn(size, generator=torch.Generator().manual_seed(0))).to(dtype)


def dithered(of):
    copies = of.float()
    dither(copies, of.dtype, 0)
    return copies


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_stay(dtype):
    of = torch.cat(
        [
            weights(dtype=dtype),
            torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-20, torch.finfo(dtype).max], dtype=dtype),
            torch.finfo(dtype).tiny * torch.arange(-8, 9).to(dtype) / 8,
        ]
    )
    copies = dithered(of)
    assert torch.equal(copies.to(dtype).view(torch.int16), of.view(torch.int16))
    assert (copies != of.float()).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_places_are_even_and_do_not_repeat(dtype):
    of = weights(dtype=dtype)
    places = dithered(of).view(torch.int32) - of.float().view(torch.int32)
    half = {torch.bfloat16: 1 << 15, torch.float16: 1 << 12}[dtype]
    shares = torch.histc(places.float(), 16, -half, half) / of.numel()
    assert (shares - 1 / 16).abs().max() < 0.005
    # Also for weights that are all the same, and for each weight of the same values elsewhere.
    same = torch.full_like(of, 0.0625)
    places_of_same = dithered(same).view(torch.int32)
    assert places_of_same.unique().numel() > 0.6 * min(of.numel(), 2 * half)
    assert torch.corrcoef(torch.stack([places[1:], places[:-1]]).float())[0, 1].abs() < 0.02


def test_an_update_below_the_resolution_arrives_in_the_mean():
    of = weights(1 << 20)
    direction = torch.randn(of.shape, generator=torch.Generator().manual_seed(1)).sign()
    for copies, arrived in ((of.float(), 0.6), (dithered(of), 1.0)):
        moved = (copies + UPDATE * direction).to(torch.bfloat16).float() - of.float()
        share = float((moved * direction).mean() / UPDATE)
        if arrived == 1.0:
            assert abs(share - 1) < 0.05
        else:
            assert share < arrived


def test_a_share_of_a_parameter_gets_what_the_whole_one_gets():
    of = weights(5000)
    whole, share = of.float(), of[1234:4000].float()
    dither(whole, of.dtype, 0)
    dither(share, of.dtype, 1234)
    assert torch.equal(share, whole[1234:4000])


def places(num_rows, num_columns):
    return torch.arange(num_rows), torch.arange(num_columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_merged_weight_without_a_product_keeps_its_bits(dtype):
    weight = weights(dtype=dtype).view(256, 256).contiguous()
    weight[0, :2] = torch.tensor([0.0, -0.0])
    merged = plus_product(weight, torch.zeros(256, 2), torch.randn(2, 256), 2.0, places(256, 256))
    assert torch.equal(merged.view(torch.int16), weight.view(torch.int16))


def test_a_small_product_arrives_in_the_mean_and_a_slice_gets_what_the_whole_gets():
    weight = weights(1 << 20).view(1024, 1024)
    generator = torch.Generator().manual_seed(2)
    b = torch.randn(1024, 4, generator=generator) * UPDATE
    a = torch.randn(4, 1024, generator=generator)
    product = b @ a
    for numbers, low, high in ((None, 0.0, 0.6), (places(1024, 1024), 0.95, 1.05)):
        moved = plus_product(weight, b, a, 1.0, numbers).float() - weight.float()
        assert low < float((moved * product).sum() / product.square().sum()) < high
    whole = plus_product(weight, b, a, 1.0, places(1024, 1024))
    rows, columns = slice(100, 357), slice(31, 700)
    some = tuple(each[part] for each, part in zip(places(1024, 1024), (rows, columns), strict=True))
    part = plus_product(weight[rows, columns], b[rows], a[:, columns], 1.0, some)
    assert torch.equal(part, whole[rows, columns])


def test_float32_weights_stay():
    copies = torch.randn(8)
    before = copies.clone()
    dither(copies, torch.float32, 0)
    assert torch.equal(copies, before)
