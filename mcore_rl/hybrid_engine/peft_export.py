"""Adapters as folders in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

The tensors are named by the layers of the Hugging Face model, routed experts one by one, as vLLM
reads them. PEFT converts those of experts when it loads them into a model that stacks its experts.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError
from mcore_rl.common.readers import InvalidData, parse_json
from mcore_rl.hybrid_engine.plan.transfer_plan import make_plan
from mcore_rl.hybrid_engine.transfer.transfer import Transfer
from mcore_rl.megatron.lora import Adapter, adapters_of
from mcore_rl.model.boxes import Box, extent, full_box, relative, slices
from mcore_rl.model.lora import Lora, factor_shapes, is_expert
from mcore_rl.model.tensors import TensorInfo

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BUCKET_BYTES = 64 << 20
_FLAG = "--rl-lora-adapter"


def export_adapter(chunks: Sequence[torch.nn.Module], lora: Lora, base: Path, target: Path) -> None:
    """Write the adapters of all ranks to `target`, replacing it. Collective.

    The first rank receives them in parts and holds all of them on the host, since PEFT reads one
    file. `base` is the folder of the base model, which adapter_config.json names.
    """
    factors = _factors(chunks)
    dtype = next(chunks[0].parameters()).dtype  # a stage may have no adapters
    tensors = {
        name: TensorInfo(shape, str(dtype).removeprefix("torch."), dtype.itemsize)
        for name, shape in factor_shapes(lora).items()
    }
    have = objects.all_gather({name: (box,) for name, (box, _) in factors.items()})
    whole = {name: (full_box(info.shape),) for name, info in tensors.items()}
    need = [whole if rank == 0 else {} for rank in range(dist.get_world_size())]
    plan = make_plan(tensors, order=list(tensors), have=have, need=need)

    def read(name: str, box: Box) -> torch.Tensor:
        held, data = factors[name]
        return data[slices(relative(box, held))]

    transfer = Transfer(plan, tensors, bucket_bytes=_BUCKET_BYTES, device="cpu")
    filled = {}
    if dist.get_rank() == 0:
        filled = {name: torch.empty(info.shape, dtype=dtype) for name, info in tensors.items()}
        for name, (box, data) in factors.items():
            filled[name][slices(box)] = data
    for name, pieces in transfer.stream(read):
        for box, data in pieces:
            filled[name][slices(box)] = data.view(extent(box))
    transfer.close()
    if dist.get_rank() == 0:
        _write(filled, lora, base, Path(os.path.realpath(target)))
        if mixes_experts(lora):
            logger.warning(
                "%s has adapters of routed experts and of other MLPs: PEFT leaves the latter out",
                target,
            )
    objects.barrier()


def mixes_experts(lora: Lora) -> bool:
    """Return whether routed experts and other MLPs have adapters of the same names.

    PEFT 0.21 looks for all of these in the stacked experts of transformers 5."""
    last_parts = [
        {layer.rsplit(".", 1)[-1] for layer in lora.modules if is_expert(layer) == of_expert}
        for of_expert in (True, False)
    ]
    return bool(last_parts[0] & last_parts[1])


def _factors(chunks: Sequence[torch.nn.Module]) -> dict[str, tuple[Box, torch.Tensor]]:
    """Return this rank's part of each tensor of the file: its box, and the values on the host."""
    return {
        factor.name: (factor.box, factor.data.cpu())
        for adapter in _adapters(chunks)
        for factor in adapter.factors()
    }


def _adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[Adapter]:
    for chunk in chunks:
        adapters = adapters_of(chunk)
        assert adapters is not None, "a model without adapters"
        yield from adapters.by_tensor.values()


def _write(filled: dict[str, torch.Tensor], lora: Lora, base: Path, target: Path) -> None:
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(filled, partial / WEIGHTS, metadata={"format": "pt"})
    (partial / CONFIG).write_text(json.dumps(adapter_config(lora, base), indent=2) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def adapter_config(lora: Lora, base: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json. `base` is the folder of the base model."""
    return {
        "base_model_name_or_path": str(base),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": list(lora.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def check_adapter(folder: Path, lora: Lora) -> None:
    """Raise UsageError unless `folder` has an adapter with the rank, alpha and layers of `lora`."""
    flag = f"{_FLAG} {folder}"
    try:
        config = parse_json((folder / CONFIG).read_bytes())
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (OSError, InvalidData, SafetensorError) as error:
        raise UsageError(
            f"is not an adapter in PEFT's format ({error})",
            flag=flag,
            remedy=f"name a folder with {CONFIG} and {WEIGHTS}",
        ) from error
    _check_config(config if isinstance(config, dict) else {}, lora, flag)
    expected = factor_shapes(lora)
    for name in sorted(found.keys() ^ expected.keys() | _other_shapes(found, expected)):
        raise UsageError(
            f"has {name} of shape {found.get(name, 'none')}, and --rl-lora-targets describe one of "
            f"shape {expected.get(name, 'none')}",
            flag=flag,
            remedy="give the targets of that adapter, or another adapter",
        )


def _other_shapes(found: Mapping[str, Any], expected: Mapping[str, Any]) -> set[str]:
    return {name for name in found.keys() & expected.keys() if found[name] != expected[name]}


def _check_config(config: Mapping[str, Any], lora: Lora, flag: str) -> None:
    for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise UsageError(f"uses {key}, which is not supported", flag=flag, remedy="drop it")
    for key, value, ours in (
        ("r", lora.rank, f"--rl-lora-rank {lora.rank}"),
        ("lora_alpha", lora.alpha, f"--rl-lora-alpha {lora.alpha:g}"),
    ):
        if config.get(key) != value:
            raise UsageError(
                f"has {key} {config.get(key)}, which {ours} contradicts",
                flag=flag,
                remedy="give the adapter's",
            )


@torch.no_grad()
def load_adapter(chunks: Sequence[torch.nn.Module], folder: Path) -> None:
    """Fill this rank's adapters from a folder that `check_adapter` accepts. Not collective."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for adapter in _adapters(chunks):
            for factor in adapter.factors():
                factor.data.copy_(file.get_slice(factor.name)[slices(factor.box)])
