"""A distributed checkpoint is read as data: no code in it is run.

Symptom: `--load` of a folder from another person runs any code that this person put into its
`.metadata`, or into an object (a random state, Megatron's arguments) in one of its `.distcp` files.
Cause: torch.distributed.checkpoint reads the first with `pickle.load` and the second with
`torch.load(weights_only=False)`. Megatron uses both to read checkpoints.
Why safe: Megatron and torch save few classes, which only hold values. The first is read by
`metadata_unpickler`, which has an allow-list of names; the second by torch's own unpickler for
weights, with the classes that Megatron registers there. Any other class is
refused before it is looked up, in a sentence that names file and class. Saving does not change.
Upstream: as described, as of torch 2.13.0 and megatron-core 0.19.2.
Drop when: `FileSystemReader.read_metadata` and `DefaultLoadPlanner.load_bytes` refuse code.
Versions: torch 2.13.0; 2.8 to 2.12 are not tried, but both places look the same there.
"""

from __future__ import annotations

import enum
import functools
import io
import logging
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from mcore_rl.common.errors import UsageError
from mcore_rl.patches.registry import Patch, require, require_parameters

_CHECKPOINT = "torch.distributed.checkpoint"
# What Megatron stores in each parameter group with --optimizer-cpu-offload. A start does not take
# them from a checkpoint, so they are read as None.
_OPTIMIZERS = (
    *("torch.optim.adam.Adam", "torch.optim.adamw.AdamW", "torch.optim.sgd.SGD"),
    *("apex.optimizers.fused_adam.FusedAdam", "apex.optimizers.fused_sgd.FusedSGD"),
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    "transformer_engine.pytorch.optimizers.fused_sgd.FusedSGD",
)


class MetadataPickle:
    """A stand-in for the module pickle whose `load` only reads metadata."""

    def __init__(self) -> None:
        # torch turns an exception from reading metadata into text, and continues.
        self.refusal: UsageError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)

    def load(self, file: BinaryIO) -> Any:
        """Return the metadata in `file`; UsageError for anything else."""
        from mcore_rl.patches.torch import metadata_unpickler as unpickler

        name = str(getattr(file, "name", ".metadata"))
        try:
            content = file.read(unpickler.MAX_BYTES + 1)
            if len(content) > unpickler.MAX_BYTES:
                raise unpickler.ForbiddenContent(f"more than {unpickler.MAX_BYTES} bytes")
            metadata = unpickler.read_metadata(content)
            _check_files(metadata, Path(name).parent if Path(name).is_file() else None)
            return metadata
        except UsageError as error:
            self.refusal = error
        except unpickler.ForbiddenContent as error:
            self.refusal = _refusal(name, str(error))
        except Exception as error:  # an unpickler raises anything on bytes that are not a pickle
            self.refusal = UsageError(
                f"{name} is not the metadata of a checkpoint ({type(error).__name__}: {error})",
                remedy="restore the file, or load another checkpoint",
            )
        raise self.refusal


def _check_files(metadata: Any, folder: Path | None) -> None:
    """Raise UsageError if a checkpoint file is missing or shorter than its metadata states."""
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        end = info.offset + info.length
        ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
    for name, end in sorted(ends.items()) if folder is not None else ():
        path = Path(folder, name)  # type: ignore[arg-type]
        size = path.stat().st_size if path.is_file() else -1
        if size < end:
            raise UsageError(
                f"{path} is {'missing' if size < 0 else f'cut short: {size} bytes'}, and "
                f"{folder}/.metadata names {end} bytes of it",
                remedy="restore the file, or load another checkpoint",
            )


def load_object(stored: io.BytesIO | str, name: str) -> Any:
    """Load an object stored by torch.save: tensors, plain values and Megatron's safe classes.
    Classes of optimizers become None.

    Raises UsageError with `name` and the class for any other, or if the bytes are not from
    torch.save. Members of enums, which the process shares, do not change.
    """
    import torch

    from mcore_rl.patches.torch.metadata_unpickler import ForbiddenContent, unchanged

    # torch's unpickler may set the state of any instance of a known class.
    members: list[enum.Enum] = []
    for known in torch.serialization.get_safe_globals():
        if isinstance(known, enum.EnumMeta):
            members += known.__members__.values()
    try:
        unread: Any = [(None, name) for name in _OPTIMIZERS]
        with unchanged(members), torch.serialization.safe_globals(unread):
            _require_uncompressed(stored)
            return torch.load(stored, map_location="cpu", weights_only=True)
    except ForbiddenContent as error:
        raise _refusal(name, str(error)) from error
    except pickle.UnpicklingError as error:
        raise _refusal(name, _class_in(str(error))) from error
    except Exception as error:
        raise UsageError(
            f"{name} cannot be read ({type(error).__name__}: {error})",
            remedy="restore the file, or load another checkpoint",
        ) from error


def _require_uncompressed(stored: io.BytesIO | str) -> None:
    """Refuse compressed entries: torch.save writes none, and they may expand to any size."""
    try:
        with zipfile.ZipFile(stored) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile:
        return  # torch reads its older format, or reports the error
    finally:
        if isinstance(stored, io.BytesIO):
            stored.seek(0)
    compressed = [each.filename for each in entries if each.compress_type != zipfile.ZIP_STORED]
    if compressed:
        raise pickle.UnpicklingError(f"the compressed entry {compressed[0]!r}")


def _class_in(message: str) -> str:
    """Return the class that torch's unpickler refused, from its message of several lines."""
    _, separator, rest = message.partition("GLOBAL ")
    return rest.split()[0] if separator else message.partition("\n")[0]


def _refusal(place: str, what: str) -> UsageError:
    return UsageError(
        f"{place} holds {what}, which is not part of a checkpoint and may be code that would "
        "run when it is read",
        remedy="get the checkpoint from a source that you trust, or save it without that",
    )


def _raising_refusals(load: Callable[..., Any], reading: MetadataPickle) -> Callable[..., Any]:
    """Make `load`, which wraps the errors of all ranks in its own, raise a refusal unwrapped."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException

    def without_tracebacks(record: logging.LogRecord) -> bool:
        """Filter torch's warnings of refused metadata; it then looks for other metadata."""
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


def apply() -> None:
    """Replace the functions that read metadata and objects."""
    from torch.distributed.checkpoint import default_planner, filesystem, state_dict_loader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    require(filesystem.pickle is pickle, f"{_CHECKPOINT}.filesystem", "imports no pickle")
    require_parameters(DefaultLoadPlanner.load_bytes, "self read_item value")
    loader: Any = getattr(state_dict_loader, "_load_state_dict", None)
    require(callable(loader), f"{_CHECKPOINT}.state_dict_loader", "loads by another function")
    set_element = default_planner.set_element

    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = load_object(value, f"the object {name} of the checkpoint")
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded

    reading = MetadataPickle()
    filesystem.pickle = reading  # type: ignore[assignment]  # in the place of the module
    DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]  # replaced
    state_dict_loader._load_state_dict = _raising_refusals(loader, reading)


PATCH = Patch(
    "torch.checkpoint_reading",
    "checkpoints are read as data, without the code that pickle would run",
    apply,
    packages=("torch",),
    versions=">=2.8,<2.14",
)
