"""vLLM's prefill of latent attention on CPU, with our repair and without: the same numbers.

In a process of its own, because the repair stays applied.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from mcore_rl.patches.vllm import mla_prefill_together
from mcore_rl.patches.vllm.mla_prefill_together import batches

PROBE = """
import torch
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
from mcore_rl.patches.vllm import mla_prefill_together

backend = object.__new__(CPUSDPAMLAPrefillBackend)
backend.scale = 0.3
calls = []
matmul = torch.matmul
torch.matmul = lambda *args: calls.append(1) or matmul(*args)


def found(q_lengths, kv_lengths, causal, with_sums):
    torch.manual_seed(1)
    bounds = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (q_lengths, kv_lengths)]
    q = torch.randn(sum(q_lengths), 4, 24)
    k, v = torch.randn(sum(kv_lengths), 4, 24), torch.randn(sum(kv_lengths), 4, 16)
    calls.clear()
    result = backend._ragged_sdpa(q, k, v, *bounds, causal, with_sums)
    return (result if with_sums else (result,)), len(calls)


cases = {  # queries, keys, products of all
    "equal": ([8] * 6, [8] * 6, 2),
    "two kinds": ([8, 8, 3, 3, 3], [8, 8, 3, 3, 3], 4),
    "context": ([2, 2, 5], [16, 16, 32], 4),
    "no context": ([2, 2, 5], [16, 0, 32], 6),
    "one": ([7], [7], 2),
    "bounded": ([8] * 6, [8] * 6, 4),
}
variants = [
    (case, causal, with_sums)
    for case, (queries, keys, _) in cases.items()
    for causal in ([True, False] if queries == keys else [False])
    for with_sums in (True, False)
]
before = [found(*cases[case][:2], causal, sums)[0] for case, causal, sums in variants]
mla_prefill_together.apply()
for (case, causal, with_sums), expected in zip(variants, before, strict=True):
    mla_prefill_together.MOST_SCORES = 4 * 8 * 8 * 3 if case == "bounded" else 2**22
    got, products = found(*cases[case][:2], causal, with_sums)
    assert products == cases[case][2], (case, products)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
print("same")
"""


@pytest.mark.slow
def test_requests_together_give_the_numbers_of_each_alone_with_fewer_products() -> None:
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split()[-1] == "same"


def test_batches_are_bounded_and_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_prefill_together, "MOST_SCORES", 100)
    found = list(batches([2, 2, 2, 2, 9, 2], [4, 4, 4, 4, 9, 4], num_heads=4))
    assert found == [(3, 2, 4), (1, 2, 4), (1, 9, 9), (1, 2, 4)]
