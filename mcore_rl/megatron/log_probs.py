"""Log-probs and entropy computed from hidden states, without storing `[t, v]` logits.

Shape legend: t tokens (any flattening of samples and positions), h hidden, v vocabulary. Under
tensor parallelism each rank of the group holds `[v/tp, h]` of the output weight.

With logits z = hidden @ weight^T / T, log-normaliser Z = log sum_v exp(z_v), p = exp(z - Z):

    log_prob = z_target - Z            d log_prob / dz = onehot(target) - p
    entropy  = Z - sum_v p_v z_v       d entropy  / dz = -p * (z - Z + entropy)

Tokens are processed in chunks. Forward keeps a few numbers per token; backward recomputes each
chunk's logits. The matmul runs in the parameters' dtype and everything after it in float32, as in
the engine that sampled the tokens, so that both sides round in the same places. With `in_float32`
the matmuls run in float32, too (MiniMax-M1, arXiv 2506.13585), as in an engine whose
head does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

# Of float32 temporaries, in host memory and on a device.
BLOCK_BYTES, DEVICE_BLOCK_BYTES = 1 << 20, 64 << 20


def vocab_parallel_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    with_entropy: bool = True,
    in_float32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-prob of each target and the entropy of its distribution, each `[t]`.

    With `[t, k]` targets, log-probs are `[t, k]`: those of k tokens in place of one.

    Collective over `tp_group` in forward (two all-reduces, of `[1 + k, t]` and `[2, t]`, for any
    chunk size), but not in backward. With `tp_group=None`, `weight` covers the full vocabulary.

    hidden: `[t, h]`, the same on all ranks of the group (gathered, under sequence parallelism).
    weight: `[v/tp, h]`, this rank's rows: tokens vocab_start .. vocab_start + v/tp - 1.
    target_ids: `[t]` or `[t, k]` int64, the same on all ranks.
    vocab_size: of the tokenizer. Rows beyond it pad the vocabulary to a divisible size. Their
        probability is exactly 0; a target among them, or a negative one, has log-prob -inf.
    temperature: the distribution is softmax(logits / temperature), the one that was sampled from.
    chunk_tokens: bounds the transients to two float32 `[chunk_tokens, v/tp]`. The gradient of
        `weight` needs one float32 `[v/tp, h]` in addition.
    with_entropy: False skips the entropy and returns None instead.
    in_float32: compute logits and gradients by products in float32. Each pass then holds a float32
        copy of `weight`.

    Returns float32, the same on all ranks, for any parameter dtype up to float32 (float64 for
    float64 inputs).

    The gradient of `hidden` is this rank's PARTIAL sum, over its own rows only. The producer of
    `hidden` must sum it over the group in its own backward, as Megatron's
    `copy_to_tensor_model_parallel_region` (all-reduce) and
    `gather_from_sequence_parallel_region(tensor_parallel_output_grad=True)` (reduce-scatter) do.
    The gradient of `weight` is complete, summed over chunks in float32 and then cast to the
    weight's dtype. Gradients that are not required are not computed, nor are the terms of an
    unused output.
    """
    assert 0.0 < temperature < math.inf, f"temperature must be positive, got {temperature}"
    assert chunk_tokens >= 1, f"chunk_tokens must be positive, got {chunk_tokens}"
    assert hidden.ndim == 2 and weight.ndim == 2 and hidden.shape[1] == weight.shape[1], (
        f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [t, h], [v/tp, h]"
    )
    assert target_ids.shape[:1] == hidden.shape[:1] and target_ids.dtype == torch.int64, (
        f"target_ids must be [{hidden.shape[0]}] or [{hidden.shape[0]}, k] int64, got "
        f"{tuple(target_ids.shape)} {target_ids.dtype}"
    )
    head = _Head.of(
        weight,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        tp_group=tp_group,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
        in_float32=in_float32,
    )
    scores: tuple[torch.Tensor, torch.Tensor | None]
    scores = _VocabParallelLogProbs.apply(  # type: ignore[no-untyped-call]  # torch's
        hidden.to(weight.dtype),
        weight,
        target_ids if target_ids.ndim == 2 else target_ids[:, None],
        head,
    )
    return scores[0].view(target_ids.shape), scores[1]


@dataclass(frozen=True, slots=True)
class _Head:
    """The settings of this rank's output layer, without its tensors."""

    vocab_start: int
    num_rows: int  # rows of the weight that stand for a token; padding is cut off, not masked
    tp_group: dist.ProcessGroup | None
    temperature: float
    chunk_tokens: int
    with_entropy: bool
    in_float32: bool = False

    @classmethod
    def of(
        cls, weight: torch.Tensor, *, vocab_start: int, vocab_size: int, **settings: Any
    ) -> _Head:
        """Return the settings for `weight`, as `vocab_parallel_log_probs` gets them."""
        num_rows = min(max(vocab_size - vocab_start, 0), weight.shape[0])
        return cls(vocab_start=vocab_start, num_rows=num_rows, **settings)

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, h]`, the weight's rows in the dtype of the products."""
        rows = weight[: self.num_rows]
        return rows.to(_compute_dtype(weight)) if self.in_float32 else rows

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """Yield slices of the tokens, one per chunk."""
        # A shard with only padding contributes nothing.
        if self.num_rows:
            # Of equal length: a short last one might use another kernel, which rounds differently.
            count = math.ceil(num_tokens / self.chunk_tokens)
            for i in range(count):
                yield slice(i * num_tokens // count, (i + 1) * num_tokens // count)

    def products(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of a chunk, `[chunk, num_rows]` in the dtype of `rows`; the caller may
        overwrite them."""
        return hidden.to(rows.dtype) @ rows.t()

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return `products` in float32, over the temperature."""
        return self._scaled(self.products(hidden, rows))

    def _scaled(self, products: torch.Tensor) -> torch.Tensor:
        logits = products.to(_compute_dtype(products))
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def blocks(
        self, chunk: slice, products: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield parts of a chunk: their slice of the tokens, their rows of its `products`, and
        these in float32, over the temperature, which may share their memory."""
        # On a CPU, temporaries that stay in its cache, and in memory that malloc has already: pages
        # that are new to the process cost more than what is computed.
        num_bytes = BLOCK_BYTES if products.device.type == "cpu" else DEVICE_BLOCK_BYTES
        length = max(1, num_bytes // (4 * self.num_rows))
        for part, at in zip(products.split(length), range(0, len(products), length), strict=True):
            start = chunk.start + at
            yield slice(start, start + len(part)), part, self._scaled(part)

    def locate(self, target_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether each target is a row of this rank, and the row (0 if it is not)."""
        row = target_ids - self.vocab_start
        is_mine = (row >= 0) & (row < self.num_rows)
        return is_mine, torch.where(is_mine, row, 0)

    def all_reduce(self, stats: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce `stats` over the group in place; a no-op without other ranks or tokens."""
        if self.tp_group is not None and self.tp_group.size() > 1 and stats.numel():
            dist.all_reduce(stats, op=op, group=self.tp_group)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        head: _Head,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (log-probs `[t, k]`, entropy `[t]` or None). Collective over the head's group."""
        maximum, target_logit, sum_exp, sum_exp_z = _shard_statistics(
            hidden, weight, target_ids, head
        )
        # Every rank sums relative to its own maximum, so the chunks need no collective.
        extremes = torch.cat([maximum[None], target_logit.t()])
        head.all_reduce(extremes, dist.ReduceOp.MAX)
        global_maximum, target_logit = extremes[0], extremes[1:].t()
        # (A shard without rows has maximum -inf and sums of 0; -inf * 0 would be nan.)
        shift = maximum - global_maximum if head.num_rows else torch.zeros_like(maximum)
        scale = shift.exp()
        sums = torch.stack([scale * sum_exp, scale * (sum_exp_z + shift * sum_exp)])
        head.all_reduce(sums, dist.ReduceOp.SUM)
        sum_exp, sum_exp_z = sums.unbind()

        log_sum_exp = sum_exp.log()
        log_probs = target_logit - global_maximum[:, None] - log_sum_exp[:, None]
        entropy = log_sum_exp - sum_exp_z / sum_exp if head.with_entropy else None
        ctx.head = head
        ctx.set_materialize_grads(False)
        # Maximum and log-sum are kept separately: with large logits their float32 sum would lose
        # the digits of the latter.
        ctx.save_for_backward(hidden, weight, target_ids, global_maximum, log_sum_exp, entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        """Return the gradients of `hidden` (partial over the group) and `weight`, if required."""
        hidden, weight, target_ids, maximum, log_sum_exp, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(target_ids, dtype=maximum.dtype)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = None
        rows = head.rows(weight)
        for chunk in head.chunks(hidden.shape[0]):
            grad_logits = head.products(hidden[chunk], rows)  # until a block overwrites its part
            for block, part, log_p in head.blocks(chunk, grad_logits):
                log_p.sub_(maximum[block, None]).sub_(log_sum_exp[block, None])
                gradient = _grad_logits(
                    log_p,
                    head.locate(target_ids[block]),
                    grad_log_probs[block],
                    None if grad_entropy is None else grad_entropy[block],
                    None if entropy is None else entropy[block],
                )
                part.copy_(gradient.div_(head.temperature))
            del part, log_p, gradient
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_logits @ rows
            if needs_weight:
                inputs = hidden[chunk].to(rows.dtype)
                grad_weight = _with_product(grad_weight, grad_logits.t(), inputs)
            del grad_logits  # before the next chunk's
        if needs_weight:
            grad_weight = _of_weight(grad_weight, weight)
        return grad_hidden, grad_weight, None, None


def _shard_statistics(
    hidden: torch.Tensor, weight: torch.Tensor, target_ids: torch.Tensor, head: _Head
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, over this rank's rows, `[t]` each: max z, targets' z (`[t, k]`), sum e,
    sum e * (z - max z).

    e = exp(z - max z). A target's z is -inf if another rank holds it; max z is -inf if this rank
    holds no row.
    """
    maximum = hidden.new_full(hidden.shape[:1], -math.inf, dtype=_compute_dtype(weight))
    target_logit = torch.full_like(target_ids, -math.inf, dtype=maximum.dtype)
    sum_exp, sum_exp_z = torch.zeros_like(maximum), torch.zeros_like(maximum)
    rows = head.rows(weight)
    for chunk in head.chunks(hidden.shape[0]):
        products = head.products(hidden[chunk], rows)
        for block, _, z in head.blocks(chunk, products):
            is_mine, row = head.locate(target_ids[block])
            target_logit[block] = torch.where(is_mine, z.gather(1, row), -math.inf)
            maximum[block] = z.amax(dim=1)
            z.sub_(maximum[block, None])
            e = z.exp() if head.with_entropy else z.exp_()
            sum_exp[block] = e.sum(dim=1)
            if head.with_entropy:
                sum_exp_z[block] = e.mul_(z).sum(dim=1)
        del products, _, z, e  # before the next chunk's
    return maximum, target_logit, sum_exp, sum_exp_z


def _grad_logits(
    log_p: torch.Tensor,
    located: tuple[torch.Tensor, torch.Tensor],
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of a chunk's scaled logits, `[chunk, num_rows]`; overwrites `log_p`."""
    of_p = grad_log_probs.sum(dim=1, keepdim=True)
    if grad_entropy is None or entropy is None:
        grad = log_p.exp_().mul_(-of_p)
    else:
        p = log_p.exp()
        grad = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None])
        grad.add_(of_p).mul_(p).neg_()
    is_mine, row = located
    return grad.scatter_add_(1, row, torch.where(is_mine, grad_log_probs, 0.0))


@torch.no_grad()
def vocab_parallel_top_k(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    *,
    vocab_start: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    in_float32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k most probable tokens of each distribution and their log-probs, `[t, k]` each.

    Ids are int64, log-probs float32, most probable first, the same on all ranks; without gradient.
    Arguments are those of `vocab_parallel_log_probs`, k at most `vocab_size`. Collective over
    `tp_group`, also on ranks without rows.
    """
    size = 1 if tp_group is None else tp_group.size()
    head = _Head.of(
        weight,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        tp_group=tp_group,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=False,
        in_float32=in_float32,
    )
    here, rows = min(k, head.num_rows), head.rows(weight)
    logits = hidden.new_full((len(hidden), k), -math.inf, dtype=torch.float32)
    ids = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
    for chunk in head.chunks(len(hidden)):
        z = head.logits(hidden[chunk].to(rows.dtype), rows)
        top = z.topk(here, dim=1)
        logits[chunk, :here], ids[chunk, :here] = top.values.float(), top.indices + vocab_start
        del z
    if size > 1:
        every_logits = [torch.empty_like(logits) for _ in range(size)]
        every_ids = [torch.empty_like(ids) for _ in range(size)]
        dist.all_gather(every_logits, logits, group=tp_group)
        dist.all_gather(every_ids, ids, group=tp_group)
        best = torch.cat(every_logits, dim=1).topk(k, dim=1)
        ids = torch.cat(every_ids, dim=1).gather(1, best.indices)
    # Recomputed, so that a student with these weights has the same log-probs to the last bit.
    log_probs, _ = vocab_parallel_log_probs(
        hidden,
        weight,
        ids,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        tp_group=tp_group,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=False,
        in_float32=in_float32,
    )
    return log_probs, ids


def _with_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return total + a @ b, None for 0, in float32 at least once it has two terms. Overwrites
    `total`."""
    if total is None:
        return a @ b
    total = total.to(_compute_dtype(total))
    return total.addmm_(a, b) if total.dtype == a.dtype else total.add_(a @ b)


def _of_weight(gradient: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the rows that stand for tokens as one of the weight."""
    if gradient is not None and gradient.shape == weight.shape:
        return gradient.to(weight.dtype)
    padded = torch.zeros_like(weight)
    if gradient is not None:
        padded[: len(gradient)] = gradient
    return padded


def _compute_dtype(weight: torch.Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def vocab_parallel_reverse_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    vocab_start: int,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> torch.Tensor:
    """Return KL(student || teacher) over the vocabulary of each token, `[t]` float32, the same on
    all ranks.

    With scaled logits z of the student and y of the teacher, d = z - y, log-normalisers Z and Y:

        KL = sum_v p_v d_v - (Z - Y)         d KL / d z_v = p_v (d_v - (Z - Y) - KL)

    Both are exactly 0 for equal logits. Collective over `tp_group` in forward (two all-reduces, of
    `[2, t]` and `[3, t]`), but not in backward. teacher_hidden: `[t, g]`, the same on all ranks.
    teacher_weight: `[v/tp, g]`, the rows that `weight` has of the student. These two have no
    gradient; those of `hidden` and `weight`, and the other arguments, are as in
    `vocab_parallel_log_probs`. The transients are three float32 `[chunk_tokens, v/tp]`.
    """
    head = _Head.of(
        weight,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        tp_group=tp_group,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=False,
    )
    divergence: torch.Tensor = _ReverseKL.apply(  # type: ignore[no-untyped-call]  # torch's
        hidden.to(weight.dtype),
        weight,
        teacher_hidden.to(teacher_weight.dtype),
        teacher_weight,
        head,
    )
    return divergence


class _ReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher_hidden: torch.Tensor,
        teacher_weight: torch.Tensor,
        head: _Head,
    ) -> torch.Tensor:
        """Return the KL `[t]`. Collective over the head's group."""
        maxima = hidden.new_full((2, len(hidden)), -math.inf, dtype=torch.float32)
        sums = torch.zeros(3, len(hidden), dtype=torch.float32, device=hidden.device)
        rows, teacher_rows = weight[: head.num_rows], teacher_weight[: head.num_rows]
        for chunk in head.chunks(len(hidden)):
            z = head.logits(hidden[chunk], rows)
            y = head.logits(teacher_hidden[chunk], teacher_rows)
            maxima[:, chunk] = torch.stack([z.amax(dim=1), y.amax(dim=1)])
            difference = z - y
            e = z.sub_(maxima[0, chunk, None]).exp_()
            f = y.sub_(maxima[1, chunk, None]).exp_()
            sums[0, chunk], sums[1, chunk] = e.sum(dim=1), f.sum(dim=1)
            sums[2, chunk] = e.mul_(difference).sum(dim=1)
            del z, y, e, f, difference  # before the next chunk's
        extremes = maxima.clone()
        head.all_reduce(extremes, dist.ReduceOp.MAX)
        shift = (maxima - extremes).exp() if head.num_rows else torch.zeros_like(maxima)
        sums *= shift[[0, 1, 0]]
        head.all_reduce(sums, dist.ReduceOp.SUM)
        log_sums = sums[:2].log()
        normalisers = (extremes[0] - extremes[1]) + (log_sums[0] - log_sums[1])
        kl = sums[2] / sums[0] - normalisers
        ctx.head = head
        tensors = (hidden, weight, teacher_hidden, teacher_weight)
        ctx.save_for_backward(*tensors, extremes[0], log_sums[0], normalisers + kl)
        return kl

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_kl: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        """Return the gradients of `hidden` (partial over the group) and `weight`, if required."""
        *tensors, maximum, log_sum, centre = ctx.saved_tensors
        hidden, weight, teacher_hidden, teacher_weight = tensors
        head: _Head = ctx.head
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = None
        rows, teacher_rows = weight[: head.num_rows], teacher_weight[: head.num_rows]
        for chunk in head.chunks(len(hidden)):
            z = head.logits(hidden[chunk], rows)
            difference = z - head.logits(teacher_hidden[chunk], teacher_rows)
            p = z.sub_(maximum[chunk, None]).sub_(log_sum[chunk, None]).exp_()
            grad_logits = difference.sub_(centre[chunk, None]).mul_(p).mul_(grad_kl[chunk, None])
            grad_logits = grad_logits.div_(head.temperature).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, rows, out=grad_hidden[chunk])
            if needs_weight:
                grad_weight = _with_product(grad_weight, grad_logits.t(), hidden[chunk])
            del z, difference, p, grad_logits  # before the next chunk's
        if needs_weight:
            grad_weight = _of_weight(grad_weight, weight)
        return grad_hidden, grad_weight, None, None, None
