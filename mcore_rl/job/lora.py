"""The flags of LoRA, checked before a model is built."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.errors import UsageError, as_flag, check_length
from mcore_rl.config import RLConfig
from mcore_rl.hybrid_engine.peft_export import CONFIG, check_adapter
from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.lora import (
    ADAPTERS,
    MERGED,
    VLLM_RANKS,
    Lora,
    resolve_lora,
    vllm_rank,
)
from mcore_rl.model.quantization import FP8
from mcore_rl.moe.balance import balancing_flag, cuda_graph_flag, moves_biases

# Megatron's flags by destination, and why they conflict with frozen weights and merged adapters.
_CLASHES = {
    "use_megatron_fsdp": "shards weights by rows, across which adapters cannot be merged",
    "fp8": "computes with weights in FP8, into which adapters cannot be merged",
    "fp4": "computes with weights in 4 bits, into which adapters cannot be merged",
    "mtp_num_layers": "trains multi-token-prediction layers, which have no adapters",
    "pretrained_checkpoint": "names weights, and those of the base come from --rl-hf-checkpoint",
    "dsa_indexer_loss_coeff": "trains indexers of sparse attention, which are frozen",
    "use_transformer_engine_op_fuser": "reads the weights of layers without running them",
    "delay_wgrad_compute": "computes gradients of weights when merged ones are gone",
    "cpu_offloading": "moves saved weights to the host, and merged ones are not saved",
}
_ROLLOUT = f"--rl-lora-rollout {ADAPTERS}"
_REMEDY = "drop it, or train all weights without --rl-lora-rank"


def check_lora(config: RLConfig, shape: ModelShape, values: Mapping[str, Any]) -> Lora | None:
    """Return the adapters of a job, None without LoRA; `values` are Megatron's by destination.

    Raises UsageError for an unknown target and for flags that LoRA cannot be combined with.
    """
    lora = resolve_lora(config.lora, shape)
    if lora is None:
        return None
    for dest, reason in _CLASHES.items():
        if value := values.get(dest):
            flag = as_flag(dest) if value is True else as_flag(dest, value)
            found = f"{reason}: it cannot be combined with --rl-lora-rank"
            raise UsageError(found, flag=flag, remedy=_REMEDY)
    if values.get("gradient_accumulation_fusion"):  # derived, except in a fork
        raise UsageError(
            "is not possible where kernels add gradients to parameters",
            flag=f"--rl-lora-rank {lora.rank}",
            remedy="pass --no-gradient-accumulation-fusion",
        )
    for reason, flag in _conflicts(values):
        if flag:
            raise UsageError(f"{reason} with --rl-lora-rank", flag=flag, remedy=_REMEDY)
    if config.lora.rollout == ADAPTERS:
        _check_adapters_of_engines(config, shape, lora)
    return lora


def _check_adapters_of_engines(config: RLConfig, shape: ModelShape, lora: Lora) -> None:
    """Raise UsageError if engines cannot apply adapters to the base."""
    for reason, is_so in _unserved(config, shape, lora):
        if is_so:
            raise UsageError(reason, flag=_ROLLOUT, remedy=f"give --rl-lora-rollout {MERGED}")
    for reason, flag in _untried(config):
        if flag:
            remedy = f"drop it, or give --rl-lora-rollout {MERGED}"
            raise UsageError(f"{reason} with {_ROLLOUT}", flag=flag, remedy=remedy)


def note_on_adapters(config: RLConfig, lora: Lora, placement: Placement) -> Iterator[str]:
    """Describe what weight syncs bring if they bring adapters alone, and what that keeps."""
    if config.lora.rollout != ADAPTERS:
        return
    adapters = placement.of_adapters(lora.rank, lora.targets).most_resident_bytes
    base = shown_bytes(placement.most_resident_bytes)
    asleep = "" if config.rollout.separate else ", and is in host memory while the engine sleeps"
    yield (
        f"weight syncs bring each rank of an engine at most {shown_bytes(adapters)} of "
        f"adapters; the base, {base}, is brought once{asleep}"
    )


def _unserved(config: RLConfig, shape: ModelShape, lora: Lora) -> Iterator[tuple[str, bool]]:
    """Yield what vLLM does not serve with adapters, and whether it is asked for."""
    yield "has no effect without engines", not config.has_engines
    yield "is not supported by --rl-rollout-servers", bool(config.rollout.servers)
    most = VLLM_RANKS[-1]
    too_high = f"needs LoRA layers of rank {lora.rank}, and vLLM has them up to rank {most}"
    yield too_high, vllm_rank(lora.rank) is None
    model = f"does not support {shape.architecture}"
    experts = f"{model}: with LoRA layers vLLM computes experts by other kernels"
    yield experts, shape.experts is not None
    recurrent = f"{model}, whose recurrent layers were not tried with vLLM's LoRA layers"
    yield recurrent, shape.delta_net is not None or shape.mamba is not None


def _untried(config: RLConfig) -> Iterator[tuple[str, str]]:
    """Yield a reason against a combination, and the flag that it is against or ""."""
    engine = config.engine
    float8 = f"--rl-rollout-dtype {FP8}" if engine.rollout_dtype == FP8 else ""
    yield "holds weights in FP8 blocks, which was not tried", float8
    drafts = f"--rl-speculate {engine.speculate}" if engine.speculate != "off" else ""
    yield "drafts tokens, which was not tried", drafts
    delta = "--rl-reshard-delta" if config.weight_sync.reshard_delta else ""
    yield "saves nothing, because all adapters change in each step,", delta


def _conflicts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a reason, and the flag that it is against or ""."""
    biases = balancing_flag(values) if moves_biases(values) else ""
    yield "changes biases of experts, which are frozen", biases
    yield "records a pass with merged weights, which are computed again", cuda_graph_flag(values)
    is_split = (
        values.get("mla_down_proj_fusion") and values.get("tensor_model_parallel_size", 1) > 1
    )
    fusion = "--mla-down-proj-fusion" if is_split else ""
    yield "divides two fused weights unevenly among tensor-parallel ranks", fusion
    name = values.get("ckpt_format", "torch_dist")
    saved = "" if name == "torch_dist" else f"--ckpt-format {name}"
    yield "does not save adapters by the layers of the Hugging Face model", saved


def check_lora_folders(config: RLConfig, lora: Lora, values: Mapping[str, Any]) -> None:
    """Check that the adapter to start from fits, and that the export replaces nothing else."""
    if (adapter := config.lora.adapter) is not None:
        if values.get("load"):
            raise UsageError(
                f"starts from an adapter, and --load {values['load']} from another one",
                flag=f"--rl-lora-adapter {adapter}",
                remedy="drop one of the two",
            )
        check_adapter(Path(adapter), lora)
    if (export := config.lora.export) is not None:
        target, flag = Path(os.path.realpath(export)), f"--rl-lora-export {export}"
        check_length(target, flag)
        is_empty = target.is_dir() and not any(target.iterdir())
        # A resumed run may have been killed after its export.
        again = values.get("load") and (target / CONFIG).is_file()
        if os.path.lexists(target) and not is_empty and not again:
            raise UsageError(
                "exists and would be replaced",
                flag=flag,
                remedy="remove it or name a new folder",
            )
