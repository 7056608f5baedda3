"""What is read of a checkpoint's `.metadata` and objects; whole checkpoints are in tests/dist."""

from __future__ import annotations

import enum
import io
import pathlib
import pickle
import signal
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from mcore_rl.common.errors import UsageError
from mcore_rl.patches.torch import checkpoint_reading, enum_pickles, metadata_unpickler


def sound() -> metadata.Metadata:
    """Metadata of two chunks and an object, with all that torch and Megatron add."""
    index = metadata.MetadataIndex("w", (0, 0), 0)
    properties = metadata.TensorProperties(dtype=torch.bfloat16)
    chunks = [
        metadata.ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 3])) for row in (0, 1)
    ]
    write = planner.TensorWriteData(chunks[0], properties, torch.Size([2, 3]))
    found = metadata.Metadata(
        {
            "w": metadata.TensorStorageMetadata(properties, torch.Size([2, 3]), chunks),
            "rng": metadata.BytesStorageMetadata(),
        },
        planner_data={"w": ("model", 0, "w")},
        storage_data={
            index: filesystem._StorageInfo("__0_0.distcp", 0, 6),
            metadata.MetadataIndex("w", (1, 0), 1): filesystem._StorageInfo("__0_0.distcp", 6, 6),
        },
        storage_meta=metadata.StorageMeta(pathlib.PosixPath("/somewhere"), "save"),
        version="1.0",
    )
    found.all_local_plans = [  # type: ignore[attr-defined]
        planner.SavePlan(
            [
                planner.WriteItem(index, planner.WriteItemType.SHARD, None, write),
                planner.WriteItem(
                    index, planner.WriteItemType.BYTE_IO, planner.BytesIOWriteData(3)
                ),
            ],
            filesystem._StoragePrefix("__0_"),
        )
    ]
    return found


def read(content: bytes) -> Any:
    return checkpoint_reading.MetadataPickle().load(io.BytesIO(content))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_is_read_as_pickle_reads_it(protocol: int) -> None:
    stored = pickle.dumps(sound(), protocol=protocol)
    found = read(stored)
    assert found == pickle.loads(stored) and vars(found).keys() == vars(sound()).keys()
    assert found.all_local_plans == sound().all_local_plans  # type: ignore[attr-defined]


class _Stored:
    """Pickled as `getattr(owner, name)`."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (self._owner, self._name)


def test_members_of_enums_are_read_as_python_before_3_11_4_stores_them() -> None:
    stored = sound()
    (plan,) = stored.all_local_plans  # type: ignore[attr-defined]
    member = _Stored(planner.WriteItemType, "SHARD")
    object.__setattr__(plan.items[0], "type", member)
    found = read(pickle.dumps(stored))
    assert found.all_local_plans[0].items[0].type is planner.WriteItemType.SHARD


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_read_as_each_python_stores_them(module: str) -> None:
    content = pickle.dumps(sound(), protocol=4)
    here = short(Path.__module__)
    assert content.count(here) == 1
    found = read(content.replace(here, short(module)))
    assert found.storage_meta == sound().storage_meta
    assert type(found.storage_meta.checkpoint_id) is type(Path())


@pytest.mark.parametrize("name", ["mro", "__subclasses__", "name", "from_bytes"])
@pytest.mark.parametrize("owner", [planner.WriteItemType, torch.Size])
def test_other_attributes_are_not_read(owner: type, name: str) -> None:
    with pytest.raises(UsageError, match="holds builtins.getattr, which is not part of a check"):
        read(pickle.dumps(_Stored(owner, name)))


def short(text: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()


def name(module: str, attribute: str) -> bytes:
    return short(module) + short(attribute) + pickle.STACK_GLOBAL


DCP = "torch.distributed.checkpoint"
METADATA, MEMBER = name(f"{DCP}.metadata", "Metadata"), name(f"{DCP}.planner", "WriteItemType")
SIZE, PATH = name("torch", "Size"), name("pathlib", "PosixPath")
LAYOUT = name("torch.serialization", "_get_layout")
SLOTS = b"N" + pickle.EMPTY_DICT + short("changed") + b"K\x05s" + pickle.TUPLE2  # (None, {...})
FIELD = pickle.EMPTY_DICT + short("changed") + b"K\x05s"
ATTACKS = {
    "slots of a class": METADATA + SLOTS + b"b",
    "slots of a private class": name(f"{DCP}.filesystem", "_StorageInfo") + SLOTS + b"b",
    "slots of a path class": PATH + SLOTS + b"b",
    "a state of a class": METADATA + FIELD + b"b",
    "a state of an enum": MEMBER + FIELD + b"b",
    "a state of a member": MEMBER + b"K\x02\x85R" + FIELD + b"b",
    "a state of a size": SIZE + b")\x85R" + FIELD + b"b",
    "an unknown field": METADATA + b")\x81" + FIELD + b"b",
    "a second state": METADATA + b")\x81}" + short("version") + b"Nsb" + FIELD + b"b",
    "a call of a class": METADATA + b")R",
    "a call of a function of torch": name("torch", "zeros") + b")R",
    "a dotted name": name("pathlib", "PosixPath.cwd") + b")R",
    "a dotted name of ours": name(f"{DCP}.metadata", "os.system") + b")R",
    "a dtype's method": name("torch", "float32.to_complex") + b")R",
    "an object of a dtype": name("torch", "float32") + b")\x81",
    "arguments of an object": METADATA + b"K\x05\x85\x81",
    "keyword arguments": METADATA + b")}\x92",
    "an instance of protocol 0": b"(i" + DCP.encode() + b".metadata\nMetadata\n",
    "an object of protocol 1": b"(" + METADATA + b"o",
    "an extension": b"\x82\x01",
    "a persistent id": b"Px\n",
    "a persistent object": b"K\x01Q",
    "a long integer": b"\x8b\x00\x00\x00\x7f",
    "an integer of 255 bytes": b"\x8a\xff" + b"\x01" * 255,
    "a byte array": b"\x96" + b"\xff" * 6 + b"\x00\x00",
    "a string of protocol 0": b"Vtext\n",
    "an unhashable key": b"}]Ns",
    "a key of an object": b"}" + METADATA + b")\x81Ns",
    "a key without a name": b"}" + name(f"{DCP}.metadata", "MetadataIndex") + b")\x81Ns",
    "an odd number of entries": b"}(Nu",
    "entries of a list": b"]NNs",
    "values appended to a dict": b"}Na",
    "values appended to a class": METADATA + b"(Ne",
    "many marks": b"(" * 1000,
    "a large stack": b"N" * 20_000,
    "a large memo": b"N" + pickle.MEMOIZE * 5_000,
    "a memo that is not there": b"h\x05",
    "a frame of any size": pickle.FRAME + b"\xff" * 7 + b"\x7f" + b"N",
    "a size of sizes": SIZE + SIZE + b")\x85R\x85\x85R",
    "a size of 1000": SIZE + b"(" + b"K\x01" * 1000 + b"t\x85R",
    "a path of a number": PATH + b"K\x05\x85R",
    "a function as a layout": LAYOUT + short("torch.load") + b"\x85R",
    "nothing": b"",
    "a number": b"K\x05",
    "an empty object": METADATA + b")\x81",
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_unneeded_pickle_operations_are_refused(attack: bytes) -> None:
    attributes = {kind: dict(vars(kind)) for kind in metadata_unpickler.CLASSES}
    with pytest.raises(UsageError, match=r"\.metadata (holds .*trust|is not the metadata)"):
        read(b"\x80\x04" + attack + b".")
    for kind, before in attributes.items():
        assert vars(kind).keys() == before.keys(), kind
        assert all(vars(kind)[name] is value for name, value in before.items()), kind
    assert not hasattr(pathlib.PosixPath, "changed")
    assert not hasattr(planner.WriteItemType.SHARD, "changed")


def test_a_large_memo_index_takes_no_memory() -> None:
    stored = pickle.dumps(sound(), protocol=4)
    # At the end: push None, put it at an index, and drop it.
    large = stored[:-1] + b"Nr\xff\xff\xff\xff0."
    assert read(large) == sound()


def test_names_of_torch_import_nothing() -> None:
    before = set(sys.modules)
    for attack in (name("torch", "onnx"), LAYOUT + short("torch.onnx") + b"\x85R"):
        with pytest.raises(UsageError):
            read(b"\x80\x04" + attack + b".")
    assert "torch.onnx" in before or "torch.onnx" not in sys.modules


WRONG_VALUES = {
    "a path that leaves the folder": ("relative_path", "../__0_0.distcp"),
    "an absolute path": ("relative_path", "/etc/passwd"),
    "a path in a folder": ("relative_path", "a/b.distcp"),
    "a path that is a number": ("relative_path", 5),
    "a negative offset": ("offset", -1),
    "a negative length": ("length", -1),
    "a length that is not whole": ("length", 0.5),
    "a length that is a boolean": ("length", True),
}


@pytest.mark.parametrize(("field", "value"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_storage_outside_the_folder_is_refused(field: str, value: object) -> None:
    stored = sound()
    object.__setattr__(next(iter(stored.storage_data.values())), field, value)
    with pytest.raises(UsageError, match=r"\.metadata (holds|is not)"):
        read(pickle.dumps(stored))


@pytest.mark.parametrize("kind", [torch.Size, tuple, list])
def test_places_of_chunks_are_sizes_tuples_or_lists(kind: type) -> None:
    """Megatron-FSDP writes lists."""
    stored = sound()
    chunk = stored.state_dict_metadata["w"].chunks[0]
    stored.state_dict_metadata["w"].chunks[0] = metadata.ChunkStorageMetadata(
        kind(chunk.offsets), kind(chunk.sizes)
    )
    found = read(pickle.dumps(stored)).state_dict_metadata["w"].chunks[0]
    assert list(found.offsets) == list(chunk.offsets)


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [((1, 0), (2, 3)), ((0,), (1,)), ((0, -1), (1, 3)), ((0, 0), (2, 1 << 40))],
)
def test_chunks_outside_of_their_tensor_are_refused(offsets: Any, sizes: Any) -> None:
    stored = sound()
    stored.state_dict_metadata["w"].chunks[0] = metadata.ChunkStorageMetadata(
        torch.Size(offsets), torch.Size(sizes)
    )
    with pytest.raises(UsageError, match="holds a .*chunk|holds a Chunk"):
        read(pickle.dumps(stored))


def write_checkpoint(folder: Path, length: int) -> Path:
    (folder / ".metadata").write_bytes(pickle.dumps(sound()))
    (folder / "__0_0.distcp").write_bytes(bytes(length))
    return folder / ".metadata"


def test_files_are_as_long_as_metadata_says(tmp_path: Path) -> None:
    reading = checkpoint_reading.MetadataPickle()
    with write_checkpoint(tmp_path, 12).open("rb") as file:
        assert reading.load(file) == sound()
    with write_checkpoint(tmp_path, 11).open("rb") as file:
        with pytest.raises(UsageError, match="__0_0.distcp is cut short: 11 bytes.*12 bytes"):
            reading.load(file)
    (tmp_path / "__0_0.distcp").unlink()
    with (tmp_path / ".metadata").open("rb") as file:
        with pytest.raises(UsageError, match="__0_0.distcp is missing"):
            reading.load(file)


def test_a_file_of_gigabytes_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_unpickler, "MAX_BYTES", 1 << 16)
    path = tmp_path / ".metadata"
    with path.open("wb") as file:
        file.truncate(10 << 30)
    with path.open("rb") as file, pytest.raises(UsageError, match="holds more than 65536 bytes"):
        checkpoint_reading.MetadataPickle().load(file)


class Colour(enum.Enum):
    RED = 1


class _WithState:
    """Pickled as a member of an enum that gets a state, as BUILD gives it."""

    def __init__(self, state: object) -> None:
        self.state = state

    def __reduce__(self) -> tuple[object, ...]:
        return Colour, (1,), self.state


@pytest.mark.parametrize("state", [{"_value_": 5}, (None, {"changed": 5})])
def test_an_object_does_not_change_the_members_of_enums(state: object) -> None:
    stored = io.BytesIO()
    torch.save({"args": _WithState(state)}, stored)
    stored.seek(0)
    with torch.serialization.safe_globals([Colour]):
        with pytest.raises(UsageError, match="the object holds a state for a member"):
            checkpoint_reading.load_object(stored, "the object")
    assert Colour.RED.value == 1 and not hasattr(Colour.RED, "changed")


def test_members_of_enums_are_read_whatever_the_version_of_python_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stored_member() -> io.BytesIO:
        stored = io.BytesIO()
        torch.save({"args": Colour.RED, "exit_signal": signal.SIGTERM}, stored)
        stored.seek(0)
        return stored

    def reduce_by_name(self: enum.Enum, protocol: Any) -> tuple[Any, ...]:
        return getattr, (type(self), self._name_)  # Python 3.11.2

    for cls in (enum.Enum, signal.Signals):
        monkeypatch.setattr(cls, "__reduce_ex__", reduce_by_name)
    with torch.serialization.safe_globals([Colour, signal.Signals]):
        with pytest.raises(UsageError, match="the object holds .*getattr"):
            checkpoint_reading.load_object(stored_member(), "the object")
        assert enum_pickles.is_needed()
        enum_pickles.apply()
        assert not enum_pickles.is_needed()
        found = checkpoint_reading.load_object(stored_member(), "the object")
    assert found == {"args": Colour.RED, "exit_signal": signal.SIGTERM}


def test_classes_of_optimizers_are_not_read() -> None:
    """Megatron stores them in parameter groups with --optimizer-cpu-offload."""
    stored = io.BytesIO()
    torch.save({"lr": 1e-6, "cpu_optimizer_cls": torch.optim.AdamW}, stored)
    stored.seek(0)
    found = checkpoint_reading.load_object(stored, "the object")
    assert found == {"lr": 1e-6, "cpu_optimizer_cls": None}


def test_a_call_of_an_optimizer_is_refused() -> None:
    class Called:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.optim.AdamW, ([torch.zeros(1)],)

    stored = io.BytesIO()
    torch.save({"args": Called()}, stored)
    stored.seek(0)
    with pytest.raises(UsageError, match="the object cannot be read"):
        checkpoint_reading.load_object(stored, "the object")


def test_an_object_that_expands_is_refused(tmp_path: Path) -> None:
    torch.save({"iteration": 3, "text": "x" * 100_000}, tmp_path / "saved.pt")
    path = tmp_path / "common.pt"
    with zipfile.ZipFile(tmp_path / "saved.pt") as saved:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as squeezed:
            for entry in saved.namelist():
                squeezed.writestr(entry, saved.read(entry))
    assert torch.load(path)["iteration"] == 3, "torch itself would expand it"
    with pytest.raises(UsageError, match=f"{path} holds the compressed entry"):
        checkpoint_reading.load_object(str(path), str(path))


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"PK\x03\x04"])
def test_object_of_other_bytes_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "common.pt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"{path} (holds|cannot be read)"):
        checkpoint_reading.load_object(str(path), str(path))
