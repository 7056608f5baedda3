"""An unpickler for the `.metadata` of a distributed checkpoint, with an allow-list of names.

It finds torch's metadata dataclasses and what they hold: sizes, dtypes, layouts, paths, and members
of two enums. A pickle that names anything else raises `ForbiddenContent` before it is looked up. A
pickle may still set attributes of the classes that it names: such a change is undone and refused.
Storage paths must be plain names within the checkpoint's folder, and chunks lie within their
tensor.
"""

from __future__ import annotations

import contextlib
import enum
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import PosixPath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from mcore_rl.common.readers import plain_file_name

# About a million chunks of tensors.
MAX_BYTES = 256 << 20

_ENUMS = (planner.WriteItemType, metadata._MEM_FORMAT_ENCODING)
CLASSES: tuple[type, ...] = (
    *(metadata.Metadata, metadata.StorageMeta, metadata.TensorStorageMetadata),
    *(metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.MetadataIndex),
    *(metadata.TensorProperties, filesystem._StorageInfo, filesystem._StoragePrefix),
    *(planner.SavePlan, planner.WriteItem, planner.TensorWriteData, planner.BytesIOWriteData),
    *_ENUMS,
)


class ForbiddenContent(Exception):
    """The error for content that is not part of metadata; the message names it."""


def _member(owner: Any, name: Any) -> enum.Enum:
    """Return a member of an enum, as Python before 3.11.4 stores it."""
    if owner in _ENUMS and isinstance(name, str) and name in owner.__members__:
        member: enum.Enum = owner.__members__[name]
        return member
    raise ForbiddenContent("builtins.getattr")


_NAMES: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    **{("builtins", "getattr"): _member, ("__builtin__", "getattr"): _member},  # 2: of protocol 2
    # The second module is that of Python 3.13.
    **{(module, "PosixPath"): PosixPath for module in ("pathlib", "pathlib._local")},
    **{(module, "PurePosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
}


class _Unpickler(pickle._Unpickler):
    # The one in Python: the one in C allocates a memo as large as the index that a file names.

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) not in _NAMES:
            raise ForbiddenContent(f"{module}.{name}")
        return _NAMES[module, name]


@contextlib.contextmanager
def unchanged(shared: Iterable[Any]) -> Iterator[None]:
    """Undo changes of these classes and members of enums, and raise ForbiddenContent for them."""
    before = [(each, type(each), dict(vars(each))) for each in shared]
    changed = None
    try:
        yield
    finally:
        for each, kind, was in before:
            now = dict(vars(each))
            if type(each) is kind and now.keys() == was.keys():
                if all(now[name] is value for name, value in was.items()):
                    continue
            changed = each
            owner: Any = type if isinstance(each, type) else object
            if type(each) is not kind:
                owner.__setattr__(each, "__class__", kind)
            for name in now.keys() - was.keys():
                owner.__delattr__(each, name)
            for name, value in was.items():
                if now.get(name) is not value:
                    owner.__setattr__(each, name, value)
    if changed is not None:
        what = changed.__name__ if isinstance(changed, type) else f"a member of {type(changed)}"
        raise ForbiddenContent(f"a state for {what}")


def read_metadata(content: bytes) -> metadata.Metadata:
    """Return the metadata in `content`.

    Raises ForbiddenContent for content that is not metadata, and other exceptions for bytes that
    are not a pickle.
    """
    members = [member for kind in _ENUMS for member in kind]
    with unchanged([*CLASSES, PosixPath, PurePosixPath, *members]):
        loaded = _Unpickler(io.BytesIO(content)).load()
        if type(loaded) is not metadata.Metadata:
            raise ForbiddenContent(f"a {type(loaded).__name__} instead of metadata")
        _check_places(loaded)
    return loaded


def _check_places(loaded: metadata.Metadata) -> None:
    """Raise ForbiddenContent unless all storage lies in the folder, and all chunks in a tensor."""
    for info in (loaded.storage_data or {}).values():
        name = info.relative_path
        if plain_file_name(name) != name or not _are_counts((info.offset, info.length)):
            raise ForbiddenContent("a _StorageInfo of other values than a file and a part of it")
    for key, tensor in loaded.state_dict_metadata.items():
        if isinstance(tensor, metadata.BytesStorageMetadata):
            continue
        for chunk in tensor.chunks:
            # Megatron-FSDP writes the places of its uneven shards as lists.
            places = tuple(chunk.offsets), tuple(chunk.sizes), tuple(tensor.size)
            is_within = len({*map(len, places)}) == 1 and all(
                _are_counts((offset, length, size)) and offset + length <= size
                for offset, length, size in zip(*places, strict=True)
            )
            if not is_within:
                raise ForbiddenContent(f"a chunk that does not lie within {str(key)[:200]!r}")


def _are_counts(numbers: Iterable[Any]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)
