"""Hugging Face checkpoints, read directly into Megatron shards; `hf_export` writes them back.

Every rank opens the safetensors files it needs and reads only its own slices; nothing is sent
between ranks. To callers, FP8 blocks (see `float8`) and INT4 groups (see `int4`) are bfloat16
weights, and stacked experts (see `stacked_experts`) are one set of tensors per expert.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError
from mcore_rl.megatron import float8, hf_files, int4
from mcore_rl.megatron import stacked_experts as stacked
from mcore_rl.megatron.hf_files import Copy
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.boxes import Box, full_box, slices
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.families import family_of
from mcore_rl.model.float8_blocks import blocks_of, scale_name
from mcore_rl.model.quantization import FP8, INT4, MXFP4
from mcore_rl.model.tensors import (
    TensorInfo,
    checkpoint_tensors,
    copied_by_mtp,
    is_mtp_tensor,
    mtp_among,
)
from mcore_rl.model.weight_map import layer_order

EMBEDDING = "model.embed_tokens.weight"
# Beginnings of a text model's names in a multimodal folder, and its own. transformers keeps one of
# them where it saves the text model alone.
_KEPT = {"model.language_model.": "model."}
_PREFIXES = {
    **_KEPT,
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_UNPREFIXED = ("lm_head.", "mtp.")  # also of the text model
# Last parts of the names under which a folder with tied embeddings repeats the embedding.
_HEADS = (["lm_head", "weight"], ["embed_out", "weight"], ["output", "weight"])
# Position tables, of any dtype, are not weights; vLLM skips them as well.
_POSITION_TABLES = ("inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_BLOCK_BYTES, _NUM_BLOCKS = 4096, 4
_DIGESTS = 1 << 256
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_DTYPES_OF_OTHERS = {**_DTYPES, "I64": torch.int64}  # with tables of positions
# Further dtypes where config.json describes quantised weights.
_QUANTIZED_DTYPES = {
    FP8: {"F8_E4M3": torch.float8_e4m3fn},
    INT4: {"I32": torch.int32, "I64": torch.int64},
    MXFP4: {"U8": torch.uint8},
}


@dataclass(frozen=True, slots=True)
class HFCheckpoint:
    """The tensors of a checkpoint folder: file, shape and dtype of each.

    Weights in FP8 blocks or INT4 groups have dtype bfloat16 here.
    """

    folder: Path
    files: Mapping[str, str]  # tensor -> file name
    tensors: Mapping[str, TensorInfo]  # of the model proper: no MTP layers, no position tables
    # Tensors of multi-token-prediction layers that are not trained.
    mtp: Mapping[str, TensorInfo] = field(default_factory=dict)
    # Weight in FP8 blocks, of `tensors` or `mtp` -> its scales.
    float8: Mapping[str, TensorInfo] = field(default_factory=dict)
    # Weight in INT4 groups, of `tensors` or `mtp` -> its scales.
    int4: Mapping[str, TensorInfo] = field(default_factory=dict)
    # Locations of experts' tensors that the folder stacks by layer. `files` has both names.
    stack: stacked.Stack = field(default_factory=lambda: stacked.Stack({}, {}))
    # Tensor of a trained MTP layer -> the tensor of the model proper that it repeats.
    copies: Mapping[str, str] = field(default_factory=dict)
    # Duplicates in the folder, which are not read.
    repeated: tuple[Copy, ...] = ()
    # Tensor -> its name in the files, where that is another one.
    stored_names: Mapping[str, str] = field(default_factory=dict)
    # Tensors of a multimodal model besides its text model, such as a tower's, copied by exports.
    others: Mapping[str, TensorInfo] = field(default_factory=dict)

    def stored_name(self, tensor: str) -> str:
        """Return the name of a tensor in the folder's files."""
        return self.stored_names.get(tensor, tensor)

    @property
    def untrained(self) -> dict[str, TensorInfo]:
        """The tensors that an export copies."""
        return {**self.mtp, **self.others}

    @property
    def everything(self) -> dict[str, TensorInfo]:
        """All tensors."""
        copies = {copy: self.tensors[tensor] for copy, tensor in self.copies.items()}
        return {**self.tensors, **self.untrained, **copies}

    def with_mtp_trained(self, shape: ModelShape, num_layers: int) -> HFCheckpoint:
        """Return a copy with the first `num_layers` MTP layers as part of the model proper."""
        end = shape.num_layers + num_layers
        trained = {t: info for t, info in self.mtp.items() if not is_mtp_tensor(t, end)}
        copies = {t: of for t in trained if (of := copied_by_mtp(t, tied=shape.tied_embeddings))}
        return replace(
            self,
            tensors={**self.tensors, **{t: i for t, i in trained.items() if t not in copies}},
            mtp={t: info for t, info in self.mtp.items() if t not in trained},
            copies=copies,
            repeated=(
                *self.repeated,
                *(self.repetition(t, of) for t, of in copies.items()),
            ),
        )

    def repetition(self, tensor: str, of: str) -> Copy:
        """Return the locations of a tensor and of the one that it repeats."""
        names = self.stored_name(tensor), self.stored_name(of)
        return Copy(names[0], self.files[tensor], names[1], self.files[of])

    @property
    def is_all_that_vllm_reads(self) -> bool:
        """Whether vLLM's loader for the model finds its names, and no other tensors, in the folder.
        Without an index it reads all safetensors files."""
        if self.others:
            return False
        others = {path.name for path in self.folder.glob("*.safetensors")}
        return (self.folder / hf_files.INDEX).is_file() or others <= set(self.files.values())

    @property
    def stored_bytes(self) -> int:
        """Size of all tensors in bytes, as stored in the files."""
        scales = [*self.float8.values(), *self.int4.values()]
        sizes = {
            name: math.prod(info.shape) if name in self.float8 else info.num_bytes
            for name, info in self.everything.items()
            if name not in self.stack.parts
        }
        sizes |= {name: sizes[name] // 4 for name in self.int4}
        return sum(info.num_bytes for info in (*self.stack.stored.values(), *scales)) + sum(
            sizes.values()
        )


def open_checkpoint(
    folder: Path, shape: ModelShape, *, flag: str = "--rl-hf-checkpoint"
) -> HFCheckpoint:
    """Read the headers of the safetensors files of `folder`.

    With an index these are the files that it names, otherwise `model.safetensors`. Tensors in these
    files that the index does not name are included if the model has them. Duplicates are in
    `repeated`, for `hf_files.check_copies`.

    Raises UsageError naming a file that is missing, truncated or not safetensors, a dtype that
    cannot be trained, or missing scales of a quantised weight.
    """
    folder = Path(folder)
    dtypes = _DTYPES | _QUANTIZED_DTYPES.get(shape.quantization or "", {})
    try:
        needed = {tensor for tensor, _ in checkpoint_tensors(shape)}
        places = hf_files.places(folder, needed, flag)
        others = {t for t in places if shape.is_multimodal and not _is_of_text(t, needed)}
        places = {
            tensor: names
            for tensor, names in places.items()
            if tensor in others or not tensor.endswith(_POSITION_TABLES)
        }
        of_text = {tensor: at for tensor, at in places.items() if tensor not in others}
        infos = _headers(folder, of_text, dtypes, flag)
        of_others = {tensor: places[tensor] for tensor in others}
        infos_of_others = _headers(folder, of_others, _DTYPES_OF_OTHERS, flag)
    except OSError as error:
        raise UsageError(
            f"cannot be read ({error})", flag=f"{flag} {folder}", remedy="correct its permissions"
        ) from error
    files = {tensor: names[0] for tensor, names in places.items()}
    repeated = [
        Copy(tensor, name, tensor, first)
        for tensor, (first, *more) in places.items()
        for name in more
    ]
    prefixes = _PREFIXES if shape.is_multimodal else _KEPT
    plain = {
        stored: own + stored.removeprefix(prefix)
        for stored in infos
        for prefix, own in prefixes.items()
        if stored.startswith(prefix)
    }
    stored_names = {tensor: stored for stored, tensor in plain.items()}
    infos = {plain.get(tensor, tensor): info for tensor, info in infos.items()}
    files = {plain.get(tensor, tensor): name for tensor, name in files.items()}
    scales: dict[str, TensorInfo] = {}
    if shape.quantization == FP8:
        infos, scales = float8.split_scales(infos, folder, flag)
    packed: dict[str, TensorInfo] = {}
    if shape.quantization == INT4:
        infos, packed = int4.split_packed(infos, folder, flag)
        files |= {weight: files[int4.stored_parts(weight)[0]] for weight in packed}
        stored_names |= int4.names_of_weights(stored_names)
    stack = stacked.Stack({}, {})
    if family_of(shape.architecture).stacked_experts:
        infos, stack = stacked.split_experts(infos, shape, folder, flag)
        of_file = {tensor: part.file_name for tensor, part in stack.parts.items()}
        files |= {tensor: files[name] for tensor, name in of_file.items()}
    of_mtp = mtp_among(infos, shape.num_layers)
    mtp = {tensor: info for tensor, info in infos.items() if tensor in of_mtp}
    tied = _tied_heads(shape, infos)
    tensors = {t: info for t, info in infos.items() if t not in mtp and t not in tied}
    checkpoint = HFCheckpoint(
        *(folder, files, tensors, mtp, scales, packed, stack),
        stored_names=stored_names,
        others=infos_of_others,
    )
    for head in tied:
        repeated.append(checkpoint.repetition(head, EMBEDDING))
        if head in scales and EMBEDDING in scales:
            repeated.append(checkpoint.repetition(scale_name(head), scale_name(EMBEDDING)))
        scales.pop(head, None)
    return replace(checkpoint, repeated=tuple(repeated))


def _is_of_text(stored: str, needed: Collection[str]) -> bool:
    """Return whether a tensor of a multimodal folder is of its text model, which needs `needed`."""
    return stored.startswith((*_PREFIXES, *_UNPREFIXED)) or stored in needed


def _headers(
    folder: Path, places: Mapping[str, Sequence[str]], dtypes: Mapping[str, torch.dtype], flag: str
) -> dict[str, TensorInfo]:
    """Read shape and dtype of each tensor in the first of its files."""
    by_file: dict[str, list[str]] = {}
    for tensor, (name, *_) in places.items():
        by_file.setdefault(name, []).append(tensor)
    headers: dict[str, TensorInfo] = {}
    for name, held in sorted(by_file.items()):
        headers.update(hf_files.read_header(folder / name, held, dtypes, flag))
    return headers


def _tied_heads(shape: ModelShape, infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return the tensors that repeat the embedding in a folder with tied embeddings."""
    if not shape.tied_embeddings or EMBEDDING not in infos:
        return []
    return [t for t in infos if t.split(".")[-2:] in _HEADS and t.count(".") <= 2]


def check_tensors(checkpoint: HFCheckpoint, shape: ModelShape, *, flag: str) -> None:
    """Raise UsageError unless the tensors and their shapes match `shape`."""
    expected = {name: spec.shape for name, spec in checkpoint_tensors(shape)}
    odd = sorted(checkpoint.tensors.keys() - expected.keys())
    for tensor in (*expected, *odd):
        info = checkpoint.tensors.get(tensor)
        has = f"has {tensor[:200]} of shape {list(info.shape)}" if info else f"lacks {tensor}"
        if tensor not in expected:
            what = f"{has}, which has no place in the model that its config.json describes"
            remedy = "give the config.json of these weights, or remove the tensor from their files"
        elif info is None and (other := _named_otherwise(tensor, odd, shape)):
            what = f"has {other[:200]}, which its config.json describes as {tensor}"
            remedy = "rename its tensors to those that transformers' save_pretrained writes"
        elif info is None or info.shape != expected[tensor]:
            what = f"{has}, but its config.json describes one of shape {list(expected[tensor])}"
            remedy = "copy the checkpoint again"
        else:
            continue
        raise UsageError(what, flag=f"{flag} {checkpoint.folder}", remedy=remedy)


def _named_otherwise(tensor: str, odd: Sequence[str], shape: ModelShape) -> str | None:
    """Return the tensor of `odd` that is `tensor` with another prefix, or the tied head."""
    is_tied = shape.tied_embeddings and tensor == EMBEDDING
    named = [t for t in odd if t.endswith(f".{tensor}") or tensor.endswith(f".{t}")]
    return next(iter([*named, *(t for t in odd if is_tied and t == "lm_head.weight")]), None)


def fingerprint(checkpoint: HFCheckpoint) -> str:
    """Return a fingerprint of names, shapes, dtypes and weights. Collective.

    It does not depend on the division into files. One rank reads a few blocks of each tensor. This
    suffices, since training changes all blocks, and takes seconds for a folder of a terabyte.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    of_file: dict[str, list[str]] = {}
    stored = [
        *(checkpoint.tensors.keys() - checkpoint.stack.parts.keys() - checkpoint.int4.keys()),
        *map(scale_name, checkpoint.float8),
        *(part for weight in checkpoint.int4 for part in int4.stored_parts(weight)),
        *checkpoint.stack.stored,
    ]
    for tensor in sorted(stored)[rank::world_size]:
        of_file.setdefault(checkpoint.files[tensor], []).append(checkpoint.stored_name(tensor))
    total = sum(
        int.from_bytes(digest, "little")
        for name, tensors in of_file.items()
        for digest in _digests(checkpoint.folder / name, tensors)
    )
    totals = objects.all_gather(total % _DIGESTS)
    return f"{sum(totals) % _DIGESTS:064x}"


def _digests(path: Path, tensors: Sequence[str]) -> Iterator[bytes]:
    """Yield the SHA-256 of each tensor's header entry and of blocks spread over its data."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        for tensor in tensors:
            entry = header[tensor]
            start, end = entry["data_offsets"]
            hasher = hashlib.sha256(f"{tensor} {entry['dtype']} {entry['shape']}".encode())
            for block in range(_NUM_BLOCKS):
                at = start + max(0, end - start - _BLOCK_BYTES) * block // (_NUM_BLOCKS - 1)
                file.seek(8 + header_bytes + at)
                hasher.update(file.read(min(_BLOCK_BYTES, end - at)))
            yield hasher.digest()


@torch.no_grad()
def load_into_megatron(
    checkpoint: HFCheckpoint, shards: ModelShards, *, absent: frozenset[str] = frozenset()
) -> int:
    """Fill every parameter and persistent buffer of this rank, and return the bytes read.

    Tensors in `absent` are not in the folder and keep their initial values. Not collective. Raises
    UsageError naming a tensor that is missing, has too small a shape, or has non-finite values
    where this rank reads it. `check_complete` finds tensors that no rank takes.
    """
    num_bytes = 0
    for tensor in layer_order(t for t in shards.tensors() if t not in absent):
        info = checkpoint.tensors.get(tensor)
        if info is None:
            raise UsageError(
                f"lacks {tensor}",
                flag=f"--rl-hf-checkpoint {checkpoint.folder}",
                remedy="use the config.json that was published with these weights",
            )
        path = checkpoint.folder / checkpoint.files[tensor]
        with _reading(checkpoint, tensor) as read:
            for box in shards.boxes(tensor):
                if any(stop > size for (_, stop), size in zip(box, info.shape, strict=True)):
                    raise UsageError(
                        f": {tensor} has shape {list(info.shape)}, too small for config.json",
                        flag=f"--rl-hf-checkpoint {checkpoint.folder}",
                        remedy="use the config.json that was published with these weights",
                    )
                data, read_bytes = read(box)
                _require_finite(data, box, tensor, path)
                shards.write(tensor, box, data)
                num_bytes += read_bytes
    shards.zero_padding()
    return num_bytes


def read_boxes(checkpoint: HFCheckpoint, tensor: str, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """Read slices of a tensor, each into its own memory. UsageError: a value is not finite."""
    tensors = []
    with _reading(checkpoint, tensor) as read:
        for box in boxes:
            data, _ = read(box)
            _require_finite(data, box, tensor, checkpoint.folder / checkpoint.files[tensor])
            tensors.append(data)
    return tensors


def check_values(checkpoint: HFCheckpoint, *, every: int = 1) -> list[str]:
    """Read each `every`th tensor in blocks of a few MiB; return the matrices that are all zeros.

    Raises UsageError for a value that is not finite, as `load_into_megatron` does.
    """
    zeros = []
    for tensor in [t for t in checkpoint.tensors if t in checkpoint.files][::every]:
        shape, path = checkpoint.tensors[tensor].shape, checkpoint.folder / checkpoint.files[tensor]
        is_zero = len(shape) > 1
        with _reading(checkpoint, tensor) as read:
            for rows in hf_files.row_blocks(shape, 0, 1):
                box = full_box(shape)
                if rows is not ...:
                    box = ((rows.start, rows.stop), *box[1:])
                data, _ = read(box)
                _require_finite(data, box, tensor, path)
                is_zero = is_zero and not data.any()
        if is_zero:
            zeros.append(tensor)
    return zeros


def read_tensor(checkpoint: HFCheckpoint, tensor: str) -> torch.Tensor:
    """Read a full tensor in the dtype of its TensorInfo."""
    with _reading(checkpoint, tensor) as read:
        return read(full_box(checkpoint.everything[tensor].shape))[0]


@contextlib.contextmanager
def _reading(
    checkpoint: HFCheckpoint, tensor: str
) -> Iterator[Callable[[Box], tuple[torch.Tensor, int]]]:
    """Open the files of a tensor; yield a function from a box to its data and the bytes read."""
    with contextlib.ExitStack() as files:

        @functools.cache
        def stored(name: str) -> Callable[[Box], torch.Tensor]:
            path = checkpoint.folder / checkpoint.files[name]
            file = files.enter_context(safe_open(path, framework="pt"))
            view = file.get_slice(checkpoint.stored_name(name))
            return lambda box: view[slices(box)]

        if tensor in checkpoint.stack.parts:
            part = checkpoint.stack.parts[tensor]
            yield lambda box: part.read(box, lambda name, of: stored(name)(of))
            return
        if tensor in checkpoint.int4:
            packed, of_groups = map(stored, int4.stored_parts(tensor))
            yield lambda box: int4.dequantise(packed, of_groups, box)
            return
        weight = stored(tensor)
        scales = stored(scale_name(tensor)) if tensor in checkpoint.float8 else None

        def read(box: Box) -> tuple[torch.Tensor, int]:
            data = weight(box)
            if scales is None:
                return data, data.nbytes
            own = scales(blocks_of(box))
            return float8.dequantise(data, own, box), data.nbytes + own.nbytes

        yield read


def _require_finite(data: torch.Tensor, box: Box, tensor: str, path: Path) -> None:
    """Raise UsageError for a non-finite weight, which only losses or samples would reveal later."""
    # aminmax is thirty times as fast as isfinite on every element, and propagates NaN.
    if not data.numel() or all(torch.isfinite(bound) for bound in torch.aminmax(data)):
        return
    first = (~torch.isfinite(data)).nonzero()[0].tolist()
    place = [start + index for (start, _), index in zip(box, first, strict=True)]
    raise UsageError(
        f"{tensor} in {path} holds {data[tuple(first)].item()} at {place}, and no weight may be "
        "nan or infinite",
        remedy="copy this file again, or use an earlier checkpoint",
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
