"""Fused log-probs and entropy on one process, against `torch.distributions.Categorical`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.megatron import log_probs
from mcore_rl.megatron.log_probs import (
    vocab_parallel_log_probs,
    vocab_parallel_reverse_kl,
    vocab_parallel_top_k,
)

NUM_TOKENS, HIDDEN, ROWS, VOCAB = 13, 6, 24, 21


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    target_ids = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target_ids


def fused(hidden, weight, target_ids, **options):
    options = {"vocab_start": 0, "vocab_size": VOCAB, "tp_group": None} | options
    return vocab_parallel_log_probs(hidden, weight, target_ids, **options)


def naive(hidden, weight, target_ids, temperature=1.0):
    """The reference: all logits of the real vocabulary at once."""
    logits = (hidden @ weight[:VOCAB].t()).to(torch.promote_types(hidden.dtype, torch.float32))
    distribution = Categorical(logits=logits / temperature)
    return distribution.log_prob(target_ids), distribution.entropy()


def gradients(function, dtype=torch.float32, **options):
    """Outputs and input gradients for random gradients of both outputs."""
    hidden, weight, target_ids = inputs(dtype)
    outputs = function(hidden, weight, target_ids, **options)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(NUM_TOKENS, generator=generator).to(out.dtype) for out in outputs]
    return *outputs, *torch.autograd.grad(outputs, [hidden, weight], upstream)


def assert_close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
def test_values_and_gradients_equal_reference(temperature: float, chunk_tokens: int) -> None:
    actual = gradients(fused, temperature=temperature, chunk_tokens=chunk_tokens)
    expected = gradients(naive, temperature=temperature)
    assert {tensor.dtype for tensor in actual} == {torch.float32}
    assert_close(actual, expected)  # float32, sums of 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_host_memory_change_no_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"dtype": dtype, "temperature": 0.7, "chunk_tokens": 8}
    whole = gradients(fused, **options)
    monkeypatch.setattr(log_probs, "BLOCK_BYTES", 3 * VOCAB * 4)  # three rows of seven
    for ours, theirs in zip(gradients(fused, **options), whole, strict=True):
        assert ours.equal(theirs)


def test_gradients_pass_gradcheck_in_float64() -> None:
    hidden, weight, target_ids = inputs(torch.float64)

    def function(hidden: torch.Tensor, weight: torch.Tensor):
        return fused(hidden, weight, target_ids, temperature=0.7, chunk_tokens=4)

    assert torch.autograd.gradcheck(function, (hidden, weight))


@pytest.mark.parametrize("output", [0, 1], ids=["log_probs", "entropy"])
@pytest.mark.parametrize("wanted", [0, 1], ids=["hidden", "weight"])
def test_gradient_of_one_output_to_one_input_equals_reference(output: int, wanted: int) -> None:
    tensors = inputs(torch.float64)
    tensors[1 - wanted].requires_grad_(False)
    (actual,) = torch.autograd.grad(
        fused(*tensors, chunk_tokens=5)[output].sum(), [tensors[wanted]]
    )
    (expected,) = torch.autograd.grad(naive(*tensors)[output].sum(), [tensors[wanted]])
    torch.testing.assert_close(actual, expected)


def test_bfloat16_rounds_like_engine() -> None:
    """Logits in bf16, softmax in float32: the outputs then agree far below bf16's 2^-8."""
    actual, expected = gradients(fused, torch.bfloat16), gradients(naive, torch.bfloat16)
    assert {output.dtype for output in actual[:2]} == {torch.float32}
    assert_close(actual[:2], expected[:2])


def test_products_in_float32_are_those_of_float32_copies() -> None:
    """As `F.linear(hidden.float(), weight.float())`, which MiniMax-M1 calls an FP32 head."""
    actual = gradients(fused, torch.bfloat16, in_float32=True, chunk_tokens=3)
    hidden, weight, target_ids = (tensor.detach() for tensor in inputs(torch.bfloat16))
    leaves = [tensor.float().requires_grad_() for tensor in (hidden, weight)]
    outputs = naive(*leaves, target_ids)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(NUM_TOKENS, generator=generator) for _ in outputs]
    expected = torch.autograd.grad(outputs, leaves, upstream)
    assert_close(actual[:2], outputs)
    assert [gradient.dtype for gradient in actual[2:]] == [torch.bfloat16] * 2
    for found, exact in zip(actual[2:], expected, strict=True):
        assert torch.equal(found, exact.bfloat16())  # rounded once
    rounded = gradients(fused, torch.bfloat16, chunk_tokens=3)
    assert (rounded[0] - actual[0]).abs().max() > 1e-3


def test_bfloat16_weight_gradient_is_accurate_over_many_chunks() -> None:
    """Sums rounded to the weight's dtype after each of 64 chunks would be 4 times as far off."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 16, generator=generator).bfloat16()
    weight = torch.randn(VOCAB, 16, generator=generator).bfloat16() / 4
    target_ids = torch.randint(0, VOCAB, (256,), generator=generator)
    upstream = torch.randn(256, generator=generator)

    def weight_gradient(dtype: torch.dtype, chunk_tokens: int) -> torch.Tensor:
        leaf = weight.to(dtype).requires_grad_()
        log_probs, _ = fused(hidden.to(dtype), leaf, target_ids, chunk_tokens=chunk_tokens)
        return torch.autograd.grad((log_probs * upstream).sum(), [leaf])[0].double()

    exact = weight_gradient(torch.float64, 256)
    many, one = (
        (weight_gradient(torch.bfloat16, chunk_tokens) - exact).norm() for chunk_tokens in (4, 256)
    )
    assert many < 2 * one


@pytest.mark.parametrize("scale", [2.0**4, 2.0**12])
def test_values_and_gradients_are_exact_for_large_logits(scale: float) -> None:
    """Every row stands twice in the vocabulary and the target wins, so that p is near 1/2.

    The inputs are multiples of 1/8 times a power of two, so that float32 holds the logits (of up to
    1e5) exactly, and the comparison sees only what comes after them.
    """
    hidden, weight, _ = inputs()
    hidden, weight = ((tensor.detach() * 8).round() / 8 for tensor in (hidden, weight))
    hidden, weight = hidden * scale, weight[: VOCAB // 2].repeat(2, 1)
    target_ids = (hidden @ weight.t()).argmax(dim=1)
    assert len(set(target_ids.tolist())) > 3

    def outcome(function, dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        outputs = function(*leaves, target_ids)
        total = outputs[0].sum() + 0.5 * outputs[1].sum()
        return *outputs, *torch.autograd.grad(total, leaves)

    for ours, exact in zip(
        outcome(fused, torch.float32), outcome(naive, torch.float64), strict=True
    ):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_padding_rows_have_probability_zero() -> None:
    hidden, weight, _ = inputs()
    with torch.no_grad():
        weight[VOCAB:] = 1e4 * hidden[0]  # would win everywhere if they counted
    probability = torch.zeros(NUM_TOKENS)
    for token in range(ROWS):
        log_probs, _ = fused(hidden, weight, torch.full((NUM_TOKENS,), token))
        if token < VOCAB:
            probability += log_probs.exp()
        else:
            assert (log_probs == -math.inf).all()
    torch.testing.assert_close(probability, torch.ones(NUM_TOKENS))

    log_probs, entropy = fused(hidden, weight, torch.zeros(NUM_TOKENS, dtype=torch.int64))
    (log_probs.sum() + entropy.sum()).backward()
    assert (weight.grad[VOCAB:] == 0).all() and (weight.grad[:VOCAB] != 0).all()


@pytest.mark.parametrize("target", [-1, -100])
def test_target_outside_vocabulary_has_log_prob_minus_infinity(target: int) -> None:
    hidden, weight, target_ids = inputs()
    target_ids[2] = target
    log_probs, _ = fused(hidden, weight, target_ids)
    assert log_probs[2] == -math.inf and log_probs.isfinite().sum() == NUM_TOKENS - 1


def test_log_probs_and_gradients_are_equal_without_entropy() -> None:
    hidden, weight, target_ids = inputs()
    log_probs, entropy = fused(hidden, weight, target_ids, with_entropy=False, chunk_tokens=4)
    assert entropy is None
    expected, _ = naive(hidden, weight, target_ids)
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    assert_close(
        torch.autograd.grad(log_probs.sum(), [hidden, weight]),
        torch.autograd.grad(expected.sum(), [hidden, weight]),
    )


def test_float32_hidden_is_rounded_to_bfloat16_weight() -> None:
    hidden, weight, target_ids = inputs()
    log_probs, _ = fused(hidden, weight.to(torch.bfloat16), target_ids)
    expected, _ = naive(hidden.to(torch.bfloat16), weight.to(torch.bfloat16), target_ids)
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(log_probs.sum(), [hidden])
    assert grad.dtype == torch.float32


def test_no_tokens_give_empty_outputs_and_zero_gradients() -> None:
    hidden, weight, target_ids = inputs()
    log_probs, entropy = fused(hidden[:0], weight, target_ids[:0])
    assert log_probs.shape == entropy.shape == (0,)
    (grad,) = torch.autograd.grad(log_probs.sum(), [weight])
    assert (grad == 0).all()


class Recorder(TorchDispatchMode):
    """Records the largest result of any operation and the number of matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_num_elements = 0
        self.num_matmuls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest_num_elements = max(self.largest_num_elements, tensor.numel())
        self.num_matmuls += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return result


def test_no_tensor_exceeds_logits_of_chunk() -> None:
    num_tokens, chunk_tokens, hidden_size, vocab_size = 64, 8, 4, 96
    assert vocab_size * hidden_size < chunk_tokens * vocab_size  # neither weight nor hidden states
    assert num_tokens * hidden_size < chunk_tokens * vocab_size  # can hide a tensor of logits
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size, requires_grad=True)
    target_ids = torch.randint(0, vocab_size, (num_tokens,))
    with Recorder() as forward:
        log_probs, entropy = fused(
            hidden, weight, target_ids, vocab_size=vocab_size, chunk_tokens=chunk_tokens
        )
    with Recorder() as backward:
        (log_probs.sum() + entropy.sum()).backward()
    with Recorder() as control:
        (hidden @ weight.t()).log_softmax(dim=-1)
    assert forward.largest_num_elements == chunk_tokens * vocab_size
    assert backward.largest_num_elements == chunk_tokens * vocab_size
    assert control.largest_num_elements == num_tokens * vocab_size


@pytest.mark.parametrize("wanted, num_matmuls", [((0, 1), 3), ((0,), 2), ((1,), 2)])
def test_unneeded_gradient_is_not_computed(wanted: tuple[int, ...], num_matmuls: int) -> None:
    tensors = inputs()
    for index in {0, 1} - set(wanted):
        tensors[index].requires_grad_(False)
    log_probs, _ = fused(*tensors)
    with Recorder() as backward:
        log_probs.sum().backward()
    assert backward.num_matmuls == num_matmuls
    assert [tensors[index].grad is not None for index in (0, 1)] == [0 in wanted, 1 in wanted]


def test_forward_saves_inputs_and_few_numbers_per_token() -> None:
    hidden, weight, target_ids = inputs()
    saved: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        fused(hidden, weight, target_ids)
    assert saved == [hidden.shape, weight.shape, (NUM_TOKENS, 1)] + [(NUM_TOKENS,)] * 3


def test_nothing_is_saved_without_gradients() -> None:
    with torch.no_grad():
        outputs = fused(*inputs())
    hidden, weight, target_ids = inputs()
    outputs += fused(hidden.detach(), weight.detach(), target_ids)
    assert [output.grad_fn for output in outputs] == [None] * 4


def test_reverse_kl_over_the_vocabulary_equals_autograd_and_is_exactly_0_for_equal_logits():
    generator = torch.Generator().manual_seed(3)
    hidden, teacher = torch.randn(7, 5, generator=generator), torch.randn(7, 6, generator=generator)
    weight, head = torch.randn(12, 5, generator=generator), torch.randn(12, 6, generator=generator)
    hidden.requires_grad_()
    weight.requires_grad_()
    of = dict(vocab_start=0, vocab_size=10, tp_group=None, temperature=0.7, chunk_tokens=3)
    found = vocab_parallel_reverse_kl(hidden, weight, teacher, head, **of)
    log_p = (hidden @ weight[:10].t() / 0.7).log_softmax(-1)
    log_q = (teacher @ head[:10].t() / 0.7).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    factors = torch.randn(7, generator=generator)
    gradients = torch.autograd.grad((found * factors).sum(), [hidden, weight])
    others = torch.autograd.grad((expected * factors).sum(), [hidden, weight])
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)
    nothing = vocab_parallel_reverse_kl(hidden, weight, hidden.detach(), weight.detach(), **of)
    gradients = torch.autograd.grad(nothing.sum(), [hidden, weight])
    assert not nothing.any() and not any(each.any() for each in gradients)


@pytest.mark.parametrize("k", [1, 4, 10])
def test_top_k_and_the_log_probs_of_several_targets_equal_softmax(k: int):
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(7, 5, generator=generator), torch.randn(12, 5, generator=generator)
    of = dict(vocab_start=0, vocab_size=10, tp_group=None, temperature=0.7, chunk_tokens=3)
    log_probs, ids = vocab_parallel_top_k(hidden, weight, k, **of)
    expected = (hidden @ weight[:10].t() / 0.7).log_softmax(-1).topk(k)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(log_probs, expected.values, rtol=1e-5, atol=1e-5)
    weight.requires_grad_()
    again, _ = vocab_parallel_log_probs(hidden, weight, ids, **of)
    assert torch.equal(again, log_probs)
    (gradient,) = torch.autograd.grad(again.sum(), weight)
    expected = (hidden @ weight[:10].t() / 0.7).log_softmax(-1).gather(1, ids).sum()
    torch.testing.assert_close(
        gradient, torch.autograd.grad(expected, weight)[0], rtol=1e-4, atol=1e-4
    )
