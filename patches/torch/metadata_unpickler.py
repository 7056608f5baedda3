"""An unpickler for the `.metadata` of a distributed checkpoint, as data of known types.

The standard unpickler can restrict the classes that a pickle names, but not their use: a state may
be set on a class, and a memo index may allocate gigabytes. This one restricts both:

- opcodes: only those that pickle's protocols 2 to 5 need for the types below;
- objects: NEWOBJ and BUILD only create instances of torch's metadata dataclasses, each once, with
  their own fields; REDUCE only creates a size, a path, a layout, a dict or a member of an enum;
- keys: strings, integers and MetadataIndex;
- memory: the file, its memo, its stack and its nesting are bounded (`MAX_BYTES` and below);
- values: every field has torch's type, offsets and sizes are not negative, chunks lie within their
  tensor, and storage paths are plain names within the checkpoint's folder.

A file that violates one of these raises `ForbiddenContent` or another exception; nothing outside
the returned object changes.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import PosixPath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from mcore_rl.common.readers import plain_file_name

# About a million chunks of tensors. Objects take up to 80 bytes for each byte of the file.
MAX_BYTES = 256 << 20
_MAX_STACK = 10_000  # pickle pushes up to 1000 pairs
_MAX_MARKS = 64
_LEAST_BYTES_PER_MEMO = 4  # torch's metadata has about 9
_MAX_LONG_BYTES = 8  # larger numbers are not sizes, and their hashes could collide
_MAX_DIMENSIONS = 64

Check = Callable[[Any], bool]

_PATHS = (PosixPath, PurePosixPath)
_PLAIN = (str, int, float, type(None))


class ForbiddenContent(Exception):
    """The error for content that is not part of metadata; the message names it."""


def _optional(*types: type) -> Check:
    return lambda value: value is None or type(value) in types


def _of(*types: type) -> Check:
    return lambda value: type(value) in types


def _each(check: Check, *containers: type) -> Check:
    return lambda value: type(value) in containers and all(map(check, value))


def _mapping(key: Check, value: Check) -> Check:
    return lambda found: (
        type(found) in (dict, OrderedDict)
        and all(map(key, found))
        and all(map(value, found.values()))
    )


def _natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _size(value: Any) -> bool:
    return type(value) in (torch.Size, tuple) and _are_counts(value)


def _place(value: object) -> bool:
    # Megatron-FSDP writes the locations of its uneven shards as lists.
    return type(value) in (torch.Size, tuple, list) and _are_counts(value)


def _are_counts(numbers: Any) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _optionally(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _plain(value: Any) -> bool:
    return type(value) in _PLAIN


# Location of an object in a state dict: keys and indexes, by its name.
_planner_data = _optionally(_mapping(_of(str), _each(_of(str, int), tuple, list)))
# Megatron before 0.14 added this: numbers by tensor and purpose.
_mcore_data = _optionally(
    _mapping(_of(str), _mapping(_of(str), lambda v: _plain(v) or _each(_plain, tuple, list)(v)))
)

# The fields of each class, with checks of their values.
_FIELDS: dict[type, dict[str, Check]] = {
    metadata.Metadata: {
        "state_dict_metadata": _mapping(
            _of(str), _of(metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)
        ),
        "planner_data": _planner_data,
        "storage_data": _optionally(
            _mapping(_of(metadata.MetadataIndex), _of(filesystem._StorageInfo))
        ),
        "storage_meta": _optional(metadata.StorageMeta),
        "version": _optional(str),
        "all_local_plans": _optionally(_each(_of(planner.SavePlan), list, tuple)),  # Megatron's
        "mcore_data": _mcore_data,
    },
    metadata.StorageMeta: {
        "checkpoint_id": _optional(str, *_PATHS),
        "save_id": _optional(str),
        "load_id": _optional(str),
        "modules": _each(_of(str), list),
    },
    metadata.TensorStorageMetadata: {
        "properties": _of(metadata.TensorProperties),
        "size": _size,
        "chunks": _each(_of(metadata.ChunkStorageMetadata), list),
    },
    metadata.BytesStorageMetadata: {},
    metadata.ChunkStorageMetadata: {"offsets": _place, "sizes": _place},
    metadata.MetadataIndex: {
        "fqn": _of(str),
        "offset": _optionally(_size),
        "index": _optionally(_natural),
    },
    # The names in its own __setstate__.
    metadata.TensorProperties: {
        "dtype": _of(torch.dtype),
        "layout": _of(torch.layout),
        "requires_grad": _of(bool),
        "memory_format": _of(torch.memory_format),
        "pin_memory": _of(bool),
    },
    filesystem._StorageInfo: {
        "relative_path": lambda name: plain_file_name(name) == name,
        "offset": _natural,
        "length": _natural,
        "transform_descriptors": _optionally(_each(_of(str), list, tuple)),
    },
    filesystem._StoragePrefix: {"prefix": _of(str)},
    planner.SavePlan: {
        "items": _each(_of(planner.WriteItem), list),
        "storage_data": _optional(filesystem._StoragePrefix),
        "planner_data": _planner_data,
        "usable": _of(bool),
    },
    planner.WriteItem: {
        "index": _of(metadata.MetadataIndex),
        "type": _of(planner.WriteItemType),
        "bytes_io_data": _optional(planner.BytesIOWriteData),
        "tensor_data": _optional(planner.TensorWriteData),
    },
    planner.TensorWriteData: {
        "chunk": _of(metadata.ChunkStorageMetadata),
        "properties": _of(metadata.TensorProperties),
        "size": _size,
    },
    planner.BytesIOWriteData: {"nbytes": _natural},
}
_LACKING = object()
_CONTAINERS = {dict, OrderedDict, list, tuple}
_MAY_LACK = {"all_local_plans", "mcore_data", "modules"}  # some versions omit them
_ENUMS: tuple[type[enum.Enum], ...] = (planner.WriteItemType, metadata._MEM_FORMAT_ENCODING)


def _member(owner: Any, name: Any) -> enum.Enum:
    """Return a member of an enum, as Python before 3.11.4 stores it."""
    if owner in _ENUMS and type(name) is str and name in owner.__members__:
        member: enum.Enum = owner.__members__[name]
        return member
    raise ForbiddenContent("builtins.getattr")


def _numbered(kind: type[enum.Enum]) -> Callable[[Any], enum.Enum]:
    """Return a function from a value to a member of an enum, as pickle stores it."""

    def make(value: Any) -> enum.Enum:
        if type(value) is not int:  # hashing a nested tuple may not terminate
            raise ForbiddenContent(f"{kind.__name__} of another value than an integer")
        return kind(value)

    return make


def _torch_size(numbers: Any = ()) -> torch.Size:
    is_size = type(numbers) in (tuple, list) and len(numbers) <= _MAX_DIMENSIONS
    if not is_size or not all(type(number) is int for number in numbers):
        raise ForbiddenContent(f"torch.Size of other values than {_MAX_DIMENSIONS} integers")
    return torch.Size(numbers)


def _path(kind: type[PurePosixPath]) -> Callable[..., PurePosixPath]:
    def make(*parts: Any) -> PurePosixPath:
        if not all(type(part) is str for part in parts):
            raise ForbiddenContent(f"{kind.__name__} of other values than strings")
        return kind(*parts)

    return make


def _layout(name: Any) -> torch.layout:
    # vars(), because getattr of torch imports modules by name.
    found = vars(torch).get(name.removeprefix("torch.")) if type(name) is str else None
    if not isinstance(found, torch.layout):
        raise ForbiddenContent("torch.serialization._get_layout of an unknown layout")
    return found


def _ordered() -> OrderedDict[Any, Any]:
    return OrderedDict()


# Allowed calls: name in the pickle -> function here that checks its arguments.
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _torch_size,
    ("torch.serialization", "_get_layout"): _layout,
    ("pathlib", "PosixPath"): _path(PosixPath),
    ("pathlib", "PurePosixPath"): _path(PurePosixPath),
    ("pathlib._local", "PosixPath"): _path(PosixPath),  # as Python 3.13 names it
    ("pathlib._local", "PurePosixPath"): _path(PurePosixPath),
    ("collections", "OrderedDict"): _ordered,
    ("builtins", "getattr"): _member,
    ("__builtin__", "getattr"): _member,  # as protocol 2 names it
}
_CLASSES: dict[tuple[str, str], type] = {
    (kind.__module__, kind.__name__): kind for kind in (*_FIELDS, *_ENUMS)
}
# By identity: hashing a value of the pickle may not terminate.
_KINDS = {id(kind) for kind in _FIELDS}
_MEMBERS = {id(kind): _numbered(kind) for kind in _ENUMS}
_CALLABLE = {id(function): function for function in _CALLS.values()} | _MEMBERS
_OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 "
    "BINFLOAT BINUNICODE SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD BINGET "
    "LONG_BINGET BINPUT LONG_BINPUT MEMOIZE"
).split()


class MetadataUnpickler(pickle._Unpickler):
    """An unpickler of one pickle, `content`, with the module's restrictions."""

    # Attributes of the base class that its stub lacks.
    memo: dict[int, Any]
    pop_mark: Callable[[], list[Any]]

    dispatch = {
        code: pickle._Unpickler.dispatch[code]
        for code in (getattr(pickle, name)[0] for name in _OPCODES)
    }

    def __init__(self, content: bytes) -> None:
        file = io.BytesIO(content)
        super().__init__(file)
        self._num_bytes = len(content)
        self._is_pickle = content.startswith(pickle.PROTO)
        # Ignore the frames of protocol 4, which only help to read files in pieces.
        self.read, self.readline = file.read, file.readline

    def load(self) -> metadata.Metadata:
        """Return the metadata.

        Raises ForbiddenContent for content that is not metadata, and other exceptions for bytes
        that are not a pickle.
        """
        self.metastack: list[list[Any]] = []
        self.stack: list[Any] = []
        self.append = self.stack.append
        if not self._is_pickle:
            raise ValueError("not a pickle of protocol 2 or later")
        read = self.read
        handlers: Mapping[int, Callable[[Any], None]] = self.dispatch
        with _without_garbage_collection():
            while True:
                (code,) = read(1)
                handler = handlers.get(code)
                if handler is None:
                    raise ForbiddenContent(f"the pickle opcode {code:#04x}")
                if len(self.stack) > _MAX_STACK:
                    raise ForbiddenContent(f"more than {_MAX_STACK} values side by side")
                if code == pickle.STOP[0]:
                    break
                handler(self)
            found = self.stack.pop()
            if type(found) is not metadata.Metadata:
                raise ForbiddenContent(f"a {type(found).__name__} instead of metadata")
            _check_fields(found)
            _check_chunks(found, self._num_bytes)
        return found

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        found = _CLASSES.get((module, name)) or _CALLS.get((module, name))
        if found is None:
            raise ForbiddenContent(f"{module}.{name}")
        return found

    def load_frame(self) -> None:
        self.read(8)

    def load_long1(self) -> None:
        (num_bytes,) = self.read(1)
        if num_bytes > _MAX_LONG_BYTES:
            raise ForbiddenContent(f"an integer of {num_bytes} bytes")
        self.append(int.from_bytes(self.read(num_bytes), "little", signed=True))

    def load_mark(self) -> None:
        if len(self.metastack) >= _MAX_MARKS:
            raise ForbiddenContent(f"values nested deeper than {_MAX_MARKS} levels")
        super().load_mark()  # type: ignore[misc]  # not in the stub of the base class

    def load_memoize(self) -> None:
        self._remember(len(self.memo))

    def load_binput(self) -> None:
        self._remember(self.read(1)[0])

    def load_long_binput(self) -> None:
        self._remember(int.from_bytes(self.read(4), "little"))

    def _remember(self, index: int) -> None:
        # A dict, in which a large index needs no more memory than a small one.
        if len(self.memo) * _LEAST_BYTES_PER_MEMO > self._num_bytes + 1000:
            raise ForbiddenContent("more references than its size allows")
        self.memo[index] = self.stack[-1]

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if arguments != () or id(kind) not in _KINDS:
            raise ForbiddenContent(f"an object made of {_named(kind)}")
        self.append(kind.__new__(kind))

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack[-1]
        if type(arguments) is not tuple or id(function) not in _CALLABLE:
            raise ForbiddenContent(f"a call of {_named(function)}")
        self.stack[-1] = _CALLABLE[id(function)](*arguments)

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        kind = type(target)
        if kind not in _FIELDS or vars(target):
            raise ForbiddenContent(f"a state for {_named(target)}")
        if kind is metadata.TensorProperties:
            if type(state) is not tuple or type(state[3]) is not metadata._MEM_FORMAT_ENCODING:
                raise ForbiddenContent("a state of TensorProperties that is not a tuple")
            target.__setstate__(state)
            return
        if type(state) is not dict or not state.keys() <= _FIELDS[kind].keys():
            raise ForbiddenContent(f"a state of {kind.__name__} with other fields")
        vars(target).update(state)

    def load_append(self) -> None:
        value = self.stack.pop()
        self._list().append(value)

    def load_appends(self) -> None:
        values = self.pop_mark()
        self._list().extend(values)

    def _list(self) -> list[Any]:
        found = self.stack[-1]
        if type(found) is not list:
            raise ForbiddenContent(f"values appended to {_named(found)}")
        return found

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        found = self.stack[-1]
        if type(found) not in (dict, OrderedDict):
            raise ForbiddenContent(f"entries of {_named(found)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is metadata.MetadataIndex:  # they make its hash, which must not change
                if type(key.fqn) is not str or not _optionally(_size)(key.offset):
                    raise ForbiddenContent("a MetadataIndex of other values than name and offset")
            elif type(key) not in (str, int):
                raise ForbiddenContent(f"a key of type {type(key).__name__}")
            found[key] = value

    for _name, _handler in list(vars().items()):
        if _name.startswith("load_"):
            dispatch[getattr(pickle, _name.removeprefix("load_").upper())[0]] = _handler


def _named(value: Any) -> str:
    """Describe a value for a message by its type only: it may be deeply nested."""
    return value.__name__ if isinstance(value, type) else f"a {type(value).__name__}"


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable collection, which would scan millions of new objects repeatedly and free none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_fields(found: metadata.Metadata) -> None:
    """Raise ForbiddenContent unless all fields of all objects have values of their types."""
    waiting: list[Any] = [found]
    seen: set[int] = set()
    right: set[tuple[int, Check]] = set()  # checked containers, which objects may share
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if id(value) in seen or (kind not in _FIELDS and kind not in _CONTAINERS):
            continue
        seen.add(id(value))
        if kind not in _FIELDS:
            waiting.extend(value)
            if kind in (dict, OrderedDict):
                waiting.extend(value.values())
            continue
        for name, check in _FIELDS[kind].items():
            inner = getattr(value, name, _LACKING)
            if inner is _LACKING and name in _MAY_LACK:
                continue
            is_container = type(inner) in _CONTAINERS
            if not (is_container and (id(inner), check) in right) and not check(inner):
                raise ForbiddenContent(f"a {kind.__name__} whose {name} is not of its type")
            if is_container:
                right.add((id(inner), check))
            waiting.append(inner)


def _check_chunks(found: metadata.Metadata, num_bytes: int) -> None:
    """Raise ForbiddenContent unless every chunk lies within its tensor."""
    num_chunks = 0
    for name, tensor in found.state_dict_metadata.items():
        if isinstance(tensor, metadata.BytesStorageMetadata):
            continue
        num_chunks += len(tensor.chunks)
        if num_chunks > num_bytes:  # each takes some bytes of the file
            raise ForbiddenContent("more chunks than its size allows")
        for chunk in tensor.chunks:
            within = len(chunk.offsets) == len(chunk.sizes) == len(tensor.size) and all(
                start + length <= size
                for start, length, size in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
            )
            if not within:
                raise ForbiddenContent(f"a chunk that does not lie within {name[:200]!r}")
