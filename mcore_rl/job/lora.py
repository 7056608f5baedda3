"""The flags of LoRA, checked before a model is built."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError, as_flag
from mcore_rl.config import RLConfig
from mcore_rl.hybrid_engine.peft_export import CONFIG, check_adapter
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.lora import Lora, resolve_lora
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
    return lora


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
        target = Path(os.path.realpath(export))
        is_empty = target.is_dir() and not any(target.iterdir())
        # A resumed run may have been killed after its export.
        again = values.get("load") and (target / CONFIG).is_file()
        if os.path.lexists(target) and not is_empty and not again:
            raise UsageError(
                "exists and would be replaced",
                flag=f"--rl-lora-export {export}",
                remedy="remove it or name a new folder",
            )
