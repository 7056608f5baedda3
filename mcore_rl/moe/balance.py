"""Even use of experts while RL learns: Megatron's balancing, and what of it can be had here.

Biases (arXiv 2408.15664, DeepSeek-V3): every update moves an expert's bias, by which routers
choose, up by --moe-router-bias-update-rate if it got fewer tokens of the mini-batch than the mean
of its layer, down if more. Auxiliary losses (arXiv 2101.03961) add, for f the share of choices and
P the mean score of an expert, coefficient x experts x sum(f P): of a micro-batch (`aux_loss`), a
sample (`seq_aux_loss`), or with f of the update so far (`global_aux_loss`); the mean over all
micro-batches counts. In each every token of a sample votes, of prompt and response alike, for its
expert has to compute it; padding does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_rl.common.errors import UsageError

_BIAS, _TYPE = "--moe-router-bias-update-rate", "--moe-router-load-balancing-type"
_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_NO_BALANCING = f"drop it, or give {_BIAS} 0 and {_TYPE} none"


def losses(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The auxiliary losses that have an effect. `values` are Megatron's, by destination."""
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
    """Whether updates move the biases of experts."""
    return bool(
        values.get("num_experts")
        and values.get("moe_router_enable_expert_bias")
        and values.get("moe_router_bias_update_rate", 1e-3)  # Megatron's default
    )


def in_the_way_of_padding(values: Mapping[str, Any]) -> str:
    """The flag with which routers are not told of padding, or ""."""
    if values.get("enable_cuda_graph") or values.get("external_cuda_graph"):
        return "--enable-cuda-graph"
    graphs = values.get("cuda_graph_impl") or "none"
    return "" if graphs == "none" else f"--cuda-graph-impl {graphs}"


def balances(values: Mapping[str, Any]) -> bool:
    """Whether anything does, for which routers must be told of padding."""
    return bool(losses(values)) or moves_biases(values)


def check_balancing(values: Mapping[str, Any], max_tokens: int) -> None:
    """UsageError where what is asked for would count padding, or something else than samples.

    `max_tokens` is --rl-max-tokens-per-microbatch.
    """
    if not balances(values):
        return
    layers = values.get("mtp_num_layers")
    # Megatron's MTP layers cannot be told of padding under sequence parallelism.
    if against := f"--mtp-num-layers {layers}" if layers else in_the_way_of_padding(values):
        raise UsageError(
            f"counts padding in the load of experts, which {asked(values)} evens out",
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
            remedy="drop one of the two, or give aux_loss, which is of whole micro-batches",
        )
    if (size := values.get("micro_batch_size") or 1) > 1:
        raise UsageError(
            "divides by the mean length of a micro-batch's samples instead of the length of each, "
            f"which --micro-batch-size {size} makes different",
            flag=f"{_TYPE} seq_aux_loss",
            remedy="give --micro-batch-size 1",
        )


def asked(values: Mapping[str, Any]) -> str:
    """The flag that balances, as on a command line."""
    if kinds := losses(values):
        return f"{_TYPE} {kinds[0]}"
    return f"{_BIAS} {values.get('moe_router_bias_update_rate', 1e-3)}"


def check_bias_dtypes(values: Mapping[str, Any], dtypes: Mapping[str, str], folder: Any) -> None:
    """Biases that updates move must be of float32 in the checkpoint, whose `dtypes` by tensor are
    those of the hand-over and of exports; UsageError if they are not."""
    if not moves_biases(values):
        return
    for tensor, dtype in dtypes.items():
        if dtype != "float32":
            raise UsageError(
                f"moves biases of experts in float32, and {tensor} in {folder} is {dtype}, to "
                "which the engine's would be rounded",
                flag=f"{_BIAS} {values.get('moe_router_bias_update_rate', 1e-3)}",
                remedy="give 0, or store these tensors as float32",
            )


def expert_biases(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """The biases `[e]` float32 of the routers in model chunks on this rank, where they stay."""
    found: list[torch.Tensor] = []
    module: Any  # with the attributes of Megatron's router, where it is one
    for chunk in chunks:
        for module in chunk.modules():
            if getattr(module, "expert_bias", None) is not None:
                module._maintain_float32_expert_bias()
                found.append(module.expert_bias.data)
    return found
