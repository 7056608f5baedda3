"""Hugging Face checkpoints: read straight into Megatron shards, and written back.

Reading: every rank opens the safetensors files it needs and reads only its own slices; nothing is
sent between ranks. What lies there in FP8 blocks (see `float8`) is bfloat16 to everybody else.
Writing is the reverse and uses the hand-over's transfer: each output file has one writing rank,
which receives the slices of the tensors in it, and no rank holds the whole model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.plan.moves import TensorInfo, make_plan
from mcore_rl.hybrid_engine.transfer.transfer import Transfer
from mcore_rl.megatron import float8
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.boxes import Box, extent, full_box
from mcore_rl.model.config_json import ModelShape, read_config_json
from mcore_rl.model.families import left_to_defaults
from mcore_rl.model.quantization import POWERS_OF_TWO, QUANTIZATION
from mcore_rl.model.tensors import is_mtp_tensor
from mcore_rl.model.weight_map import layer_order

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# In what `export` writes: only a folder that has it may be replaced.
EXPORT_MARKER = "mcore_rl_export.json"
_BLOCK_BYTES, _NUM_BLOCKS = 4096, 4
_DIGESTS = 1 << 256
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn}  # where config.json describes FP8 blocks
_COPIED = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json tokenizer.model "
    "special_tokens_map.json chat_template.jinja vocab.json merges.txt added_tokens.json"
).split()


@dataclass(frozen=True, slots=True)
class HFCheckpoint:
    """The tensors of a checkpoint folder: where each lies, its shape and its dtype.

    Weights in FP8 blocks have the dtype of what they stand for, bfloat16.
    """

    folder: Path
    files: Mapping[str, str]  # tensor -> file name
    tensors: Mapping[str, TensorInfo]  # of the model proper: no MTP layers, no position tables
    # Of multi-token-prediction layers. Nothing trains them: whoever wants them reads them here.
    mtp: Mapping[str, TensorInfo] = field(default_factory=dict)
    # Weight in blocks, of either -> its scales.
    float8: Mapping[str, TensorInfo] = field(default_factory=dict)

    @property
    def everything(self) -> dict[str, TensorInfo]:
        """Its tensors, those of multi-token-prediction layers included."""
        return {**self.tensors, **self.mtp}

    @property
    def stored_bytes(self) -> int:
        """Of all its tensors, as they lie in the files."""
        return sum(
            math.prod(info.shape) + self.float8[name].num_bytes
            if name in self.float8
            else info.num_bytes
            for name, info in self.everything.items()
        )


def open_checkpoint(
    folder: Path, shape: ModelShape, *, flag: str = "--rl-hf-checkpoint"
) -> HFCheckpoint:
    """Read the headers of all safetensors files of `folder`.

    Raises UsageError naming the file that is missing, cut short or not safetensors, the dtype that
    cannot be trained, or the scales that a weight in FP8 blocks lacks.
    """
    folder = Path(folder)
    files = _file_of_each_tensor(folder, flag)
    dtypes = _DTYPES | _FLOAT8 if shape.quantization else _DTYPES
    found: dict[str, TensorInfo] = {}
    for name in sorted(set(files.values())):
        wanted = [tensor for tensor, file in files.items() if file == name]
        found.update(_read_header(folder / name, wanted, dtypes, flag))
    scales: dict[str, TensorInfo] = {}
    if shape.quantization:
        found, scales = float8.split_scales(found, folder, flag)
    mtp = {t: info for t, info in found.items() if is_mtp_tensor(t, shape.num_layers)}
    tensors = {
        tensor: info
        for tensor, info in found.items()
        if tensor not in mtp and not tensor.endswith("inv_freq")  # a position table is no weight
    }
    return HFCheckpoint(folder, files, tensors, mtp, scales)


def _file_of_each_tensor(folder: Path, flag: str) -> dict[str, str]:
    index = folder / _INDEX
    if index.is_file():
        try:
            files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # nested too deep
            raise UsageError(
                f": {index} is not a safetensors index",
                flag=flag,
                remedy="copy the checkpoint again",
            ) from error
        missing = sorted({name for name in files.values() if not (folder / name).is_file()})
        if missing:
            raise UsageError(
                f": {folder / missing[0]} is missing but named in {_INDEX}",
                flag=flag,
                remedy="copy the checkpoint again",
            )
        return files
    single = folder / _SINGLE
    if not single.is_file():
        raise UsageError(
            f"has neither {_SINGLE} nor {_INDEX}",
            flag=f"{flag} {folder}",
            remedy="convert its weights to safetensors",
        )
    with _opened(single, flag) as file:
        return dict.fromkeys(file.keys(), _SINGLE)


def _opened(path: Path, flag: str) -> safe_open:
    try:
        # safetensors compares the header with the file's length, so a shard cut short fails here.
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f": {path} is corrupt or cut short ({error})", flag=flag, remedy="copy this file again"
        ) from error


def _read_header(
    path: Path, tensors: Sequence[str], dtypes: Mapping[str, torch.dtype], flag: str
) -> Iterator[tuple[str, TensorInfo]]:
    with _opened(path, flag) as file:
        held = set(file.keys())
        for tensor in tensors:
            if tensor not in held:
                raise UsageError(
                    f": {path} lacks {tensor}, which {_INDEX} puts there",
                    flag=flag,
                    remedy="copy the checkpoint again",
                )
            view = file.get_slice(tensor)
            dtype = dtypes.get(view.get_dtype())
            if dtype is None:
                raise UsageError(
                    f": {tensor} in {path} has dtype {view.get_dtype()}",
                    flag=flag,
                    remedy=f"supported are {', '.join(dtypes)}: dequantise the checkpoint first",
                )
            name = str(dtype).removeprefix("torch.")
            yield tensor, TensorInfo(tuple(view.get_shape()), name, dtype.itemsize)


def fingerprint(checkpoint: HFCheckpoint) -> str:
    """Of names, shapes, dtypes and weights, however these are divided into files. Collective.

    Of each tensor a few blocks are read, by one of the ranks: training changes all of them, and a
    folder of a terabyte is done in seconds.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    of_file: dict[str, list[str]] = {}
    stored = [*checkpoint.tensors, *map(float8.scales_of, checkpoint.float8)]
    for tensor in sorted(stored)[rank::world_size]:
        of_file.setdefault(checkpoint.files[tensor], []).append(tensor)
    total = sum(
        int.from_bytes(digest, "little")
        for name, tensors in of_file.items()
        for digest in _digests(checkpoint.folder / name, tensors)
    )
    totals = objects.all_gather(total % _DIGESTS)
    return f"{sum(totals) % _DIGESTS:064x}"


def _digests(path: Path, tensors: Sequence[str]) -> Iterator[bytes]:
    """SHA-256 of each tensor's entry in the header, and of blocks from its beginning to its end."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        for tensor in tensors:
            entry = header[tensor]
            start, end = entry["data_offsets"]
            found = hashlib.sha256(f"{tensor} {entry['dtype']} {entry['shape']}".encode())
            for block in range(_NUM_BLOCKS):
                at = start + max(0, end - start - _BLOCK_BYTES) * block // (_NUM_BLOCKS - 1)
                file.seek(8 + header_bytes + at)
                found.update(file.read(min(_BLOCK_BYTES, end - at)))
            yield found.digest()


@torch.no_grad()
def load_into_megatron(
    checkpoint: HFCheckpoint, shards: ModelShards, *, absent: frozenset[str] = frozenset()
) -> int:
    """Fill every parameter and persistent buffer of this rank; returns the bytes read.

    Tensors in `absent` are not in the folder, and stay as the model was made.
    Not collective. Raises UsageError naming a tensor that the checkpoint lacks, has in another
    shape, or with values that are not finite where this rank reads it; RuntimeError for a tensor
    that no parameter of any rank takes (through `check_complete`).
    """
    num_bytes = 0
    for tensor in layer_order(t for t in shards.tensors() if t not in absent):
        info = checkpoint.tensors.get(tensor)
        if info is None:
            raise UsageError(
                f"lacks {tensor}",
                flag=f"--rl-hf-checkpoint {checkpoint.folder}",
                remedy="its config.json describes another model than its weights",
            )
        path = checkpoint.folder / checkpoint.files[tensor]
        with _reading(checkpoint, tensor) as read:
            for box in shards.boxes(tensor):
                if any(stop > size for (_, stop), size in zip(box, info.shape, strict=True)):
                    raise UsageError(
                        f": {tensor} has shape {list(info.shape)}, too small for config.json",
                        flag=f"--rl-hf-checkpoint {checkpoint.folder}",
                        remedy="they describe two models",
                    )
                data, read_bytes = read(box)
                _require_finite(data, box, tensor, path)
                shards.write(tensor, box, data)
                num_bytes += read_bytes
    shards.zero_padding()
    return num_bytes


def read_boxes(checkpoint: HFCheckpoint, tensor: str, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """Slices of a tensor, each of memory of its own. UsageError: one that is not finite."""
    found = []
    with _reading(checkpoint, tensor) as read:
        for box in boxes:
            data, _ = read(box)
            _require_finite(data, box, tensor, checkpoint.folder / checkpoint.files[tensor])
            found.append(data)
    return found


def read_tensor(checkpoint: HFCheckpoint, tensor: str) -> torch.Tensor:
    """A whole tensor in the dtype of its TensorInfo."""
    with _reading(checkpoint, tensor) as read:
        return read(full_box(checkpoint.everything[tensor].shape))[0]


@contextlib.contextmanager
def _reading(
    checkpoint: HFCheckpoint, tensor: str
) -> Iterator[Callable[[Box], tuple[torch.Tensor, int]]]:
    """With the files of a tensor open: what gives a box of it, and the bytes read for that."""
    with contextlib.ExitStack() as files:

        def stored(name: str) -> Callable[[Box], torch.Tensor]:
            path = checkpoint.folder / checkpoint.files[name]
            view = files.enter_context(safe_open(path, framework="pt")).get_slice(name)
            return lambda box: view[tuple(slice(start, stop) for start, stop in box)]

        weight = stored(tensor)
        scales = stored(float8.scales_of(tensor)) if tensor in checkpoint.float8 else None

        def read(box: Box) -> tuple[torch.Tensor, int]:
            data = weight(box)
            if scales is None:
                return data, data.nbytes
            factors = scales(float8.blocks_of(box))
            return float8.dequantise(data, factors, box), data.nbytes + factors.nbytes

        yield read


def _require_finite(data: torch.Tensor, box: Box, tensor: str, path: Path) -> None:
    """Nothing would find fault with such a weight before its first losses or samples."""
    finite = torch.isfinite(data)
    if finite.all():
        return
    first = (~finite).nonzero()[0].tolist()
    place = [start + index for (start, _), index in zip(box, first, strict=True)]
    raise UsageError(
        f"{tensor} in {path} holds {data[tuple(first)].item()} at {place}, and no weight may be "
        "nan or infinite",
        remedy="copy this file again, or go back to a checkpoint that was saved before",
    )


def check_complete(checkpoint: HFCheckpoint, all_tensors: set[str]) -> None:
    """Raise RuntimeError unless every tensor of the checkpoint lies on some rank.

    `all_tensors` is the union over all ranks.
    """
    left = sorted(t for t in checkpoint.tensors if t not in all_tensors)
    if left:
        raise RuntimeError(
            f"{left[0]} (and {len(left) - 1} more) of {checkpoint.folder} has no place in the model"
        )


def export(
    shards: ModelShards,
    checkpoint: HFCheckpoint,
    target: Path,
    *,
    as_float8: bool = False,
    max_file_bytes: int = 5 << 30,
    bucket_bytes: int = 512 << 20,
) -> None:
    """Write the current weights as a Hugging Face folder that `transformers` loads. Collective.

    Names, shapes and dtypes are those of `checkpoint`, the folder the run started from, as are
    config.json and the tokenizer. MTP layers, which are not trained, are copied bit for bit; where
    the source has none, config.json's count of them is set to 0. config.json also says what the
    source left to defaults that are not vLLM's. Weights that the source has in FP8 blocks are
    written in bfloat16, and config.json without its quantization_config; `as_float8`, they are FP8
    blocks again, and config.json says so: a writer reads the source's bytes of its tensors, keeps
    those of each block whose values are the source's still, bit for bit, and quantises the others
    (see `float8.quantise`). So what was not trained is exported as it was published, bytes and
    scales.

    Files are written by ranks in turn, each holding one file's tensors at a time; `target` appears
    only when it is complete, with EXPORT_MARKER in it, and takes the place of what was there. If it
    is a symbolic link, it stays one.
    """
    target = Path(os.path.realpath(target))
    partial = target.with_name(target.name + ".partial")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    objects.barrier()

    parts = _split_by_size(
        layer_order(checkpoint.everything), checkpoint.everything, max_file_bytes
    )
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    have = _gather_boxes(shards)
    written = _quantiser(checkpoint) if as_float8 else lambda tensor, full: {tensor: full}
    for first in range(0, len(parts), world_size):
        turn = parts[first : first + world_size]
        need: list[dict[str, list[Box]]] = [{} for _ in range(world_size)]
        for writer, tensors in enumerate(turn):
            trained = [t for t in tensors if t in checkpoint.tensors]
            need[writer] = {t: [full_box(checkpoint.tensors[t].shape)] for t in trained}
        plan = make_plan(
            checkpoint.tensors,
            order=[t for needed in need for t in needed],
            have=have,
            need=need,
        )
        # On the host, where the files are written from: a writer has every rank as its peer, which
        # on a device takes more than the weights of a turn.
        transfer = Transfer(plan, checkpoint.tensors, bucket_bytes=bucket_bytes, device="cpu")
        filled: dict[str, torch.Tensor] = {}
        for tensor, pieces in transfer.stream(shards.read):
            if tensor in need[rank]:
                full = _assemble(tensor, checkpoint.tensors[tensor], pieces, shards)
                filled |= written(tensor, full)
        for tensor in need[rank]:
            if tensor not in filled:  # nothing of it had to travel
                full = _assemble(tensor, checkpoint.tensors[tensor], [], shards)
                filled |= written(tensor, full)
        for tensor in turn[rank] if rank < len(turn) else ():
            if tensor in checkpoint.mtp:
                filled |= _as_published(checkpoint, tensor, as_float8=as_float8)
        if filled:
            path = partial / names[first + rank]
            save_file(filled, path, metadata={"format": "pt"})
            _set_usual_mode(path)
        transfer.close()
    objects.barrier()  # every file is complete before the folder takes its name
    if rank == 0:
        _write_rest(checkpoint, partial, parts, names, as_float8=as_float8)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    objects.barrier()


def _as_published(
    checkpoint: HFCheckpoint, tensor: str, *, as_float8: bool
) -> dict[str, torch.Tensor]:
    """A tensor that nothing has changed, with its scales if it has some and keeps them."""
    if not as_float8 or tensor not in checkpoint.float8:
        return {tensor: read_tensor(checkpoint, tensor)}
    found = {}
    for name in (tensor, float8.scales_of(tensor)):
        with safe_open(checkpoint.folder / checkpoint.files[name], framework="pt") as file:
            found[name] = file.get_tensor(name)
    return found


def _set_usual_mode(path: Path) -> None:
    """Give a file the permissions that new files have: safetensors writes for the owner alone."""
    # To ask for the umask one has to set it, for all threads.
    beside = path.with_name(path.name + ".mode")
    beside.touch()
    path.chmod(stat.S_IMODE(beside.stat().st_mode))
    beside.unlink()


def _split_by_size(
    order: Sequence[str], tensors: Mapping[str, TensorInfo], limit: int
) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    size = 0
    for tensor in order:
        if parts[-1] and size + tensors[tensor].num_bytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensors[tensor].num_bytes
    return parts


def _gather_boxes(shards: ModelShards) -> list[dict[str, tuple[Box, ...]]]:
    mine = {tensor: shards.boxes(tensor) for tensor in shards.tensors()}
    return objects.all_gather(mine)


def _assemble(
    tensor: str,
    info: TensorInfo,
    received: Sequence[tuple[Box, torch.Tensor]],
    shards: ModelShards,
) -> torch.Tensor:
    full = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
    own = [(box, shards.read(tensor, box)) for box in shards.boxes(tensor)]
    for box, data in [*own, *received]:
        full[tuple(slice(start, stop) for start, stop in box)] = data.view(extent(box))
    return full


def _quantiser(
    checkpoint: HFCheckpoint,
) -> Callable[[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What makes of a whole tensor the one or two that are written, as the source has it."""
    quantization = read_config_json(checkpoint.folder)[QUANTIZATION]
    powers_of_two = quantization.get("scale_fmt") == POWERS_OF_TWO

    def stored(name: str) -> torch.Tensor:
        with safe_open(checkpoint.folder / checkpoint.files[name], framework="pt") as file:
            return file.get_tensor(name)

    def written(tensor: str, full: torch.Tensor) -> dict[str, torch.Tensor]:
        if tensor not in checkpoint.float8:
            return {tensor: full}
        scales = float8.scales_of(tensor)
        weight, factors = float8.quantise(
            full, stored(tensor), stored(scales), powers_of_two=powers_of_two
        )
        return {tensor: weight, scales: factors}

    return written


def _write_rest(
    checkpoint: HFCheckpoint,
    folder: Path,
    parts: Sequence[Sequence[str]],
    names: Sequence[str],
    *,
    as_float8: bool,
) -> None:
    for name in _COPIED:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, folder / name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changes = left_to_defaults(config)
    if config.get("num_nextn_predict_layers") and not checkpoint.mtp:
        changes["num_nextn_predict_layers"] = 0
    stays = config if as_float8 else {n: v for n, v in config.items() if n != QUANTIZATION}
    if changes or stays != config:
        text = json.dumps(stays | changes, indent=2)
        (folder / "config.json").write_text(text, encoding="utf-8")
    weight_map = {t: name for part, name in zip(parts, names, strict=True) for t in part}
    total = sum(info.num_bytes for info in checkpoint.everything.values())
    if as_float8:
        total = checkpoint.stored_bytes
        weight_map |= {float8.scales_of(t): weight_map[t] for t in checkpoint.float8}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    origin = {"exported_from": str(checkpoint.folder)}
    (folder / EXPORT_MARKER).write_text(json.dumps(origin, indent=2), encoding="utf-8")
