"""Export of Megatron shards to Hugging Face checkpoints.

It uses the hand-over's transfer: each output file has one writing rank, which receives the slices
of the file's tensors. No rank holds the full model.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from mcore_rl.common import objects
from mcore_rl.common.disk import replace_folder
from mcore_rl.hybrid_engine.plan.transfer_plan import Plan, make_plan
from mcore_rl.hybrid_engine.transfer.transfer import Transfer
from mcore_rl.megatron import float8
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, read_tensor
from mcore_rl.megatron.hf_files import EXPORT_MARKER, INDEX, other_files
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.boxes import Box, Boxes, extent, full_box, slices
from mcore_rl.model.config_json import read_config_json
from mcore_rl.model.families import TEXT_CONFIG, left_to_defaults, text_values
from mcore_rl.model.float8_blocks import scale_name
from mcore_rl.model.quantization import POWERS_OF_TWO, QUANTIZATION
from mcore_rl.model.tensors import TensorInfo, is_mtp_tensor
from mcore_rl.model.weight_map import layer_order

logger = logging.getLogger(__name__)


def export(
    shards: ModelShards,
    checkpoint: HFCheckpoint,
    target: Path,
    *,
    as_float8: bool = False,
    max_file_bytes: int = 5 << 30,
    bucket_bytes: int = 512 << 20,
    apart_from: Collection[Path] = (),
) -> None:
    """Write the current weights as a Hugging Face folder that `transformers` loads. Collective.

    Names, shapes, dtypes, config.json and all other files that are not weights come from
    `checkpoint`, the folder the run started from. `other_files` chooses the latter, without the
    folders `apart_from`; a warning names those that could not be copied. Duplicates, such as a head
    next to tied embeddings, are written once. MTP layers that are not trained are copied bit for
    bit; trained ones repeat the current embedding and head. If the source has no such layers,
    config.json's count of them is set to 0. config.json also states values that the source left to
    defaults if vLLM's differ. Experts that the source stacks are stacked again, MXFP4 ones in
    bfloat16. Of a multimodal model the other tensors are copied bit for bit, and so is config.json.

    FP8 blocks and INT4 groups of the source are written in bfloat16, and config.json without
    quantization_config. With `as_float8` blocks are kept: a writer reads the source's bytes, keeps
    each block whose values are unchanged, bit for bit, and quantises the others (see
    `float8.quantise`). Untrained weights are therefore exported as published, bytes and scales.

    Ranks write the files in turn, and hold one file's tensors each. `target` appears only when it
    is complete, with EXPORT_MARKER in it, and replaces the previous folder. If it is a symbolic
    link, it stays one.
    """
    target = Path(os.path.realpath(target))
    partial = target.with_name(target.name + ".partial")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    objects.barrier()

    parts = _split_by_size(checkpoint, max_file_bytes)
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    have = objects.all_gather({tensor: shards.boxes(tensor) for tensor in shards.tensors()})
    quantization = read_config_json(checkpoint.folder)[QUANTIZATION] if as_float8 else None
    for first in range(0, len(parts), world_size):
        turn = parts[first : first + world_size]
        plan, need = _plan_turn(checkpoint, turn, have)
        # On the host, where files are written: a writer has every rank as its peer, whose buffers
        # on a device take more memory than a turn's weights.
        transfer = Transfer(plan, checkpoint.tensors, bucket_bytes=bucket_bytes, device="cpu")
        mine = turn[rank] if rank < len(turn) else []
        filled = _received(transfer, shards, checkpoint, mine, need[rank], quantization)
        for tensor in mine:
            if tensor in checkpoint.untrained:
                filled |= _as_published(checkpoint, tensor, as_float8=as_float8)
        if filled:
            path = partial / names[first + rank]
            stored = {checkpoint.stored_name(name): tensor for name, tensor in filled.items()}
            save_file(stored, path, metadata={"format": "pt"})
            _set_usual_mode(path)
        transfer.close()
    objects.barrier()  # every file is complete before the folder takes its name
    if rank == 0:
        _copy_others(checkpoint.folder, partial, {target, partial, *apart_from})
        _write_rest(checkpoint, partial, parts, names, as_float8=as_float8)
        replace_folder(partial, target)
    objects.barrier()


def _plan_turn(
    checkpoint: HFCheckpoint, turn: Sequence[Sequence[str]], have: Sequence[Boxes]
) -> tuple[Plan, list[Boxes]]:
    """Plan the moves for the files of a turn, one per rank; return also each rank's needs."""
    need: list[Boxes] = [{} for _ in have]
    for writer, tensors in enumerate(turn):
        # Copies in trained MTP layers get the model's current values.
        untrained = checkpoint.untrained
        trained = [checkpoint.copies.get(t, t) for t in tensors if t not in untrained]
        need[writer] = {t: [full_box(checkpoint.tensors[t].shape)] for t in trained}
    # Several files may need a tensor and its copies: it moves once, to all of them.
    order = list(dict.fromkeys(tensor for needed in need for tensor in needed))
    return make_plan(checkpoint.tensors, order=order, have=have, need=need), need


def _received(
    transfer: Transfer,
    shards: ModelShards,
    checkpoint: HFCheckpoint,
    mine: Sequence[str],
    need: Iterable[str],
    quantization: Mapping[str, Any] | None,
) -> dict[str, torch.Tensor]:
    """Receive this rank's trained tensors: `need`, and the tensors of `mine` that repeat them.

    `quantization` is config.json's if FP8 blocks are kept. Returns the content of the file.
    """
    names_of: dict[str, list[str]] = {}
    for tensor in mine:
        names_of.setdefault(checkpoint.copies.get(tensor, tensor), []).append(tensor)
    filled: dict[str, torch.Tensor] = {}

    def write(tensor: str, pieces: Iterable[tuple[Box, torch.Tensor]]) -> None:
        full = _assemble(tensor, checkpoint.tensors[tensor], pieces, shards)
        for name in names_of[tensor]:
            _add(name, full if name == tensor else full.clone(), filled, checkpoint, quantization)

    left = dict.fromkeys(need)
    for tensor, parts in itertools.groupby(transfer.stream(shards.read), key=lambda part: part[0]):
        del left[tensor]
        write(tensor, (piece for _, pieces in parts for piece in pieces))
    for tensor in left:  # this rank already has all of it
        write(tensor, [])
    return filled


def _as_published(
    checkpoint: HFCheckpoint, tensor: str, *, as_float8: bool
) -> dict[str, torch.Tensor]:
    """Read an unchanged tensor, and its scales if it stays in FP8 blocks."""
    if not as_float8 or tensor not in checkpoint.float8:
        return {tensor: read_tensor(checkpoint, tensor)}
    return {name: _stored(checkpoint, name) for name in (tensor, scale_name(tensor))}


def _stored(checkpoint: HFCheckpoint, name: str) -> torch.Tensor:
    """Read a tensor as the source stores it."""
    with safe_open(checkpoint.folder / checkpoint.files[name], framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(checkpoint.stored_name(name))
        return tensor


def _set_usual_mode(path: Path) -> None:
    """Give a file the usual permissions: safetensors writes files for the owner only."""
    # Reading the umask would require setting it, for all threads.
    beside = path.with_name(path.name + ".mode")
    beside.touch()
    path.chmod(stat.S_IMODE(beside.stat().st_mode))
    beside.unlink()


def _split_by_size(checkpoint: HFCheckpoint, limit: int) -> list[list[str]]:
    """Assign tensors to files; those of one stack share a file."""
    together: dict[str, list[str]] = {}
    for tensor in layer_order(checkpoint.everything):
        together.setdefault(_written_as(checkpoint, tensor), []).append(tensor)
    parts: list[list[str]] = [[]]
    size = 0
    for tensors in together.values():
        num_bytes = sum(checkpoint.everything[tensor].num_bytes for tensor in tensors)
        if parts[-1] and size + num_bytes > limit:
            parts.append([])
            size = 0
        parts[-1] += tensors
        size += num_bytes
    return parts


def _written_as(checkpoint: HFCheckpoint, tensor: str) -> str:
    """Return the name under which an export has a tensor, or its stack."""
    part = checkpoint.stack.parts.get(tensor)
    return tensor if part is None else part.stored


def _assemble(
    tensor: str,
    info: TensorInfo,
    received: Iterable[tuple[Box, torch.Tensor]],
    shards: ModelShards,
) -> torch.Tensor:
    """Copy all pieces of a tensor into one, each before the next is requested."""
    full = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
    own = [(box, shards.read(tensor, box)) for box in shards.boxes(tensor)]
    for box, data in itertools.chain(own, received):
        full[slices(box)] = data.view(extent(box))
    return full


def _add(
    tensor: str,
    full: torch.Tensor,
    filled: dict[str, torch.Tensor],
    checkpoint: HFCheckpoint,
    quantization: Mapping[str, Any] | None,
) -> None:
    """Add a full tensor to the content of a file: into its stack, quantised, or as it is."""
    part = checkpoint.stack.parts.get(tensor)
    if part is not None:
        if part.stored not in filled:
            shape = checkpoint.stack.as_bfloat16[part.stored].shape
            filled[part.stored] = torch.empty(shape, dtype=full.dtype)
        part.write(filled[part.stored], full)
    elif quantization is not None and tensor in checkpoint.float8:
        scales = scale_name(tensor)
        filled[tensor], filled[scales] = float8.quantise(
            full,
            _stored(checkpoint, tensor),
            _stored(checkpoint, scales),
            powers_of_two=quantization.get("scale_fmt") == POWERS_OF_TWO,
        )
    else:
        filled[tensor] = full


def _copy_others(source: Path, folder: Path, apart_from: Collection[Path]) -> None:
    """Copy the files that are not weights, and name those that cannot be copied in a warning.
    The weights are written by now, so only a failure to copy config.json ends the export."""
    shutil.copyfile(source / "config.json", folder / "config.json")
    others = other_files(source, apart_from=apart_from)
    left_out = list(others.left_out)
    for name in others.files:
        if name in ("config.json", EXPORT_MARKER):
            continue
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
            if (source / name).stat().st_mode & stat.S_IXUSR:
                mode = (folder / name).stat().st_mode
                (folder / name).chmod(mode | (mode & 0o444) >> 2)
        except OSError as error:
            left_out.append(f"{name} ({error.strerror})")
    if left_out:
        logger.warning("the export lacks these files of %s: %s", source, ", ".join(left_out))


def _write_rest(
    checkpoint: HFCheckpoint,
    folder: Path,
    parts: Sequence[Sequence[str]],
    names: Sequence[str],
    *,
    as_float8: bool,
) -> None:
    config = read_config_json(folder)
    changes = left_to_defaults(config)
    num_layers = config.get("num_hidden_layers", 0)
    has_mtp = any(is_mtp_tensor(t, num_layers) for t in checkpoint.everything)
    if config.get("num_nextn_predict_layers") and not has_mtp:
        changes["num_nextn_predict_layers"] = 0
    stays = config
    if not as_float8:
        stays = {n: v for n, v in config.items() if n != QUANTIZATION}
        if text_values(config) is not config:
            text_config = {n: v for n, v in config[TEXT_CONFIG].items() if n != QUANTIZATION}
            stays[TEXT_CONFIG] = text_config
    if changes or stays != config:
        text = json.dumps(stays | changes, indent=2)
        (folder / "config.json").write_text(text, encoding="utf-8")
    weight_map = {
        _written_as(checkpoint, tensor): name
        for part, name in zip(parts, names, strict=True)
        for tensor in part
    }
    total = sum(info.num_bytes for info in checkpoint.everything.values())
    if as_float8:
        total = checkpoint.stored_bytes
        weight_map |= {scale_name(t): weight_map[t] for t in checkpoint.float8}
    weight_map = {checkpoint.stored_name(t): name for t, name in weight_map.items()}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    origin = {"exported_from": str(checkpoint.folder)}
    (folder / EXPORT_MARKER).write_text(json.dumps(origin, indent=2), encoding="utf-8")
