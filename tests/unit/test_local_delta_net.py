"""The kernels of the gated delta net in torch: transformers' numbers, and samples kept apart."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as peer

from mcore_rl.batching.rows import set_prefixes
from mcore_rl.patches.megatron.local_delta_net import chunk_gated_delta_rule, l2norm
from mcore_rl.patches.megatron.sample_scans import causal_conv1d

LENGTHS = (1, 64, 130, 3, 65, 63)  # shorter than a convolution, equal to chunks, and between
HEADS, KEY, VALUE, WIDTH = 3, 20, 12, 4
CHANNELS = 32  # torch computes what is left over from whole vectors in another way


def inputs_of(num_tokens: int) -> dict[str, torch.Tensor]:
    """Random inputs of the rule, `[1, num_tokens, ...]`; some heads forget quickly."""
    generator = torch.Generator().manual_seed(num_tokens)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(1, num_tokens, HEADS, *size, generator=generator)

    return {
        "q": l2norm(drawn(KEY)),
        "k": l2norm(drawn(KEY)),
        "v": drawn(VALUE),
        "g": -torch.tensor([0.01, 1.0, 16.0]) * drawn().sigmoid(),
        "beta": drawn().sigmoid(),
    }


def bounds_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 193])
def test_rule_and_its_gradients_equal_the_recurrence(num_tokens: int) -> None:
    def learned(rule: object, named: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in named.items()}
        first = [leaves.pop(name) for name in ("q", "k", "v")]
        out, _ = rule(*first, **leaves)  # type: ignore[operator]
        out.backward(torch.ones_like(out).cumsum(1))
        return [out.detach(), *(x.grad for x in (*first, *leaves.values()))]

    named = inputs_of(num_tokens)
    expected = learned(peer.torch_recurrent_gated_delta_rule, named)
    for found, of_peer in zip(learned(chunk_gated_delta_rule, named), expected, strict=True):
        largest = float(of_peer.abs().max())
        torch.testing.assert_close(found, of_peer, rtol=1e-5, atol=1e-5 * largest)


def test_packed_samples_are_computed_as_alone_bit_for_bit() -> None:
    named, bounds = inputs_of(sum(LENGTHS)), bounds_of(LENGTHS)
    channels = torch.randn(1, sum(LENGTHS), CHANNELS, generator=torch.Generator().manual_seed(2))
    taps = torch.randn(CHANNELS, WIDTH, generator=torch.Generator().manual_seed(3))
    packed, _ = chunk_gated_delta_rule(**named, cu_seqlens=bounds)
    convolved, _ = causal_conv1d(channels, taps, activation="silu", cu_seqlens=bounds)
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        alone = {name: x[:, first:last] for name, x in named.items()}
        assert torch.equal(packed[:, first:last], chunk_gated_delta_rule(**alone)[0])
        expected, _ = causal_conv1d(channels[:, first:last], taps, activation="silu")
        assert torch.equal(convolved[:, first:last], expected)


def test_padding_on_the_right_changes_nothing() -> None:
    named = inputs_of(2 * 130)
    rows = {name: x.unflatten(1, (2, 130))[0] for name, x in named.items()}
    out, _ = chunk_gated_delta_rule(**rows)
    short, _ = chunk_gated_delta_rule(**{name: x[1:, :97] for name, x in rows.items()})
    assert torch.equal(out[1, :97], short[0])


@pytest.mark.parametrize("bias", [False, True])
def test_convolution_equals_that_of_transformers(bias: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x, taps = torch.randn(2, 9, 6, generator=generator), torch.randn(6, WIDTH, generator=generator)
    offset = torch.randn(6, generator=generator) if bias else None
    expected = peer.causal_conv1d_fn(x.transpose(1, 2), taps, offset, activation="silu")
    found, _ = causal_conv1d(x, taps, offset, activation="silu")
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_samples_continue_from_the_prompt_that_they_share() -> None:
    """As if each had the prompt before it; prompts of every length relative to chunks and taps."""
    prompts, rests = (70, 2, 128), ((5, 66), (1, 3, 2), (64, 1))
    lengths, prefix_of, repeated = [], [], []
    for prompt, of_prompt in zip(prompts, rests, strict=True):
        shared = len(lengths)
        first = sum(lengths)
        lengths += [prompt, *of_prompt]
        prefix_of += [shared] * (1 + len(of_prompt))
        for sample, length in enumerate(of_prompt, start=1):
            own = sum(lengths[: shared + sample])
            repeated.append([*range(first, first + prompt), *range(own, own + length)])
    named, bounds = inputs_of(sum(lengths)), bounds_of(tuple(lengths))
    set_prefixes(bounds, torch.tensor(prefix_of))
    channels = torch.randn(1, sum(lengths), CHANNELS, generator=torch.Generator().manual_seed(2))
    taps = torch.randn(CHANNELS, WIDTH, generator=torch.Generator().manual_seed(3))
    shared_rule, _ = chunk_gated_delta_rule(**named, cu_seqlens=bounds)
    shared_channels, _ = causal_conv1d(channels, taps, cu_seqlens=bounds)
    for places in repeated:
        whole, _ = chunk_gated_delta_rule(**{name: x[:, places] for name, x in named.items()})
        torch.testing.assert_close(shared_rule[:, places], whole, rtol=1e-5, atol=1e-5)
        convolved, _ = causal_conv1d(channels[:, places], taps)
        assert torch.equal(shared_channels[:, places], convolved)
