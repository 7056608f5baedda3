"""What is read of a checkpoint's `.metadata`; whole checkpoints are in tests/dist."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.planner import WriteItemType

from mcore_rl.common.errors import UsageError
from mcore_rl.patches.torch import checkpoint_reading


class _Stored:
    """Pickled as `getattr(owner, name)`."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (self._owner, self._name)


def test_members_of_enums_are_read_as_python_before_3_11_4_stores_them() -> None:
    stored = pickle.dumps(_Stored(WriteItemType, "SHARD"))
    assert checkpoint_reading._MetadataUnpickler(io.BytesIO(stored)).load() is WriteItemType.SHARD


@pytest.mark.parametrize("name", ["mro", "__subclasses__", "name", "from_bytes"])
@pytest.mark.parametrize("owner", [WriteItemType, torch.Size])
def test_other_attributes_are_not_read(owner: type, name: str) -> None:
    stored = io.BytesIO(pickle.dumps(_Stored(owner, name)))
    with pytest.raises(UsageError, match="holds builtins.getattr, which is no part of a check"):
        checkpoint_reading._MetadataUnpickler(stored).load()
