"""Balanced use of experts during RL: Megatron's balancing methods and their limits here.

Biases (arXiv 2408.15664, DeepSeek-V3): routers add an expert's bias to its score when they choose.
Every update raises the bias by --moe-router-bias-update-rate if the expert got fewer tokens of the
mini-batch than the mean of its layer, and lowers it if more. Auxiliary losses (arXiv 2101.03961)
add coefficient x experts x sum(f P), with f the share of choices and P the mean score of an expert:
per micro-batch (`aux_loss`), per sample (`seq_aux_loss`), or with f of the update so far
(`global_aux_loss`), averaged over all micro-batches. All methods count every token of prompt and
response, since an expert has to compute it, but no padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_rl.common.errors import UsageError

_BIAS, _TYPE = "--moe-router-bias-update-rate", "--moe-router-load-balancing-type"
_DEFAULT_RATE = 1e-3  # Megatron's --moe-router-bias-update-rate
_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_NO_BALANCING = f"drop it, or give {_BIAS} 0 and {_TYPE} none"


def losses(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the auxiliary losses in effect; `values` are Megatron's, by destination."""
    if not values.get("num_experts"):
        return ()
    kinds, coefficients = (
        each if isinstance(each, list) else [each]
        for each in (
            values.get("moe_router_load_balancing_type") or "none",
            values.get("moe_aux_loss_coeff") or 0.0,
        )
    )
    if len(coefficients) == 1:
        coefficients = coefficients * len(kinds)
    pairs = zip(kinds, coefficients, strict=False)
    return tuple(kind for kind, coefficient in pairs if kind in _LOSSES and coefficient)


def moves_biases(values: Mapping[str, Any]) -> bool:
    """Return whether updates move the biases of experts."""
    return bool(
        values.get("num_experts")
        and values.get("moe_router_enable_expert_bias")
        and values.get("moe_router_bias_update_rate", _DEFAULT_RATE)
    )


def cuda_graph_flag(values: Mapping[str, Any]) -> str:
    """Return the flag that enables CUDA graphs, to which no padding mask can be passed, or ""."""
    if values.get("enable_cuda_graph") or values.get("external_cuda_graph"):
        return "--enable-cuda-graph"
    graphs = values.get("cuda_graph_impl") or "none"
    return "" if graphs == "none" else f"--cuda-graph-impl {graphs}"


def balances(values: Mapping[str, Any]) -> bool:
    """Return whether any balancing is active, so that routers need the padding mask."""
    return bool(losses(values)) or moves_biases(values)


def check_balancing(values: Mapping[str, Any], max_tokens: int) -> None:
    """Raise UsageError if the requested balancing would count padding, or not count per sample.

    `max_tokens` is --rl-max-tokens-per-microbatch.
    """
    if not balances(values):
        return
    layers = values.get("mtp_num_layers")
    # Megatron's MTP layers get no padding mask under sequence parallelism.
    if against := f"--mtp-num-layers {layers}" if layers else cuda_graph_flag(values):
        raise UsageError(
            f"counts padding in the load of experts, which {balancing_flag(values)} evens out",
            flag=against,
            remedy=_NO_BALANCING,
        )
    if "seq_aux_loss" not in losses(values):
        return
    if max_tokens:
        raise UsageError(
            f"takes a row for a sample, and --rl-max-tokens-per-microbatch {max_tokens} packs "
            "several into one",
            flag=f"{_TYPE} seq_aux_loss",
            remedy="drop one of the two, or give aux_loss, which covers whole micro-batches",
        )
    if (size := values.get("micro_batch_size") or 1) > 1:
        raise UsageError(
            "divides by the mean length of a micro-batch's samples instead of each one's, which "
            f"--micro-batch-size {size} makes different",
            flag=f"{_TYPE} seq_aux_loss",
            remedy="give --micro-batch-size 1",
        )


def balancing_flag(values: Mapping[str, Any]) -> str:
    """Return the flag that enables balancing, as on a command line."""
    if kinds := losses(values):
        return f"{_TYPE} {kinds[0]}"
    return f"{_BIAS} {values.get('moe_router_bias_update_rate', _DEFAULT_RATE)}"


def check_bias_dtypes(values: Mapping[str, Any], dtypes: Mapping[str, str], folder: Any) -> None:
    """Raise UsageError if updates move biases that are not float32 in the checkpoint.

    Hand-over and exports use the checkpoint's `dtypes` (by tensor)."""
    if not moves_biases(values):
        return
    for tensor, dtype in dtypes.items():
        if dtype != "float32":
            raise UsageError(
                f"updates biases of experts in float32, and {tensor} in {folder} is {dtype}: the "
                "engine's would be rounded",
                flag=f"{_BIAS} {values.get('moe_router_bias_update_rate', _DEFAULT_RATE)}",
                remedy="give 0, or store these tensors as float32",
            )


def expert_biases(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the biases `[e]` float32 of the routers in this rank's model chunks, not copied."""
    biases: list[torch.Tensor] = []
    module: Any  # with the attributes of Megatron's router, where it is one
    for chunk in chunks:
        for module in chunk.modules():
            if getattr(module, "expert_bias", None) is not None:
                module._maintain_float32_expert_bias()
                biases.append(module.expert_bias.data)
    return biases
