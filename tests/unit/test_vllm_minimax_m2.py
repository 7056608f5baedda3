"""What vLLM lacks for MiniMax-M2, a router on CPU and a loader's name: with our repairs it has."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own, because the repairs stay applied; it prints what happens before and after
# they are.
PROBE = """
import functools, json, torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.model_loader.reload import layerwise
from mcore_rl.patches.vllm import loaders_without_a_name, sigmoid_router_on_cpu

torch.manual_seed(0)
bias, logits = torch.randn(8), torch.randn(16, 8)
scores = logits.sigmoid()
chosen = (scores + bias).topk(3).indices.sort().values
weights = scores.gather(1, chosen)
weights /= weights.sum(1, keepdim=True)
tensor = torch.zeros(2)
tensor.weight_loader = functools.partial(print, end="")

def routed():
    router = CPURouter(3, 8, scoring_func="sigmoid", e_score_correction_bias=bias)
    found, ids = router._compute_routing(None, logits, None)
    order = ids.long().argsort()
    assert torch.equal(ids.long().gather(1, order), chosen)
    return float((found.gather(1, order) - weights).abs().max())

def loader_found():
    return layerwise._get_original_loader(tensor) is tensor.weight_loader

def tried(function):
    try:
        return function()
    except Exception as error:
        return type(error).__name__

print(json.dumps([*map(tried, (routed, loader_found)), loaders_without_a_name.needed()]))
sigmoid_router_on_cpu.apply()
loaders_without_a_name.apply()
softmax = CPURouter(3, 8)
assert not softmax.use_grouped_topk
print(json.dumps([*map(tried, (routed, loader_found))]))
"""


@pytest.mark.slow
def test_router_and_loader_of_minimax_m2_work_with_the_patches_only() -> None:
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    before, after = (json.loads(line) for line in run.stdout.splitlines()[-2:])
    assert before == ["AssertionError", "AttributeError", True]
    assert after[0] <= 1e-6 and after[1] is True
