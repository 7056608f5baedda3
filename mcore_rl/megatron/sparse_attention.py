"""The indexers of sparse attention (DSA) in Megatron models: frozen, or trained by their own loss.

The choice of keys has no gradient, so the policy's loss does not train an indexer. GLM-5 (arXiv
2602.15763) freezes it in RL, which is the default here. DeepSeek-V3.2 (arXiv 2512.02556, section
2.1) trains it: `--dsa-indexer-loss-coeff` times the divergence KL(p || softmax(scores)), where p is
the mean of the attention's weights over its heads; with `--dsa-indexer-use-sparse-loss` over the
chosen keys only. It is a mean over the prompt and response tokens of a mini-batch, summed over
layers, for any micro-batches and any layout. Hidden states and attention get no gradient from it.

Engine and training choose keys independently, and vLLM does not return its choice. vLLM's kernels
score in FP8. `comparing_choices` measures how much of Megatron's choice that rounding replaces.

Shape legend: s queries, t keys, b rows, h heads, d size of a head, k chosen keys of a query.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_GROUP = 128  # elements of a head that share a scale in vLLM's kernels
_LARGEST = 448.0  # of float8_e4m3fn


@dataclass(slots=True)
class Choices:
    """Keys that indexers chose for queries that see more keys than they may use."""

    chosen: float = 0.0
    replaced: float = 0.0  # of these, keys that are not chosen by scores of FP8


def prepare_indexers(model: torch.nn.Module) -> None:
    """Exclude the model's indexers from training, unless its configuration has their loss.

    Without gradients alone AdamW's weight decay would still change them.
    """
    config: Any = model.config
    if not has_indexers(config):
        return
    if not trains_indexers(config):
        for name, parameter in model.named_parameters():
            if ".core_attention.indexer." in name:
                parameter.requires_grad_(False)
        return
    # Sums instead of means over a micro-batch. One copy, since layers share choices through it.
    summing = copy.copy(config)
    summing.calculate_per_token_loss = True
    for module in model.modules():
        if hasattr(module, "requires_dsa_inputs"):
            module.config = summing


def trains_indexers(config: Any) -> bool:
    """Return whether the model of a Megatron configuration, or of its arguments, trains them."""
    return has_indexers(config) and bool(config.dsa_indexer_loss_coeff)


def has_indexers(config: Any) -> bool:
    """Return whether the model of a Megatron configuration, or of its arguments, has any."""
    # Releases before 0.19 may lack the field.
    return getattr(config, "experimental_attention_variant", None) == "dsa"


def scale_indexer_losses(
    chunks: Sequence[torch.nn.Module], *, num_micro_batches: int, dp_size: int, num_tokens: float
) -> None:
    """Scale the gradients of the next pass such that they are of a mean over `num_tokens`.

    The schedule divides by the number of micro-batches, and DDP by that of data-parallel ranks.
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossAutoScaler,
    )

    factor = num_micro_batches * dp_size / num_tokens

    def set_scale(scale: torch.Tensor) -> None:
        DSAIndexerLossAutoScaler.set_loss_scale(scale * factor)

    chunk: Any
    for chunk in chunks:
        chunk.config.experimental_attention_variant_loss_scale_func = set_scale


def taken_indexer_losses(device: torch.device) -> torch.Tensor:
    """Return this rank's sum of the losses of all layers since the last call, float64."""
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossLoggingHelper,
    )

    values = DSAIndexerLossLoggingHelper.tracker.get("values")
    if values is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    total: torch.Tensor = values.double().sum()
    DSAIndexerLossLoggingHelper.clean_loss_in_tracker()
    return total.to(device)


@contextlib.contextmanager
def comparing_choices(counts: Choices) -> Iterator[None]:
    """Count the choices of all forward passes within. Kernels (`--dsa-kernel-backend`) choose
    elsewhere and are not counted."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    choose = dsa.fused_qk_topk_naive

    def choose_twice(
        q: torch.Tensor, k: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores, chosen = choose(q, k, *args, **options)
        if chosen.shape[-1] < k.shape[0]:
            with torch.no_grad():
                _, other = choose(in_float8(q), in_float8(k), *args, **options)
                _count(counts, scores, chosen, other)
        return scores, chosen

    dsa.fused_qk_topk_naive = choose_twice
    try:
        yield
    finally:
        dsa.fused_qk_topk_naive = choose


def _count(
    counts: Choices, scores: torch.Tensor, chosen: torch.Tensor, other: torch.Tensor
) -> None:
    """Count for `scores` `[b, s, t]`, -inf where a key is not visible, and choices `[b, s, k]`."""
    is_free = scores.isfinite().sum(-1) > chosen.shape[-1]
    in_other = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, other.clamp(min=0), True)
    is_kept = in_other.gather(-1, chosen.clamp(min=0))
    counts.chosen += float(is_free.sum()) * chosen.shape[-1]
    counts.replaced += float((~is_kept & is_free.unsqueeze(-1)).sum())


def in_float8(x: torch.Tensor) -> torch.Tensor:
    """Return `[..., d]` rounded to FP8 with a scale, a power of two, for every 128 elements."""
    groups = x.float().unflatten(-1, (-1, _GROUP)) if x.shape[-1] % _GROUP == 0 else x.float()
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = (largest / _LARGEST).log2().ceil().exp2()
    rounded = (groups / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.reshape(x.shape).to(x.dtype)
