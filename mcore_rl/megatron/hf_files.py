"""The files of a Hugging Face folder: tensors and duplicates in them, and files without weights.

Training and the doctor both read a folder's headers with this module. Published folders contain
duplicates: a head next to tied embeddings, `model.safetensors` next to shards, one tensor in two
shards. One of them is read; `check_copies` compares it with the others. Files other than
`model.safetensors` that its index does not name, such as `consolidated.safetensors`, are ignored.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mcore_rl.common.errors import UsageError, unreadable
from mcore_rl.common.readers import (
    FETCH_LFS,
    InvalidData,
    is_lfs_pointer,
    parse_json,
    plain_file_name,
)
from mcore_rl.common.values import difference
from mcore_rl.model.tensors import TensorInfo, is_mtp_copy

# `hf_export` writes this file; only a folder that has it may be replaced.
EXPORT_MARKER = "mcore_rl_export.json"
INDEX = "model.safetensors.index.json"


def best_export(folder: str) -> Path:
    """Return the folder of the best export of a run, next to that of `--rl-export-hf`."""
    target = Path(folder).resolve()
    return target.with_name(target.name + "-best")


_SINGLE = "model.safetensors"
# Weights in any format, checkpoints, their indexes, and incomplete downloads or copies of them.
_MORE = r"(\.index(\.json)?|\.data)?(\.(incomplete|part|tmp|aria2|bak))?"
_WEIGHTS = re.compile(
    r".*\.(safetensors|pt|pth|ckpt|gguf|ggml|h5|msgpack|onnx|onnx_data|ot|tflite|npz|distcp|metadata"
    rf"|mlpackage|pdparams|bin\.index\.json){_MORE}",
    re.IGNORECASE,
)
_WEIGHTS_OF_TORCH = re.compile(
    r"((pytorch|adapter|openvino|diffusion)_.*|ggml-.*|(model|optimizer(_\d+)?|consolidated)\b.*)"
    rf"\.bin{_MORE}"
)
# With an adapter_config.json transformers would load an adapter's base model, not the export.
_NEITHER = ("adapter_config.json", "__pycache__")
_MAX_OTHER_BYTES = 512 << 20
_COMPARED_NUMBERS = 4 << 20  # elements of each copy per comparison


@dataclass(frozen=True, slots=True)
class Copy:
    """A duplicate: `tensor` of `file` must equal `of` of `of_file`, which is read.

    Example: `Copy("lm_head.weight", FILE, "model.embed_tokens.weight", FILE)` with tied embeddings.
    """

    tensor: str
    file: str
    of: str
    of_file: str


def places(folder: Path, needed: Collection[str], flag: str) -> dict[str, list[str]]:
    """Return the files that hold each tensor, the one to read first.

    Tensors that the index does not name are included if they are in `needed`. Raises UsageError, or
    OSError for a file that may not be read.
    """
    if not (folder / INDEX).is_file():
        if not (folder / _SINGLE).is_file():
            # "consolidated" marks another format, "adapter" weights that only add to others.
            others = sorted(
                path.name
                for path in folder.glob("*.safetensors")
                if not path.name.startswith(("consolidated", "adapter"))
            )
            raise UsageError(
                f"has neither {_SINGLE} nor {INDEX}" + (f", but {others[0]}" if others else ""),
                flag=f"{flag} {folder}",
                remedy=f"copy {INDEX}, which names the shards, from where they were published"
                if others
                else "convert its weights to safetensors",
            )
        with opened(folder / _SINGLE, flag) as file:
            return {tensor: [_SINGLE] for tensor in file.keys()}
    of_index = _read_index(folder / INDEX, flag)
    files = {tensor: [name] for tensor, name in of_index.items()}
    for name in sorted(set(of_index.values())):
        if not (folder / name).is_file():
            raise UsageError(
                f": {folder / name} is missing but named in {INDEX}",
                flag=flag,
                remedy="copy the checkpoint again",
            )
        with opened(folder / name, flag) as file:
            for tensor in file.keys():
                if tensor not in files and tensor in needed:
                    files[tensor] = [name]
                elif tensor in files and name not in files[tensor]:
                    files[tensor].append(name)
    if (folder / _SINGLE).is_file() and _SINGLE not in of_index.values():
        _add_single(folder, files, flag)
    return files


def _add_single(folder: Path, files: dict[str, list[str]], flag: str) -> None:
    """Add `model.safetensors` next to an index of other files.
    transformers reads the former, vLLM the latter."""
    with opened(folder / _SINGLE, flag) as file:
        held = set(file.keys())
    if held != files.keys():
        odd = sorted(held ^ files.keys())[0]
        raise UsageError(
            f"has both {_SINGLE} and {INDEX}, and {odd} is in only one of them",
            flag=f"{flag} {folder}",
            remedy="remove the wrong one",
        )
    for names in files.values():
        if _SINGLE not in names:
            names.append(_SINGLE)


def _read_index(path: Path, flag: str) -> dict[str, str]:
    """Read an index: tensor -> name of its file."""
    try:
        read = parse_json(path.read_bytes())
        weight_map = read.get("weight_map") if isinstance(read, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise InvalidData("has no weight_map")
        return {tensor: plain_file_name(name) for tensor, name in weight_map.items()}
    except InvalidData as error:
        raise UsageError(
            f": {path} is not a safetensors index ({error})",
            flag=flag,
            remedy="copy the checkpoint again",
        ) from error


def opened(path: Path, flag: str) -> safe_open:
    try:
        path.open("rb").close()  # safetensors reports an unreadable file as missing
    except OSError as error:
        raise unreadable(path, error, flag) from error
    try:
        # safetensors compares the header with the file's length: a truncated shard fails here.
        tensors = safe_open(path, framework="pt")
        _check_no_key_twice(path)
        return tensors
    except (SafetensorError, InvalidData, OSError) as error:
        remedy = f"it {FETCH_LFS}" if is_lfs_pointer(path) else "copy this file again"
        raise UsageError(
            f": {path} is corrupt or cut short ({error})", flag=flag, remedy=remedy
        ) from error


def _check_no_key_twice(path: Path) -> None:
    """Raise InvalidData if a header, which safetensors has read, has a name twice.
    safetensors takes the last one, and other readers may take the first."""

    def once(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidData(f"its header has {twice[:200]} twice")

    with path.open("rb") as file:
        json.loads(file.read(int.from_bytes(file.read(8), "little")), object_pairs_hook=once)


def read_header(
    path: Path, tensors: Sequence[str], dtypes: Mapping[str, torch.dtype], flag: str
) -> Iterator[tuple[str, TensorInfo]]:
    with opened(path, flag) as file:
        held = set(file.keys())
        for tensor in tensors:
            if tensor not in held:
                raise UsageError(
                    f": {path} lacks {tensor}, which {INDEX} puts there",
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


def check_copies(
    folder: Path,
    copies: Sequence[Copy],
    *,
    part: int = 0,
    num_parts: int = 1,
    flag: str = "--rl-hf-checkpoint",
) -> None:
    """Raise UsageError unless each of `copies` equals the tensor it repeats, bit for bit.

    Reader `part` of `num_parts` compares its share of the rows, in blocks of a few MiB.
    """
    for copy in copies:
        with contextlib.ExitStack() as files:
            one, other = (
                files.enter_context(opened(folder / name, flag)).get_slice(tensor)
                for tensor, name in ((copy.tensor, copy.file), (copy.of, copy.of_file))
            )
            problem = _first_difference(one, other, part, num_parts)
        if not problem:
            continue
        held = f" of {copy.file}" if copy.tensor == copy.of else ""
        remedy = "remove the wrong one from the files"
        if copy.tensor != copy.of and not is_mtp_copy(copy.tensor):
            remedy += ", or set tie_word_embeddings to false in its config.json"
        raise UsageError(
            f"has {copy.tensor}{held}, which differs from {copy.of} of {copy.of_file} and should "
            f"repeat it: {problem}",
            flag=f"{flag} {folder}",
            remedy=remedy,
        )


def _first_difference(one: Any, other: Any, part: int, num_parts: int) -> str:
    """Return how two slices of files differ in a reader's share; "" if they do not."""
    places = ("in the copy", "in the other")
    kinds = [f"{each.get_dtype()} {each.get_shape()}" for each in (one, other)]
    if kinds[0] != kinds[1]:
        return f"it is {kinds[0]} {places[0]} and {kinds[1]} {places[1]}"
    for rows in row_blocks(one.get_shape(), part, num_parts):
        first_row = 0 if rows is ... else rows.start
        if problem := difference(one[rows], other[rows], places, first_row=first_row):
            return problem
    return ""


def row_blocks(shape: Sequence[int], part: int, num_parts: int) -> Iterator[Any]:
    """Yield indices of a reader's share of a tensor, in blocks of about _COMPARED_NUMBERS."""
    if not shape or 0 in shape:
        if part == 0:
            yield ...
        return
    start, stop = (shape[0] * n // num_parts for n in (part, part + 1))
    step = max(1, _COMPARED_NUMBERS // math.prod(shape[1:]))
    yield from (slice(row, min(row + step, stop)) for row in range(start, stop, step))


@dataclass(frozen=True, slots=True)
class OtherFiles:
    """The files of a folder that are not weights."""

    files: tuple[str, ...]  # relative to the folder, to be copied
    left_out: tuple[str, ...]  # "NAME (why)"


def other_files(folder: Path, *, apart_from: Collection[Path] = ()) -> OtherFiles:
    """Find the regular files of `folder` and its sub-folders except weights and their indexes.

    A tokenizer's code may use any file names, so a list of names would not suffice. Hidden files,
    Python's caches, the folders `apart_from`, and sub-folders with weights or checkpoints are left
    out. A link is followed only to a file or folder in the folder itself, in the Hub cache that
    contains the folder, or in the folder of the file that config.json links to: a downloaded link
    to another place could lead to a file that must not be published.
    """
    root = folder.resolve()
    homes = {root, (folder / "config.json").resolve().parent}
    if root.parent.name == "snapshots":
        homes.add(root.parent.parent / "blobs")
    apart = {path.resolve() for path in apart_from}
    followed = {root}  # folders that links lead to, each of them once
    files: list[str] = []
    left_out: list[str] = []
    waiting = [folder]
    while waiting:
        for path in _entries(waiting.pop(), folder, left_out):
            name = path.relative_to(folder).as_posix()
            if path.name.startswith(".") or path.name in _NEITHER or _is_weights(path):
                continue
            try:
                target = path.resolve(strict=True)
            except (OSError, RuntimeError) as error:  # the latter: links in a circle
                left_out.append(f"{name} ({getattr(error, 'strerror', 'a link in a circle')})")
                continue
            if target in apart:
                continue
            is_link = path.is_symlink()
            if is_link and not any(target.is_relative_to(home) for home in homes):
                left_out.append(f"{name} (a link to another place)")
            elif is_link and target in followed:
                left_out.append(f"{name} (a link to a folder that is copied)")
            elif target.is_dir():
                if any(map(_is_weights, target.rglob("*"))):
                    left_out.append(f"{name} (a folder with weights of its own)")
                else:
                    waiting.append(path)
                    followed |= {target} if is_link else set()
            elif not target.is_file():
                left_out.append(f"{name} (not a file)")
            elif target.stat().st_size > _MAX_OTHER_BYTES:
                left_out.append(f"{name} (more than {_MAX_OTHER_BYTES >> 20} MiB)")
            else:
                files.append(name)
    return OtherFiles(tuple(files), tuple(left_out))


def _entries(of: Path, folder: Path, left_out: list[str]) -> list[Path]:
    try:
        return sorted(of.iterdir())
    except OSError as error:
        left_out.append(f"{of.relative_to(folder).as_posix()} ({error.strerror})")
        return []


def _is_weights(path: Path) -> bool:
    return any(known.fullmatch(path.name) for known in (_WEIGHTS, _WEIGHTS_OF_TORCH))
