"""A distributed checkpoint is read as data: no code in it is run.

Symptom: `--load` of a folder that somebody else has made runs whatever that somebody put into its
`.metadata`, or into an object (a random state, Megatron's arguments) in one of its `.distcp` files.
Cause: torch.distributed.checkpoint reads the first by `pickle.load` and the second by
`torch.load(weights_only=False)`. Megatron reads checkpoints by both.
Why safe: what Megatron and torch save consists of few classes, each of which only holds values; the
first is read by an unpickler that knows those of metadata, the second by torch's own for weights
with the classes that Megatron registers there. Any other is refused by a sentence that names file
and class, before it is looked up. Saving is as it was.
Upstream: as described, as of torch 2.13.0 and megatron-core 0.19.2.
Drop when: `FileSystemReader.read_metadata` and `DefaultLoadPlanner.load_bytes` refuse what is code.
Versions: torch 2.13.0; 2.8 to 2.12, which is not tried, where both places look as they do there.
"""

from __future__ import annotations

import enum
import functools
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any, BinaryIO

from packaging.specifiers import SpecifierSet

from mcore_rl.common.errors import UsageError
from mcore_rl.patches.registry import Patch, require, require_parameters

_CHECKPOINT = "torch.distributed.checkpoint"
# What `.metadata` of torch's and Megatron's savers is made of, beside torch's dtypes.
METADATA_CLASSES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),  # strided and the like, by name
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *((f"{_CHECKPOINT}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(
        (f"{_CHECKPOINT}.planner", name)
        for name in (
            "SavePlan",
            "WriteItem",
            "WriteItemType",
            "TensorWriteData",
            "BytesIOWriteData",
        )
    ),
}


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._name = getattr(file, "name", ".metadata")

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return self._member  # how Python before 3.11.4 stores a member of an enum
        if (module, name) not in METADATA_CLASSES:
            raise _refusal(str(self._name), f"{module}.{name}")
        return super().find_class(module, name)

    def _member(self, owner: Any, name: str) -> enum.Enum:
        if not (isinstance(owner, enum.EnumMeta) and name in owner.__members__):
            raise _refusal(str(self._name), "builtins.getattr")
        return owner.__members__[name]


class _MetadataPickle:
    """The module pickle, whose `load` knows the classes of metadata only."""

    def __init__(self) -> None:
        # torch makes a text of what is raised while it reads metadata, and goes on.
        self.refusal: UsageError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)

    def load(self, file: BinaryIO) -> Any:
        try:
            return _MetadataUnpickler(file).load()
        except UsageError as error:
            self.refusal = error
            raise
        except Exception as error:  # pickle raises anything on bytes that are none of its own
            self.refusal = UsageError(
                f"{getattr(file, 'name', '.metadata')} is no metadata of a checkpoint "
                f"({type(error).__name__}: {error})",
                remedy="restore the file, or load another checkpoint",
            )
            raise self.refusal from error


def load_object(stored: io.BytesIO | str, name: str) -> Any:
    """What torch.save has stored, if it is tensors, plain values and Megatron's safe classes.

    Raises UsageError with `name` and the class if there is any other.
    """
    import torch

    try:
        return torch.load(stored, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refusal(name, _class_in(str(error))) from error


def _class_in(message: str) -> str:
    """The class that torch's unpickler would not know, out of its advice of several lines."""
    _, found, rest = message.partition("GLOBAL ")
    return rest.split()[0] if found else message.partition("\n")[0]


def _refusal(place: str, class_name: str) -> UsageError:
    return UsageError(
        f"{place} holds {class_name}, which is no part of a checkpoint and may be code that would "
        "run when it is read",
        remedy="get the checkpoint from whom you trust, or save it without that",
    )


def _told_to_the_user(load: Callable[..., Any], reading: _MetadataPickle) -> Callable[..., Any]:
    """`load`, which wraps the errors of all ranks in its own, with a refusal as it was raised."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException

    def without_tracebacks(record: logging.LogRecord) -> bool:
        """torch warns of metadata that it cannot read, and looks for others."""
        return reading.refusal is None or record.exc_info is None

    @functools.wraps(load)
    def loading(*args: Any, **kwargs: Any) -> Any:
        reading.refusal = None
        state_dict_loader.logger.addFilter(without_tracebacks)
        try:
            return load(*args, **kwargs)
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, UsageError):
                    raise failure from error
            if reading.refusal is not None:
                raise reading.refusal from error
            raise
        finally:
            state_dict_loader.logger.removeFilter(without_tracebacks)

    return loading


def needed() -> bool:
    return True


def apply() -> None:
    """Replace how metadata and objects are read."""
    from torch.distributed.checkpoint import default_planner, filesystem, state_dict_loader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    require(filesystem.pickle is pickle, f"{_CHECKPOINT}.filesystem", "imports no pickle")
    require_parameters(DefaultLoadPlanner.load_bytes, "self", "read_item", "value")
    loader = getattr(state_dict_loader, "_load_state_dict", None)
    require(callable(loader), f"{_CHECKPOINT}.state_dict_loader", "loads by another function")
    set_element = default_planner.set_element

    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        found = load_object(value, f"the object {name} of the checkpoint")
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], found)
        else:
            self.state_dict[name] = found

    reading = _MetadataPickle()
    filesystem.pickle = reading
    DefaultLoadPlanner.load_bytes = load_bytes
    state_dict_loader._load_state_dict = _told_to_the_user(loader, reading)


PATCH = Patch(
    name="torch.checkpoint_reading",
    package="torch",
    versions=SpecifierSet(">=2.8,<2.14"),
    reason="checkpoints are read as data, without the code that pickle would run",
    needed=needed,
    apply=apply,
)
