"""Log-probs and entropy straight from hidden states, without ever holding `[t, v]` logits.

Shape legend: t tokens (any flattening of samples and positions), h hidden, v vocabulary. Under
tensor parallelism each rank of the group holds `[v/tp, h]` of the output weight.

With logits z = hidden @ weight^T / T, log-normaliser Z = log sum_v exp(z_v), p = exp(z - Z):

    log_prob = z_target - Z            d log_prob / dz = onehot(target) - p
    entropy  = Z - sum_v p_v z_v       d entropy  / dz = -p * (z - Z + entropy)

Tokens are worked off in chunks. Forward keeps a few numbers per token; backward computes each
chunk's logits again. The matmul runs in the parameters' dtype and everything after it in float32,
as in the engine that sampled the tokens, so that both sides round at the same places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mcore_rl.common.errors import UsageError


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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each target, and entropy of the distribution it was drawn from; each `[t]`.

    Collective over `tp_group` in forward (two all-reduces of `[2, t]`, whatever the chunk size) and
    not in backward. `tp_group=None` means that `weight` is the whole vocabulary.

    hidden: `[t, h]`, the same on all ranks of the group (gathered, under sequence parallelism).
    weight: `[v/tp, h]`, this rank's rows: tokens vocab_start .. vocab_start + v/tp - 1.
    target_ids: `[t]` int64, the same on all ranks.
    vocab_size: of the tokenizer. Rows beyond it are there to make the vocabulary divisible; they
        have probability exactly 0, and a target among them (or negative) the log-prob -inf.
    temperature: the distribution is softmax(logits / temperature), the one that was sampled from.
    chunk_tokens: bounds the transients to two float32 `[chunk_tokens, v/tp]`; the gradient of
        `weight` needs one float32 `[v/tp, h]` besides.
    with_entropy: False leaves it out, and returns None in its place.

    Returns float32, the same on all ranks, for any parameter dtype up to float32 (float64 for
    float64 inputs).

    The gradient of `hidden` is this rank's PARTIAL sum, over its own rows only: what produced
    `hidden` must add it up over the group in its own backward, as Megatron's
    `copy_to_tensor_model_parallel_region` (all-reduce) and
    `gather_from_sequence_parallel_region(tensor_parallel_output_grad=True)` (reduce-scatter) do.
    The gradient of `weight` is complete, summed over chunks in float32 before it takes the dtype
    of the weight. A gradient nobody asked for is not computed, and neither is the half of the
    formula that belongs to an output nobody used.

    UsageError: the temperature is not a positive number.
    """
    if not 0.0 < temperature < math.inf:
        raise UsageError(
            "is not a positive number: log-probs of greedy or uniform sampling cannot be "
            "trained on",
            flag=f"--rl-temperature {temperature}",
            remedy="choose for example 1.0",
        )
    assert chunk_tokens >= 1, f"chunk_tokens must be positive, got {chunk_tokens}"
    assert hidden.ndim == 2 and weight.ndim == 2 and hidden.shape[1] == weight.shape[1], (
        f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [t, h], [v/tp, h]"
    )
    assert target_ids.shape == hidden.shape[:1] and target_ids.dtype == torch.int64, (
        f"target_ids must be [{hidden.shape[0]}] int64, got {tuple(target_ids.shape)} "
        f"{target_ids.dtype}"
    )
    head = _Head(
        vocab_start=vocab_start,
        num_rows=min(max(vocab_size - vocab_start, 0), weight.shape[0]),
        tp_group=tp_group,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
    )
    found: tuple[torch.Tensor, torch.Tensor | None]
    found = _VocabParallelLogProbs.apply(  # type: ignore[no-untyped-call]  # torch's
        hidden.to(weight.dtype), weight, target_ids, head
    )
    return found


@dataclass(frozen=True, slots=True)
class _Head:
    """The output layer of this rank, but for its tensors."""

    vocab_start: int
    num_rows: int  # of the weight, those that stand for a token; padding is cut off, not masked
    tp_group: dist.ProcessGroup | None
    temperature: float
    chunk_tokens: int
    with_entropy: bool

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """Slices that cover the tokens, each of which is worked off at once."""
        # A shard of nothing but padding has nothing to add.
        if self.num_rows:
            # Of equal length: a short last one might take another kernel, and round otherwise.
            count = math.ceil(num_tokens / self.chunk_tokens)
            for i in range(count):
                yield slice(i * num_tokens // count, (i + 1) * num_tokens // count)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`[chunk, num_rows]` float32, scaled by the temperature; the caller may overwrite it."""
        logits = (hidden @ rows.t()).to(_compute_dtype(rows))
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def locate(self, target_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each target is a row of this rank, and which (0 where it is not)."""
        row = target_ids - self.vocab_start
        is_mine = (row >= 0) & (row < self.num_rows)
        return is_mine, torch.where(is_mine, row, 0)

    def all_reduce(self, stats: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce `stats` over the group in place; nothing to do without a group or tokens."""
        if self.tp_group is not None and stats.numel():
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
        """(log-probs, entropy or None), each `[t]`. Collective over the head's group."""
        maximum, target_logit, sum_exp, sum_exp_z = _shard_statistics(
            hidden, weight, target_ids, head
        )
        # Every rank summed relative to its own maximum, which is why the chunks need no collective.
        extremes = torch.stack([maximum, target_logit])
        head.all_reduce(extremes, dist.ReduceOp.MAX)
        global_maximum, target_logit = extremes.unbind()
        # (A shard without rows has maximum -inf and sums of 0; -inf * 0 would be nan.)
        shift = maximum - global_maximum if head.num_rows else torch.zeros_like(maximum)
        scale = shift.exp()
        sums = torch.stack([scale * sum_exp, scale * (sum_exp_z + shift * sum_exp)])
        head.all_reduce(sums, dist.ReduceOp.SUM)
        sum_exp, sum_exp_z = sums.unbind()

        log_sum_exp = sum_exp.log()
        log_probs = target_logit - global_maximum - log_sum_exp
        entropy = log_sum_exp - sum_exp_z / sum_exp if head.with_entropy else None
        ctx.head = head
        ctx.set_materialize_grads(False)
        # Maximum and log-sum stay apart: their float32 sum would drop the digits of the latter when
        # logits are large.
        ctx.save_for_backward(hidden, weight, target_ids, global_maximum, log_sum_exp, entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        """Gradients of `hidden` (partial over the group) and `weight`, where asked for."""
        hidden, weight, target_ids, maximum, log_sum_exp, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(maximum)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=maximum.dtype) if needs_weight else None
        rows = weight[: head.num_rows]
        for chunk in head.chunks(hidden.shape[0]):
            log_p = head.logits(hidden[chunk], rows)
            log_p.sub_(maximum[chunk, None]).sub_(log_sum_exp[chunk, None])
            grad_logits = _grad_logits(
                log_p,
                head.locate(target_ids[chunk]),
                grad_log_probs[chunk],
                None if grad_entropy is None else grad_entropy[chunk],
                None if entropy is None else entropy[chunk],
            )
            grad_logits = grad_logits.div_(head.temperature).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, rows, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight[: head.num_rows], grad_logits.t(), hidden[chunk])
            del log_p, grad_logits  # before the next chunk's
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None


def _shard_statistics(
    hidden: torch.Tensor, weight: torch.Tensor, target_ids: torch.Tensor, head: _Head
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Over this rank's rows, each `[t]`: max z, z of the target, sum e, sum e * (z - max z).

    e = exp(z - max z). The target's z is -inf where another rank holds it, as is max z where this
    one holds no row at all.
    """
    maximum = hidden.new_full(hidden.shape[:1], -math.inf, dtype=_compute_dtype(weight))
    target_logit = maximum.clone()
    sum_exp, sum_exp_z = torch.zeros_like(maximum), torch.zeros_like(maximum)
    rows = weight[: head.num_rows]
    for chunk in head.chunks(hidden.shape[0]):
        z = head.logits(hidden[chunk], rows)
        is_mine, row = head.locate(target_ids[chunk])
        target_logit[chunk] = torch.where(is_mine, z.gather(1, row[:, None])[:, 0], -math.inf)
        maximum[chunk] = z.amax(dim=1)
        z.sub_(maximum[chunk, None])
        e = z.exp() if head.with_entropy else z.exp_()
        sum_exp[chunk] = e.sum(dim=1)
        if head.with_entropy:
            sum_exp_z[chunk] = e.mul_(z).sum(dim=1)
        del z, e  # before the next chunk's
    return maximum, target_logit, sum_exp, sum_exp_z


def _grad_logits(
    log_p: torch.Tensor,
    located: tuple[torch.Tensor, torch.Tensor],
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient with respect to a chunk's scaled logits, `[chunk, num_rows]`; overwrites `log_p`."""
    if grad_entropy is None or entropy is None:
        grad = log_p.exp_().mul_(-grad_log_probs[:, None])
    else:
        p = log_p.exp()
        grad = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None])
        grad.add_(grad_log_probs[:, None]).mul_(p).neg_()
    is_mine, row = located
    return grad.scatter_add_(1, row[:, None], torch.where(is_mine, grad_log_probs, 0.0)[:, None])


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where `total` may be of a wider dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _compute_dtype(weight: torch.Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
