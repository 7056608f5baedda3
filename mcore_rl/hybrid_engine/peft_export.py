"""Adapters as folders in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

The tensors are named by the layers of the Hugging Face model, routed experts one by one, as vLLM
reads them. PEFT converts those of experts when it loads them into a model that stacks its experts.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
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
from mcore_rl.common.readers import InvalidData, open_regular, parse_json, read_regular
from mcore_rl.common.user_code import shortened
from mcore_rl.hybrid_engine.plan.transfer_plan import make_plan
from mcore_rl.hybrid_engine.transfer.transfer import Transfer
from mcore_rl.megatron.lora import Adapter, adapters_of
from mcore_rl.model.boxes import Box, extent, full_box, relative, slices
from mcore_rl.model.config_json import read_model_shape
from mcore_rl.model.lora import Lora, factor_shapes
from mcore_rl.model.peft_format import (
    MERGE_IT,
    PeftConfig,
    Stored,
    find_factors,
    left_out_by_peft,
    read_config,
    renamed,
)
from mcore_rl.model.tensors import TensorInfo

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Beginnings of names in the file for a text model, and for that of a multimodal one.
_IN_TEXT, _IN_WHOLE = "base_model.model.model.", "base_model.model.model.language_model."
_BUCKET_BYTES = 64 << 20
_FLAG = "--rl-lora-adapter"
_MAX_CONFIG_BYTES = 1 << 20
_DTYPES = ("F64", "F32", "F16", "BF16")  # of safetensors


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
        shape = read_model_shape(base)
        if shape.is_multimodal:  # where transformers has the layers of its text model
            filled = {name.replace(_IN_TEXT, _IN_WHOLE, 1): data for name, data in filled.items()}
        config = adapter_config(lora, base, is_multimodal=shape.is_multimodal)
        _write(filled, config, Path(os.path.realpath(target)))
        if left_out := left_out_by_peft(lora, shape.architecture):
            logger.warning("%s: of its adapters PEFT does not load those of %s", target, left_out)
    objects.barrier()


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


def _write(filled: dict[str, torch.Tensor], config: Mapping[str, Any], target: Path) -> None:
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(filled, partial / WEIGHTS, metadata={"format": "pt"})
    (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def adapter_config(lora: Lora, base: Path, *, is_multimodal: bool = False) -> dict[str, Any]:
    """Return the content of adapter_config.json. `base` is the folder of the base model."""
    # PEFT looks for layers by the names that transformers gives them.
    names = sorted({*lora.targets, *(renamed(f".{t}")[1:] for t in lora.targets)})
    # The layers of a multimodal model's tower may have the same names.
    pattern = rf".*\.language_model\..*\.({'|'.join(map(re.escape, names))})"
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
        "target_modules": pattern if is_multimodal else names,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def check_adapter(folder: Path, lora: Lora) -> None:
    """Raise UsageError unless `folder` has an adapter with the rank, alpha and layers of `lora`.

    It reads all values, one tensor at a time.
    """
    flag = f"{_FLAG} {folder}"
    try:
        config = _config(folder, lora, flag)
        open_regular(folder / WEIGHTS).close()
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            factors = find_factors(lora, config, shapes)
            _check_names(factors, lora, shapes, flag)
            for name in shapes:
                _check_values(name, file, flag)
            for stored in {each.name: each for each in factors.values() if each.ranks[0]}.values():
                _check_pair(stored, file, flag)
    except (OSError, InvalidData, SafetensorError) as error:
        raise UsageError(
            f"is not an adapter in PEFT's format ({shortened(str(error))})",
            flag=flag,
            remedy=f"name a folder with {CONFIG} and {WEIGHTS}",
        ) from error


def _config(folder: Path, lora: Lora, flag: str) -> PeftConfig:
    fields = parse_json(read_regular(folder / CONFIG, _MAX_CONFIG_BYTES))
    if not isinstance(fields, dict):
        raise InvalidData(f"{CONFIG} is not an object")
    return read_config(fields, lora, flag)


def _check_names(
    factors: Mapping[str, Stored], lora: Lora, shapes: Mapping[str, tuple[int, ...]], flag: str
) -> None:
    """Check that the file has all factors, and no other tensor."""
    expected = factor_shapes(lora)
    others = shapes.keys() - {stored.name for stored in factors.values()}
    for name in sorted(others | (expected.keys() - factors.keys())):
        raise UsageError(
            f"has {shortened(name)} of shape {shapes.get(name, 'none')}, and --rl-lora-targets "
            f"describe one of shape {expected.get(name, 'none')}",
            flag=flag,
            remedy="give the targets of that adapter, or another adapter",
        )


def _check_values(name: str, file: Any, flag: str) -> None:
    kind = file.get_slice(name).get_dtype()
    if kind not in _DTYPES:
        why = f"of type {kind}, and factors have one of {', '.join(_DTYPES)}"
    elif not file.get_tensor(name).float().isfinite().all():
        why = "with values that are NaN or infinite"
    else:
        return
    raise UsageError(f"has {name} {why}", flag=flag, remedy="name another adapter")


def _check_pair(stored: Stored, file: Any, flag: str) -> None:
    """Check that gate and up-projections of stacked experts have factors of their own."""
    if not stored.name.endswith("lora_B.weight"):
        return
    rank = stored.ranks[1] - stored.ranks[0]
    blocks = file.get_tensor(stored.name).view(2, -1, 2, rank, stored.num_experts)
    if blocks[0, :, 1].any() or blocks[1, :, 0].any():
        raise UsageError(
            f"has {stored.name}, in which gate and up-projections share their factors: each has "
            f"rank {2 * rank}",
            flag=flag,
            remedy=MERGE_IT,
        )


@torch.no_grad()
def load_adapter(chunks: Sequence[torch.nn.Module], folder: Path, lora: Lora) -> None:
    """Fill this rank's adapters from a folder that `check_adapter` accepts. Not collective."""
    config = _config(folder, lora, f"{_FLAG} {folder}")
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        factors = find_factors(lora, config, shapes)
        whole = functools.lru_cache(maxsize=2)(file.get_tensor)  # stacks hold many factors
        for adapter in _adapters(chunks):
            for factor, is_b in zip(adapter.factors(), (False, True), strict=True):
                stored, box = factors[factor.name], slices(factor.box)
                if stored.num_experts:
                    data = part_of_stack(whole(stored.name), stored, is_b=is_b)[box]
                else:
                    data = file.get_slice(stored.name)[box]
                factor.data.copy_(data.double() * stored.scale if is_b else data)


def part_of_stack(stack: torch.Tensor, stored: Stored, *, is_b: bool) -> torch.Tensor:
    """Return an expert's A or B of a stack."""
    rows, ranks, expert = slice(*stored.rows), slice(*stored.ranks), stored.expert
    if is_b:
        return stack.view(len(stack), -1, stored.num_experts)[rows, ranks, expert]
    return stack.view(stored.num_experts, -1, stack.shape[1])[expert, ranks]
