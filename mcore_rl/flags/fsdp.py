"""Megatron-FSDP's flags, checked before a model is built.

Megatron asserts on some of them, late and without a remedy. It accepts others that would hand over
or save something else than what RL trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.common.errors import UsageError, as_flag
from mcore_rl.common.platform import Platform

_DEFAULT = "optim_grads_params"  # Megatron's
_SHARDING = ("optim", "optim_grads", _DEFAULT)
_FLAG = "--use-megatron-fsdp"

# Flags by destination, and why they conflict with Megatron-FSDP.
_CLASHES = {
    "fp8_param_gather": "keeps parameters in float8, which is not handed over",
    "fp4_param_gather": "keeps parameters in 4 bits, which is not handed over",
    "async_save": "cannot write in the background",
    "optimizer_cpu_offload": "keeps copies of the parameters that nothing brings up to date",
}


def check_fsdp(values: Mapping[str, Any]) -> None:
    """Raise UsageError for flags that conflict with Megatron-FSDP, or that it lacks.

    `values` are Megatron's by destination, either the given ones or all.
    """
    strategy = values.get("data_parallel_sharding_strategy", _DEFAULT)
    if not values.get("use_megatron_fsdp"):
        if strategy != _DEFAULT:
            raise UsageError(
                f"has no effect without {_FLAG}",
                flag=f"--data-parallel-sharding-strategy {strategy}",
                remedy="add that or drop the strategy",
            )
        return
    if strategy not in _SHARDING:
        raise UsageError(
            f"with --data-parallel-sharding-strategy {strategy} shards nothing and cannot be saved",
            flag=_FLAG,
            remedy=f"give one of {', '.join(_SHARDING)}, or drop {_FLAG}",
        )
    if values.get("ckpt_format") != "fsdp_dtensor":
        raise UsageError(
            "saves in a format of its own", flag=_FLAG, remedy="add --ckpt-format fsdp_dtensor"
        )
    _check_layout(values)
    for dest, reason in _CLASHES.items():
        if values.get(dest):
            raise UsageError(
                f"{reason} with {_FLAG}", flag=as_flag(dest), remedy="drop one of the two"
            )


def check_fsdp_machine(
    values: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    platform: Platform,
) -> None:
    """Raise UsageError for what Megatron-FSDP cannot do on this machine; `values` as above."""
    if not values.get("use_megatron_fsdp"):
        return
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "1") == "1":
        raise UsageError(
            "needs more than one queue to the device, and the environment has "
            "CUDA_DEVICE_MAX_CONNECTIONS=1",
            flag=_FLAG,
            remedy="unset it, or set it to 8",
        )
    is_fused = platform.cuda and values.get("gradient_accumulation_fusion", True)
    if is_fused and values.get("data_parallel_sharding_strategy") == "optim":
        raise UsageError(
            "keeps only the last micro-batch's gradients when kernels add them up",
            flag="--data-parallel-sharding-strategy optim",
            remedy="add --no-gradient-accumulation-fusion or choose another strategy",
        )
    if is_fused and (platform.transformer_engine or (0,)) < (2, 10):
        raise UsageError(
            "adds up gradients in the kernels of Transformer Engine 2.10 or later only",
            flag=_FLAG,
            remedy="add --no-gradient-accumulation-fusion",
        )


def _check_layout(values: Mapping[str, Any]) -> None:
    pp_size = values.get("pipeline_model_parallel_size", 1)
    if pp_size > 1:
        raise UsageError(
            f"does not go with {_FLAG}, which shards over all ranks but those of TP and EP",
            flag=f"--pipeline-model-parallel-size {pp_size}",
            remedy="drop one of the two",
        )
    tp_size = values.get("tensor_model_parallel_size", 1)
    if tp_size > 1 and values.get("softmax_type") == "learnable":
        raise UsageError(
            "gives the gradient of a model with attention sinks and biases too small a norm with "
            f"{_FLAG}",
            flag=f"--tensor-model-parallel-size {tp_size}",
            remedy="drop one of the two",
        )
    etp_size = values.get("expert_tensor_parallel_size") or tp_size
    expert_ranks = etp_size * values.get("expert_model_parallel_size", 1)
    averages = values.get("ddp_average_in_collective") and values.get("num_experts")
    if averages and expert_ranks != tp_size:
        raise UsageError(
            f"with {_FLAG} averages the gradients of experts over their replicas, not over all "
            "data-parallel ranks",
            flag="--ddp-average-in-collective",
            remedy="drop one of the two",
        )
    if (instances := values.get("num_distributed_optimizer_instances", 1)) > 1:
        raise UsageError(
            f"is not supported with {_FLAG}",
            flag=f"--num-distributed-optimizer-instances {instances}",
            remedy="it must be 1",
        )
    if (outer := values.get("outer_dp_sharding_strategy", "no_shard")) != "no_shard":
        raise UsageError(
            f"shards over several optimizer instances, which are not supported with {_FLAG}",
            flag=f"--outer-dp-sharding-strategy {outer}",
            remedy="drop it",
        )
