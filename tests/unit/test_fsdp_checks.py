"""Megatron-FSDP's flags: what is refused, with one sentence that names the flag and the way out."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import WITHOUT_CUDA, Platform
from mcore_rl.flags.fsdp import check_fsdp, check_fsdp_machine
from mcore_rl.megatron import adapter as megatron_adapter

GOOD = {
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "ckpt_format": "fsdp_dtensor",
    "gradient_accumulation_fusion": False,
}
AVERAGING = {"ddp_average_in_collective": True, "num_experts": 8}
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


def check(changes: dict[str, Any], environment: dict[str, str] = QUEUES, **options: Any) -> None:
    values = {**GOOD, **changes}
    check_fsdp(values)
    check_fsdp_machine(values, environment, platform=Platform(cuda=True, **options))


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"data_parallel_sharding_strategy": "optim"}, {}),
        ({"data_parallel_sharding_strategy": "optim_grads"}, {}),
        ({"data_parallel_sharding_strategy": "optim_grads_params"}, {}),
        ({"gradient_accumulation_fusion": True}, {"transformer_engine": (2, 10)}),
        ({"gradient_accumulation_fusion": True}, {"transformer_engine": (3, 0, 1)}),
        # Averaging divides the gradients of experts and of the rest alike.
        ({**AVERAGING, "expert_tensor_parallel_size": 1}, {}),
        ({**AVERAGING, "tensor_model_parallel_size": 2}, {}),
        ({"ddp_average_in_collective": True, "tensor_model_parallel_size": 2}, {}),
    ],
)
def test_flags_that_go_together_are_accepted(
    changes: dict[str, Any], options: dict[str, Any]
) -> None:
    check(changes, **options)


def test_fsdp_checks_are_skipped_without_the_flag() -> None:
    check_fsdp({})
    check_fsdp({"data_parallel_sharding_strategy": "optim_grads_params"})
    check_fsdp_machine({}, {}, platform=Platform(cuda=True))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"use_megatron_fsdp": False, "data_parallel_sharding_strategy": "optim"},
            ["optim has no effect", "drop the strategy"],
        ),
        ({"data_parallel_sharding_strategy": "no_shard"}, ["shards nothing", "give one of optim"]),
        ({"ckpt_format": "torch_dist"}, ["add --ckpt-format fsdp_dtensor"]),
        ({"pipeline_model_parallel_size": 2}, ["--pipeline-model-parallel-size 2", "drop one"]),
        (
            {"tensor_model_parallel_size": 2, "softmax_type": "learnable"},  # gpt-oss
            ["--tensor-model-parallel-size 2", "attention sinks", "drop one"],
        ),
        (
            {"num_distributed_optimizer_instances": 2},
            ["--num-distributed-optimizer-instances 2", "must be 1"],
        ),
        (
            {"outer_dp_sharding_strategy": "optim"},
            ["--outer-dp-sharding-strategy optim", "drop it"],
        ),
        ({"fp8_param_gather": True}, ["--fp8-param-gather", "float8", "drop one"]),
        ({"fp4_param_gather": True}, ["--fp4-param-gather", "4 bits", "drop one"]),
        ({"optimizer_cpu_offload": True}, ["--optimizer-cpu-offload", "drop one"]),
        (
            {**AVERAGING, "expert_model_parallel_size": 2},
            ["--ddp-average-in-collective", "experts", "drop one"],
        ),
        (
            {**AVERAGING, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            ["--ddp-average-in-collective", "experts", "drop one"],
        ),
        (
            {"gradient_accumulation_fusion": True, "data_parallel_sharding_strategy": "optim"},
            ["--data-parallel-sharding-strategy optim", "add --no-gradient-accumulation-fusion"],
        ),
        (
            {"gradient_accumulation_fusion": True},
            ["Transformer Engine 2.10", "add --no-gradient-accumulation-fusion"],
        ),
    ],
)
def test_flags_that_do_not_go_together_are_named(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        check(changes)
    message = str(error.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message


def test_a_missing_strategy_is_megatrons_default() -> None:
    values = {name: value for name, value in GOOD.items() if "strategy" not in name}
    check_fsdp(values)


@pytest.mark.parametrize("environment", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}])
def test_one_queue_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="CUDA_DEVICE_MAX_CONNECTIONS=1; unset it"):
        check({}, environment)


def test_fusion_is_megatrons_default() -> None:
    values = {name: value for name, value in GOOD.items() if "fusion" not in name}
    with pytest.raises(UsageError, match="--no-gradient-accumulation-fusion"):
        check_fsdp_machine(values, QUEUES, platform=Platform(cuda=True, transformer_engine=(2, 9)))
    check_fsdp_machine(values, QUEUES, platform=WITHOUT_CUDA)  # there the flag is derived


def test_copy_connections_default_to_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one queue that Megatron asks for is for kernels."""
    copies = "CUDA_DEVICE_MAX_COPY_CONNECTIONS"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv(copies, "")  # so that it is put back
    monkeypatch.delenv(copies)
    megatron_adapter.prepare()
    assert os.environ[copies] == "8"
    monkeypatch.setenv(copies, "1")
    megatron_adapter.prepare()
    assert os.environ[copies] == "1"
