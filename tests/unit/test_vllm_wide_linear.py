"""Linear layers of vLLM with a widened weight, whatever this machine's CPU can do.

In a process of its own, because the repair stays applied.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import torch
from vllm.model_executor.layers import utils
from mcore_rl.patches.vllm import wide_linear

asked = []
utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: asked.append(layer)
wide_linear.widened_dtypes = lambda: frozenset({torch.bfloat16})
wide_linear.require_parameters = lambda *unused: None  # of the stand-in for upstream's
assert wide_linear.needed()
wide_linear.apply()


def layer_of(shape, dtype, device="cpu"):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(shape, device=device).to(dtype), False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer


torch.manual_seed(0)
layer = layer_of((5, 7), torch.bfloat16)
copy = layer.cpu_linear.__closure__
assert not any(isinstance(cell.cell_contents, torch.Tensor) for cell in copy), "copied unasked"
x, bias = torch.randn(3, 7).bfloat16(), torch.randn(5).bfloat16()
exact = x.double() @ layer.weight.double().t()
assert torch.equal(layer.cpu_linear(x, layer.weight, None), exact.float().bfloat16())
with_bias = layer.cpu_linear(x, layer.weight, bias)
assert torch.equal(with_bias, (exact + bias.double()).float().bfloat16())
assert layer.weight.numel() == 35, "the weight is needed by latent attention"
assert not asked
others = [
    layer_of((5, 7), torch.float32), layer_of((2, 5, 7), torch.bfloat16),
    layer_of((5, 7), torch.bfloat16, "meta"),
]
assert asked == others and not any(hasattr(layer, "cpu_linear") for layer in others)
print("same")
"""


@pytest.mark.slow
def test_products_are_those_of_float32_rounded_once_and_others_are_left_to_vllm() -> None:
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split()[-1] == "same"
